# SPDX-License-Identifier: Apache-2.0
"""Which budget to choose for a model, a memory and a workload. Arithmetic only, no engine."""
