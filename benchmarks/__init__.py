# SPDX-License-Identifier: Apache-2.0
"""Matched measurements; figures only from real runs."""
