# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the worker counted since they were last asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class CompactionStats:
    """The worker's part. As a worker reports it, one rank's; within `PolicyStats`, of all ranks.

    Attributes:
        evicted_pairs, copied_pairs: (token, KV head) pairs of one layer each, summed over layers.
        seconds: Time of each step that compacted on the reporting rank, the first of the last
            pipeline stage; as its host sees it, or on a GPU with the native compactor the device's.
    """

    evicted_pairs: int = 0
    copied_pairs: int = 0
    seconds: list[float] = field(default_factory=list)


class FinishedRequest(NamedTuple):
    """A request that left the scheduler, whatever the reason; tokens in the cache then."""

    policy: str
    absolute_tokens: int
    physical_tokens: int


@dataclass(slots=True)
class PolicyStats:
    """The scheduler's part, and what the worker reported to it. Counts since the last time.

    Attributes:
        rounds: Rounds sent to the worker for the first time.
        replayed_rounds: Rounds sent to the worker again, after a preemption.
        freed_blocks: Blocks that rounds returned to the pool.
        copied_blocks: Shared blocks that rounds copied before writing.
        uncached_blocks: Blocks that rounds took out of the prefix cache.
        dropped_plans: Rounds planned but not sent, their request having been preempted.
        replayed_tokens: Tokens computed again after preemptions.
        running: Running requests by policy, now.
        saved_kv_bytes: What the running requests would hold beyond what they do, had they the
            full cache; bytes on rank 0, now.
    """

    rounds: int = 0
    replayed_rounds: int = 0
    freed_blocks: int = 0
    copied_blocks: int = 0
    uncached_blocks: int = 0
    dropped_plans: int = 0
    replayed_tokens: int = 0
    compaction: CompactionStats = field(default_factory=CompactionStats)
    finished: list[FinishedRequest] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    saved_kv_bytes: int = 0
