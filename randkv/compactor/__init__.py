# SPDX-License-Identifier: Apache-2.0
"""Compactors: carry out round plans on KV cache tensors. All back ends give the same bytes."""

from randkv.compactor.base import Compactor, PairCounts

BACK_END = "pytorch"
"""The one that the engine uses."""

__all__ = ["BACK_END", "Compactor", "PairCounts"]
