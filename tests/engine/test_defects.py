# SPDX-License-Identifier: Apache-2.0
"""One test for each defect that others hit when they evicted inside a serving engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from randkv.selection import evicted_slots, stream_key
from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, Watcher, assert_all_exact, assert_exact, engine
from tests.engine.oracle import Oracle


def test_no_in_flight_token_is_written_to_a_freed_block(
    any_engine: Engine, watcher: Watcher, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """Every slot written in a step lies in a block that its request owns in that step."""
    for i in range(6):
        any_engine.add(f"r{i}", prompts.any(5, 48), 150)
    runner = any_engine.runner
    mapping = runner.input_batch.block_table[0].slot_mapping.gpu
    checked = 0
    original = watcher.check

    def check() -> None:
        nonlocal checked
        original()
        step = watcher.steps[-1]
        start = 0
        for request_id in runner.input_batch.req_ids:
            stop = start + step.num_scheduled_tokens[request_id]
            written = set((mapping[start:stop] // 16).tolist())
            owned = runner.requests[request_id].block_ids[0]
            assert written <= set(owned[-3:] if stop == start + 1 else owned)
            start, checked = stop, checked + 1

    watcher.check = check  # type: ignore[method-assign]
    outputs = any_engine.run()
    assert checked > 500
    assert_all_exact(tiny_oracle, outputs.values())


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("buffer_size", [1, 7, 8, 16])
def test_boundary_blocks_are_there_in_time(
    any_engine: Engine,
    watcher: Watcher,
    tiny_oracle: Oracle,
    prompts: Prompts,
    prompt_len: int,
    buffer_size: int,
) -> None:
    """Around block boundaries of P, K, K + r and L, each request has the blocks it needs."""
    for budget in (33, 40, 48):
        policy = {"type": "randkv", "budget": budget, "buffer_size": buffer_size}
        any_engine.add(f"k{budget}", prompts(prompt_len), 70, policy)
    assert_all_exact(tiny_oracle, any_engine.run().values())
    assert watcher.rounds


def test_a_round_below_the_budget_does_not_switch_later_ones_off(
    any_engine: Engine, watcher: Watcher, prompts: Prompts
) -> None:
    """The first round evicts one token; every later one evicts r, on and on."""
    any_engine.add("r", prompts(10), 400)
    report = any_engine.run()["r"].kv_cache
    sizes = [plan.old_len - plan.new_len for plan in watcher.rounds]
    assert sizes == [1] + [8] * (len(sizes) - 1)
    assert [plan.round_index for plan in watcher.rounds] == list(range(len(sizes)))
    assert report["rounds"] == len(sizes) == (10 + 400 - 2 - 57) // 8 + 1


def test_stale_evicted_counts_under_asynchronous_scheduling_show_near_100_requests(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    with engine(
        tiny_model, asynchronous=True, kv_cache_policy=POLICY, num_gpu_blocks_override=513
    ) as running:
        watching = Watcher(running)
        for i in range(110):
            running.add(f"r{i}", prompts.any(30, 48), 90)
        outputs = running.run()
        assert max(len(step.num_scheduled_tokens) for step in watching.steps) >= 100
        assert max(len(step.kv_cache_rounds or ()) for step in watching.steps) > 5
    assert_all_exact(tiny_oracle, outputs.values())


def test_no_stale_count_after_preemption(
    any_engine: Engine, watcher: Watcher, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """A resumed request starts with nothing evicted, and replays the same rounds."""
    any_engine.add("r", prompts(20), 200)
    for _ in range(120):
        any_engine.step()
    before = [(p.round_index, p.old_len, p.new_len, p.key) for p in watcher.rounds]
    any_engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    output = any_engine.run()["r"]
    assert_exact(tiny_oracle, output)
    after = [(p.round_index, p.old_len, p.new_len, p.key) for p in watcher.rounds]
    assert len(before) > 5
    assert after[len(before) : 2 * len(before)] == before
    assert output.kv_cache["rounds"] == len(after) - len(before)


@pytest.mark.parametrize("buffer_size", [8, 64])
def test_compacted_blocks_never_enter_the_prefix_cache(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts, buffer_size: int
) -> None:
    """Neither when slots are allocated nor when output arrives; later requests stay right.

    With the long buffer, blocks that were filled after the first round live for many steps before
    the next one, and the request ends in between: hashed, they would stay in the prefix cache.
    """
    prompt = prompts(20)
    policy = {"type": "randkv", "budget": 48, "buffer_size": buffer_size}
    any_engine.add("r", prompt, 145, policy)
    for _ in range(140):
        any_engine.step()
    blocks = any_engine.blocks_of("r")
    assert any_engine.request("r").kv_cache_state.rounds > 0
    assert [block.block_hash is not None for block in blocks] == [True] + [False] * (
        len(blocks) - 1
    )
    tokens = prompt + list(any_engine.run()["r"].outputs[0].token_ids)
    first_round = 48 + buffer_size + 1
    for i, length in enumerate((60, 100, 130, 165)):
        any_engine.add(f"dense-{i}", tokens[:length], 40, "dense")
        output = any_engine.run()[f"dense-{i}"]
        assert_exact(tiny_oracle, output)
        if i == 0:
            assert output.num_cached_tokens <= first_round


def test_every_block_returns_to_the_pool(any_engine: Engine, prompts: Prompts) -> None:
    """During the run as a round ends, and all of them in the end."""
    any_engine.add("r", prompts(20), 300)
    held = []
    while any_engine.llm.llm_engine.has_unfinished_requests():
        any_engine.step()
        held.append(any_engine.num_blocks - any_engine.pool.get_num_free_blocks())
    assert max(held) == -(-(48 + 2 * 8) // 16)
    any_engine.check_pool()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_no_round_in_the_middle_of_a_chunked_prefill(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, asynchronous: bool
) -> None:
    with engine(
        tiny_model,
        asynchronous=asynchronous,
        kv_cache_policy={"type": "randkv", "budget": 200, "buffer_size": 4},
        max_num_batched_tokens=16,
        max_num_seqs=8,
    ) as running:
        watching = Watcher(running)
        for i in range(4):
            running.add(f"r{i}", prompts.any(150, 200), 100)
        outputs = running.run()
        prompt_steps = [
            s for s in watching.steps if max(s.num_scheduled_tokens.values(), default=0) > 1
        ]
        assert len(prompt_steps) > 20
        for plan in watching.rounds:
            assert plan.old_len > 204 >= plan.prompt_len
    assert_all_exact(tiny_oracle, outputs.values())


def test_a_second_engine_in_the_process_starts_clean(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    prompt = prompts(20)
    seen = set()
    for _ in range(2):
        with engine(tiny_model, kv_cache_policy=POLICY) as running:
            for _ in range(2):
                running.add("r", prompt, 100)
                output = running.run()["r"]
                assert_exact(tiny_oracle, output)
                seen.add(tuple(output.outputs[0].token_ids))
            assert running.runner.kv_cache_policy.num_rounds == 2 * output.kv_cache["rounds"]
    assert len(seen) == 1


def test_a_policy_never_silently_does_nothing(any_engine: Engine, prompts: Prompts) -> None:
    """The report says 0 when the output was shorter than the budget."""
    any_engine.add("short", prompts(10), 40)
    any_engine.add("long", prompts(10), 80)
    outputs = any_engine.run()
    assert outputs["short"].kv_cache["rounds"] == outputs["short"].kv_cache["evicted_tokens"] == 0
    assert outputs["long"].kv_cache["evicted_tokens"] > 0


def test_the_default_seed_gives_layers_and_heads_different_masks() -> None:
    key = stream_key("r", 0)
    masks = {
        tuple(evicted_slots(key, 0, layer, head, 8, 136, 16).tolist())
        for layer in range(4)
        for head in range(4)
    }
    assert len(masks) == 16
