# SPDX-License-Identifier: Apache-2.0
"""A fixed workload on whatever vLLM is first on the path.

``python -m benchmarks.workload MODEL [POLICY]`` reads one command a line and answers each with one
line of JSON. ``record``: every output token, and the free blocks after every step. ``time N``:
seconds of a run with N output tokens per request. Without POLICY, vLLM gets no option that an
unpatched one does not know.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from benchmarks.engine_pair import answer_commands, own_stdout

NUM_REQUESTS = 24
NUM_RECORDED_TOKENS = 150


def start(model: str, policy: str | None) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=16,
        num_gpu_blocks_override=129,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=32,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=2**28,
        disable_log_stats=True,
        **({} if policy is None else {"kv_cache_policy": policy}),
    )


def run(llm: Any, max_tokens: int) -> tuple[dict[str, list[int]], list[int]]:
    """Chunked prefills, shared prefixes and preemptions. Tokens by request, free blocks by step."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(1)
    shared = [rng.randrange(2, 500) for _ in range(60)]
    engine = llm.llm_engine
    engine.reset_prefix_cache()
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i in range(NUM_REQUESTS):
        prompt = shared[: rng.randrange(0, 60)] + [rng.randrange(2, 500) for _ in range(20)]
        engine.add_request(f"r{i}", TokensPrompt(prompt_token_ids=prompt), params)
    tokens: dict[str, list[int]] = {}
    free_blocks = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        free_blocks.append(pool.get_num_free_blocks())
    return tokens, free_blocks


def main() -> int:
    answers = own_stdout()
    llm = start(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    run(llm, NUM_RECORDED_TOKENS)  # warm up

    def answer(command: str, *arguments: str) -> dict[str, Any]:
        if command == "time":
            began = time.perf_counter()
            run(llm, int(arguments[0]))
            return {"seconds": time.perf_counter() - began}
        tokens, free_blocks = run(llm, NUM_RECORDED_TOKENS)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        return {
            "tokens": tokens,
            "free_blocks": free_blocks,
            "is_patched": hasattr(scheduler, "kv_cache_policy"),
        }

    answer_commands(answers, answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
