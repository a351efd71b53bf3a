# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: decides rounds, owns the physical lengths, keeps block rules.

A round is carried out in the scheduler's books before any slot of the step is allocated, so that
the blocks it frees serve every request of the step, and on the worker at the start of that step,
before anything else touches the cache. Rounds of one step run in the order they were decided: a
block that one round freed may be the target of a later round's copy on write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from randkv.config import RandKVConfig, RequestPolicy
from randkv.planner import BlockCopy, RoundPlan, is_due, next_due
from randkv.selection import stream_key
from randkv.stats import CompactionStats, FinishedRequest, PolicyStats
from randkv.vllm.ranks import RankCounts
from randkv.vllm.report import KVCacheReport


class Cache(NamedTuple):
    """A request's cache in numbers."""

    computed_tokens: int
    evicted_tokens: int
    rounds: int


class RequestState:
    """What the scheduler remembers of one request under a policy.

    With `C` computed tokens the request holds ``C - evicted_tokens`` slots. Rounds fall at fixed
    `C`, so a preempted request replays the same rounds from its policy alone.
    """

    def __init__(self, policy: RequestPolicy) -> None:
        self.policy = policy
        self.config = policy.config
        self.key = stream_key(policy.request_key, policy.config.seed) if policy.config else None
        self.evicted_tokens = 0
        self.rounds = 0
        # Tokens of [resumed_at, _lost.computed_tokens) are computed again after a preemption.
        self.resumed_at = 0
        self._lost = Cache(0, 0, 0)
        self._replayed_before = 0
        self.reported: tuple[int, int] | None = None  # rounds, preemptions

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RequestState:
        return cls(RequestPolicy.from_dict(value))

    def replayed_tokens(self, computed_tokens: int) -> int:
        again = min(computed_tokens, self._lost.computed_tokens) - self.resumed_at
        return self._replayed_before + max(again, 0)

    def is_replaying(self, computed_tokens: int) -> bool:
        """Whether what the next token is computed from was there before a preemption."""
        return computed_tokens < self._lost.computed_tokens

    def cache(self, computed_tokens: int) -> Cache:
        """The cache as it is, or as it was when lost, while it has not been replayed so far.

        A preempted request can still be finished by output that was in flight: what shaped that
        output is the cache it lost.
        """
        return max(Cache(computed_tokens, self.evicted_tokens, self.rounds), self._lost)

    def forget_cache(self, computed_tokens: int) -> None:
        """The request lost its blocks with `computed_tokens` computed."""
        self._replayed_before = self.replayed_tokens(computed_tokens)
        self._lost = self.cache(computed_tokens)
        self.resumed_at = self._lost.computed_tokens
        self.evicted_tokens = 0
        self.rounds = 0


def _config_of(request: Request) -> RandKVConfig | None:
    """What the request runs under; None for a dense one."""
    return None if request.kv_cache_state is None else request.kv_cache_state.config


class SchedulerPolicy:
    """One per scheduler. Reads and changes the scheduler's own block pool and block lists.

    Attributes:
        stats: Since they were last taken; for ever, in an engine that does not log stats.
        ranks: The counts of all ranks; None when there is one, which reports with its output.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        managers = kv_cache_manager.coordinator.single_type_managers
        assert len(managers) == 1, f"{len(managers)} KV cache groups"
        self._manager = managers[0]
        config = kv_cache_manager.kv_cache_config
        self._block_bytes = sum(t.size for t in config.kv_cache_tensors) // config.num_blocks
        self._log_stats = kv_cache_manager.log_stats
        self.stats = PolicyStats()
        self.ranks: RankCounts | None = None
        self._replaying: dict[str, Request] = {}
        self._pool = kv_cache_manager.block_pool
        self._block_size = self._manager.block_size
        self._max_model_len = kv_cache_manager.max_model_len
        self._planned: dict[str, RoundPlan] = {}
        kv_cache_manager.kv_cache_policy = self

    def cap_chunk(self, request: Request, computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens to schedule, so that the request's computed tokens stop where a round is due."""
        state = request.kv_cache_state
        if state is None:
            return num_new_tokens
        if request.num_computed_tokens == 0:  # admission: a prefix hit is not computed again
            state.resumed_at = computed_tokens
        if state.config is None:
            return num_new_tokens
        return min(num_new_tokens, next_due(state.config, computed_tokens) - computed_tokens)

    def cap_prefix_hit(self, request: Request, max_hit: int) -> int:
        """Longest prefix hit in tokens: cached blocks beyond ``K + r`` were attended densely."""
        config = _config_of(request)
        return max_hit if config is None else min(max_hit, config.compacted_len)

    def admission_len(self, request: Request, num_tokens: int) -> int:
        """Tokens for which admission must find room."""
        config = _config_of(request)
        return num_tokens if config is None else min(num_tokens, config.max_physical_len)

    def num_evicted(self, request: Request) -> int:
        return 0 if request.kv_cache_state is None else request.kv_cache_state.evicted_tokens

    def run_due_rounds(self, running: Iterable[Request]) -> None:
        """Carry out every round that is due before this step.

        One that lacks blocks for copy on write is left to `run_due_round`, whose caller preempts.
        """
        for request in running:
            if not self._is_passed_over(request):
                self.run_due_round(request)

    def _is_passed_over(self, request: Request) -> bool:
        """Whether no token of the request can be scheduled in this step.

        In a pipeline, because the token to compute next has not come back yet; with asynchronous
        scheduling, because the step with the last token is under way. Either may be the last step.

        Source: the conditions by which `Scheduler.schedule` passes over such a request.
        """
        in_flight = request.num_output_placeholders
        last = request.num_prompt_tokens + request.max_tokens
        computed = request.num_computed_tokens
        if computed >= request.num_tokens + in_flight:
            return True
        reaches_max_tokens = in_flight > 0 and computed + 2 - in_flight >= last
        return bool(reaches_max_tokens or computed >= self._max_model_len - 1)

    def run_due_round(self, request: Request) -> bool:
        """Carry out the round that is due for `request`, if any, in the scheduler's books.

        Blocks for copy on write are reserved before anything is released.

        Returns:
            False when there are not enough free blocks for that; nothing has changed then.
        """
        state = request.kv_cache_state
        if state is None or state.config is None:
            return True
        computed = request.num_computed_tokens
        if not is_due(state.config, computed, state.evicted_tokens):
            return True
        prompt_len = request.num_prompt_tokens
        assert computed >= prompt_len, f"round at {computed} inside a prompt of {prompt_len}"
        old_len = computed - state.evicted_tokens
        new_len = state.config.compacted_len
        blocks = self._manager.req_to_blocks[request.request_id]
        num_blocks = -(-new_len // self._block_size)
        assert len(blocks) * self._block_size >= old_len, (
            f"{len(blocks)} blocks of {self._block_size} for {old_len} slots"
        )

        # [0, first) full prompt blocks, may be shared, never written
        # [first, num_blocks) written by this round or by the tokens after it: must be private
        # [num_blocks, len(blocks)) released
        first = prompt_len // self._block_size
        shared = [i for i in range(first, num_blocks) if blocks[i].ref_cnt > 1]
        if len(shared) > self._pool.get_num_free_blocks():
            return False
        copies = []
        for index, target in zip(shared, self._pool.get_new_blocks(len(shared)), strict=True):
            source = blocks[index]
            copies.append(BlockCopy(index, source.block_id, target.block_id))
            blocks[index] = target
            self._pool.free_blocks([source])
        hashed = {b.block_id for b in blocks[first:num_blocks] if b.block_hash is not None}
        self._pool.evict_blocks(hashed)
        self.stats.copied_blocks += len(copies)
        self.stats.uncached_blocks += len(hashed)
        self.stats.freed_blocks += len(blocks) - num_blocks
        tail = blocks[num_blocks:]
        del blocks[num_blocks:]
        self._pool.free_blocks(reversed(tail))

        assert state.key is not None
        self._planned[request.request_id] = RoundPlan(
            request_id=request.request_id,
            round_index=state.rounds,
            key=state.key,
            prompt_len=prompt_len,
            old_len=old_len,
            new_len=new_len,
            buffer_size=state.config.buffer_size,
            num_blocks=num_blocks,
            block_copies=tuple(copies),
        )
        state.evicted_tokens += old_len - new_len
        state.rounds += 1
        return True

    def on_preempt(self, request: Request) -> None:
        """The request lost its blocks: drop a plan of this step and start over on resume."""
        if self._planned.pop(request.request_id, None) is not None:
            self.stats.dropped_plans += 1
        if request.kv_cache_state is not None:
            request.kv_cache_state.forget_cache(request.num_computed_tokens)
            self._replaying[request.request_id] = request

    def take_rounds(self, num_scheduled_tokens: Mapping[str, int]) -> list[RoundPlan] | None:
        """The rounds of this step, in the order they were decided; None when there are none.

        Args:
            num_scheduled_tokens: Tokens of this step by request, not yet counted as computed.
        """
        for request_id in self._replaying.keys() & num_scheduled_tokens.keys():
            self._count_replay(request_id, num_scheduled_tokens[request_id])
        if not self._planned:
            return None
        rounds = list(self._planned.values())
        self._planned.clear()
        self.stats.rounds += len(rounds)
        return rounds

    def _count_replay(self, request_id: str, num_tokens: int) -> None:
        request = self._replaying[request_id]
        state, computed = request.kv_cache_state, request.num_computed_tokens
        before = state.replayed_tokens(computed)
        self.stats.replayed_tokens += state.replayed_tokens(computed + num_tokens) - before
        if request_id in self._planned and state.is_replaying(computed):
            self.stats.rounds -= 1
            self.stats.replayed_rounds += 1
        if not state.is_replaying(computed + num_tokens):
            del self._replaying[request_id]

    def on_finish(self, request: Request) -> None:
        """The request leaves the scheduler, for whatever reason."""
        self._replaying.pop(request.request_id, None)
        state = request.kv_cache_state
        if state is None or not self._log_stats:
            return
        cache = state.cache(request.num_computed_tokens)
        computed = self._tokens_in_cache(request, cache)
        if computed:
            self.stats.finished.append(
                FinishedRequest(state.policy.type, computed, computed - cache.evicted_tokens)
            )

    @staticmethod
    def _tokens_in_cache(request: Request, cache: Cache) -> int:
        """The last sampled token is not in the cache; one scheduled beyond it is not counted."""
        return min(cache.computed_tokens, int(request.num_tokens) - 1)

    def add_compaction(self, compaction: CompactionStats | None) -> None:
        """Take in what the worker counted."""
        if compaction is not None and self._log_stats:
            self.stats.compaction.seconds += compaction.seconds
            if self.ranks is None:
                self._add_pairs(compaction.evicted_pairs, compaction.copied_pairs)
            else:
                self.ranks.on_compaction()

    def _add_pairs(self, evicted: int, copied: int) -> None:
        self.stats.compaction.evicted_pairs += evicted
        self.stats.compaction.copied_pairs += copied

    def take_stats(self, running: Collection[Request]) -> dict[str, Any]:
        """`PolicyStats` since the last time, as a dict: it travels to the front end."""
        if self.ranks is not None:
            self._add_pairs(*self.ranks.take(idle=not running))
        stats, self.stats = self.stats, PolicyStats()
        saved_blocks = 0
        for request in running:
            state = request.kv_cache_state
            if state is None:
                continue
            stats.running[state.policy.type] = stats.running.get(state.policy.type, 0) + 1
            if state.evicted_tokens:
                dense = -(-request.num_computed_tokens // self._block_size)
                saved_blocks += dense - len(self._manager.req_to_blocks[request.request_id])
        stats.saved_kv_bytes = max(saved_blocks, 0) * self._block_bytes
        return asdict(stats)

    def report(self, request: Request, finished: bool) -> KVCacheReport | None:
        """What to send with this step's output.

        That is a report when the request finished, when the front end may find a stop string in
        this very output, and for the sake of a later abort with the first output and after every
        round or preemption; else None.
        """
        state = request.kv_cache_state
        if state is None:
            return None
        may_stop = request.sampling_params is not None and bool(request.sampling_params.stop)
        cache = state.cache(request.num_computed_tokens)
        news = (cache.rounds, request.num_preemptions)
        if not (finished or may_stop or state.reported != news):
            return None
        state.reported = news
        config = state.config
        computed = self._tokens_in_cache(request, cache)
        return {
            "policy": state.policy.type,
            "budget": config.budget if config else None,
            "buffer_size": config.buffer_size if config else None,
            "seed": config.seed if config else None,
            "request_key": state.policy.request_key,
            "rounds": cache.rounds,
            "evicted_tokens": cache.evicted_tokens,
            "physical_tokens": computed - cache.evicted_tokens,
            "long_prompt": state.policy.long_prompt,
            "replayed_tokens": state.replayed_tokens(request.num_computed_tokens),
            "preemptions": request.num_preemptions,
        }
