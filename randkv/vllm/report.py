# SPDX-License-Identifier: Apache-2.0
"""What the engine did for a request: ``RequestOutput.kv_cache``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class KVCacheReport(TypedDict):
    """Counted by the scheduler as it carried things out; not what the policy predicts.

    An aborted request has the last report that the scheduler had sent: with its first output, and
    after every round.

    Attributes:
        policy: ``"randkv"`` or ``"dense"``; the next three are None for dense.
        budget, buffer_size, seed: As resolved for this request.
        request_key: The identity that the keep-sets are a function of.
        rounds: Rounds that shaped the cache; a round repeated after a preemption counts once.
        evicted_tokens: Positions that each KV head dropped.
        physical_tokens: Slots held when the report was made, or last, if preempted then.
        replayed_tokens: Tokens computed again after preemptions.
        preemptions: How often the request was preempted.
        long_prompt: The request ran dense because its prompt was longer than its budget.
    """

    policy: str
    budget: int | None
    buffer_size: int | None
    seed: int | None
    request_key: str
    rounds: int
    evicted_tokens: int
    physical_tokens: int
    replayed_tokens: int
    preemptions: int
    long_prompt: bool


COUNTS = ("rounds", "evicted_tokens", "physical_tokens", "replayed_tokens", "preemptions")


def summed(reports: Sequence[KVCacheReport]) -> KVCacheReport:
    """The first report, its `COUNTS` summed over all."""
    sums = {name: sum(dict(report)[name] for report in reports) for name in COUNTS}  # type: ignore[misc]
    return {**reports[0], **sums}  # type: ignore[typeddict-item]


def merge(reports: Sequence[KVCacheReport]) -> KVCacheReport:
    """Counts summed over the samples of one request; the key is the request's own."""
    parent_key, _, _ = reports[0]["request_key"].rpartition("/")
    return {**summed(reports), "request_key": parent_key}
