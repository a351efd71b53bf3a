# SPDX-License-Identifier: Apache-2.0
"""Everything at once, at random but repeatably, in a pool that is far too small."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput
from vllm.v1.core.sched.interface import PauseState

from randkv.planner import replay
from tests.engine.harness import POLICY, Engine, Watcher, assert_exact, engine, policy_of
from tests.engine.models import TINY_VOCABULARY
from tests.engine.oracle import Oracle

MAX_MODEL_LEN = 200


class Traffic:
    """Requests whose prompts are cut from what others generated, so that blocks are shared."""

    def __init__(self, running: Engine, rng: random.Random) -> None:
        self._running = running
        self._rng = rng
        self._texts = [self._random_prompt(n) for n in (18, 33, 5)]
        self.live: set[str] = set()
        self.num_added = 0

    def _random_prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(2, TINY_VOCABULARY) for _ in range(num_tokens)]

    def add(self) -> None:
        rng = self._rng
        requests = self._running.scheduler.requests.values()
        text = rng.choice([*self._texts, *(list(r.all_token_ids) for r in requests)])
        policy: Any = "dense"
        prompt = text[: rng.randint(1, min(len(text), 150))]
        if rng.random() < 0.7:
            budget, buffer_size = rng.choice([20, 33, 48, 60]), rng.choice([0, 1, 7, 8, 16])
            policy = {"type": "randkv", "budget": budget, "buffer_size": buffer_size}
            prompt = prompt[: rng.choice([budget, 20])]
        params: dict[str, Any] = {}
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(2, TINY_VOCABULARY), 8)
        max_tokens = rng.randint(1, MAX_MODEL_LEN - len(prompt))
        priority = rng.randint(0, 2)
        for _ in range(rng.choice([1, 1, 2, 3])):  # twins share what they generate
            request_id = f"r{self.num_added}"
            self._running.add(request_id, prompt, max_tokens, policy, priority=priority, **params)
            self.live.add(request_id)
            self.num_added += 1

    def finish(self, output: RequestOutput) -> None:
        self.live.discard(output.request_id)
        text = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
        self._texts = [*self._texts[-11:], text]

    def disturb(self) -> None:
        """Now and then: abort one, reset the prefix cache under running requests, pause."""
        dice = self._rng.random()
        if dice < 0.005 and self.live:
            victim = self._rng.choice(sorted(self.live))
            self._running.llm.llm_engine.abort_request([victim])
            self.live.discard(victim)
        elif dice < 0.01:
            self._running.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        paused = self._rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
        is_paused = self._rng.random() < 0.05
        self._running.scheduler.set_pause_state(paused if is_paused else PauseState.UNPAUSED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_is_exact(tiny_model: Path, tiny_oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    outputs: list[RequestOutput] = []
    with engine(
        tiny_model,
        asynchronous=bool(seed % 2),
        scheduling_policy=["fcfs", "priority"][seed // 2],
        kv_cache_policy=POLICY,
        num_gpu_blocks_override=15,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([6, 12]),
        max_num_batched_tokens=rng.choice([24, 64, 256]),
    ) as running:
        watching = Watcher(running)
        traffic = Traffic(running, rng)
        for _ in range(20000):
            if traffic.num_added < 80 and len(traffic.live) < 10 and rng.random() < 0.3:
                traffic.add()
            traffic.disturb()
            for output in running.step():
                traffic.finish(output)
                outputs.append(output)
            if traffic.num_added >= 80 and not traffic.live:
                break
        assert not traffic.live, f"still there after 20,000 steps: {traffic.live}"
        running.scheduler.set_pause_state(PauseState.UNPAUSED)
        running.run()
        dropped = running.scheduler.kv_cache_policy.stats.dropped_plans
    assert len(outputs) > 60
    assert sum(out.kv_cache["preemptions"] for out in outputs) > 20
    assert sum(bool(plan.block_copies) for plan in watching.rounds) > 0
    assert dropped > 0
    for output in outputs:
        assert_exact(tiny_oracle, output)
        assert_plausible(output)


def assert_plausible(output: RequestOutput) -> None:
    """The engine's count of rounds is the replay's, or one more for a step that came to nothing."""
    policy = policy_of(output)
    if policy.config is None:
        assert output.kv_cache["rounds"] == 0
        return
    computed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    due = [
        done.computed_tokens
        for done in replay(
            policy.config,
            request_key=policy.request_key,
            prompt_len=len(output.prompt_token_ids),
            num_tokens=computed,
            num_layers=1,
            num_kv_heads=1,
        )
    ]
    shaped = sum(c < computed for c in due)
    assert output.kv_cache["rounds"] in (shaped, len(due)), (output.request_id, output.kv_cache)
