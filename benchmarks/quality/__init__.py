# SPDX-License-Identifier: Apache-2.0
"""What the policy costs in quality, on the real engine; see docs/quality.md."""
