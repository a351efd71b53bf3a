# SPDX-License-Identifier: Apache-2.0
"""Matched serving runs: the full cache against the policy, in pairs, over HTTP."""
