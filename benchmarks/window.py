# SPDX-License-Identifier: Apache-2.0
"""The control arm: the same rounds, but the *oldest* generated tokens go instead of random ones.

A sliding window beside the protected prompt, with the same budget, rounds and number of moves. It
runs in the PyTorch compactor, which is slower than the native one. A benchmark's arm, not a policy
of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from randkv.compactor.pytorch import PyTorchCompactor
from randkv.planner import RoundPlan


@cache
def slots_by_age(prompt_len: int, new_len: int, interval: int, rounds: int) -> tuple[int, ...]:
    """Slots ``P .. N - 1`` after `rounds` rounds, that of the oldest token first."""
    if rounds == 0:
        return tuple(range(prompt_len, new_len))
    before = slots_by_age(prompt_len, new_len, interval, rounds - 1)
    num_evicted = 1 if rounds == 1 else interval  # as `planner.is_due` has it
    # Sources, oldest first, go to the holes in ascending order.
    return before[num_evicted:] + tuple(sorted(before[:num_evicted]))


@dataclass(frozen=True, slots=True)
class WindowPlan(RoundPlan):
    """A round whose selection is the oldest candidates."""

    def evicted_slots(
        self, layers: NDArray[np.integer], kv_heads: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        interval = max(self.buffer_size, 1)
        num_evicted = self.old_len - self.new_len
        assert num_evicted == (1 if self.round_index == 0 else interval), (
            f"round {self.round_index} evicts {num_evicted} tokens, {interval} decoded since"
        )
        oldest = slots_by_age(self.prompt_len, self.new_len, interval, self.round_index)
        evicted = np.sort(np.asarray(oldest[:num_evicted], np.int32))
        return np.tile(evicted, (len(layers), len(kv_heads), 1))


class WindowCompactor(PyTorchCompactor):
    """The PyTorch compactor with a window's selection."""

    def compact(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        super().compact([(_as_window(plan), block_ids) for plan, block_ids in rounds])


def _as_window(plan: RoundPlan) -> WindowPlan:
    return WindowPlan(**{field.name: getattr(plan, field.name) for field in fields(RoundPlan)})


def use_window(worker: Any) -> None:
    """Make a worker evict the oldest. Its engine runs with ``kv_cache_compactor="pytorch"``."""
    policy = worker.model_runner.kv_cache_policy
    assert type(policy.compactor) in (PyTorchCompactor, WindowCompactor), policy.compactor
    policy.compactor.__class__ = WindowCompactor


class WorkerExtension:
    """For ``--worker-extension-cls``: adds `use_window` to what ``/collective_rpc`` can call."""

    def use_window(self) -> str:
        use_window(self)
        return WindowCompactor.__name__
