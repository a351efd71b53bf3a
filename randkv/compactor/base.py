# SPDX-License-Identifier: Apache-2.0
"""The interface that every compactor back end implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from randkv.planner import RoundPlan


class PairCounts(NamedTuple):
    """(token, KV head) pairs of one layer each, summed over layers."""

    evicted: int
    copied: int


class Progress(NamedTuple):
    """What a compactor has finished.

    Attributes:
        pairs: The back end's own count of what it did.
        seconds: Time on the device, one entry per `Compactor.compact`, of a back end that runs
            behind the host; None where the time of the call says it.
    """

    pairs: PairCounts
    seconds: list[float] | None = None


class Compactor(Protocol):
    """Carries out rounds on the caches it was made for."""

    def compact(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        """Copy the sources of every round into its holes, in the order of the device's stream.

        Mutates the KV caches, holes only. Rounds are of different requests and may be carried
        out in any order or at once; carrying one out twice changes nothing.

        Args:
            rounds: Plans, each with the request's block ids in slot order, before the round.
        """
        ...

    def take_progress(self) -> Progress:
        """What was finished since the last time; never waits for the device."""
        ...
