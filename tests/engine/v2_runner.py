# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from tests.engine.conftest import Prompts
from tests.engine.harness import Engine, assert_exact
from tests.engine.oracle import Oracle


def test_probe(any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts) -> None:
    assert "gpu.model_runner" in type(any_engine.runner).__mro__[1].__module__
    t=time.time()
    any_engine.add("a", prompts(20), 100)
    any_engine.add("b", prompts(30), 100, {"type": "randkv", "budget": 40, "buffer_size": 4})
    any_engine.add("dense", prompts(20), 100, "dense")
    outputs = any_engine.run()
    print("SECONDS", time.time()-t)
    for out in outputs.values():
        print(out.kv_cache)
        assert_exact(tiny_oracle, out)
