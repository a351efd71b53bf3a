# SPDX-License-Identifier: Apache-2.0
"""``--kv-cache-compactor``: the engine runs what was chosen, with one outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from randkv.compactor.native import CPUCompactor
from randkv.compactor.pytorch import PyTorchCompactor
from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, assert_all_exact, engine
from tests.engine.oracle import Oracle


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [({}, CPUCompactor), ({"kv_cache_compactor": "pytorch"}, PyTorchCompactor)],
    ids=["native by default", "pytorch"],
)
def test_the_chosen_back_end_runs_and_is_exact(
    tiny_model: Path, tiny_oracle: Oracle, arguments: dict[str, Any], kind: type
) -> None:
    prompts = Prompts(5)
    with engine(tiny_model, kv_cache_policy=POLICY, **arguments) as running:
        policy = running.runner.kv_cache_policy
        assert type(policy.compactor) is kind
        for i in range(3):
            running.add(f"r{i}", prompts(20), 120)
        outputs = running.run()
        assert_all_exact(tiny_oracle, outputs.values())
        heads = 4  # of both layers
        evicted = sum(output.kv_cache["evicted_tokens"] for output in outputs.values())
        assert policy.pairs == (heads * evicted, heads * evicted)
        assert evicted > 0


def test_an_unknown_back_end_is_refused(tiny_model: Path) -> None:
    with (
        pytest.raises(Exception, match="native.*pytorch"),
        engine(tiny_model, kv_cache_policy=POLICY, kv_cache_compactor="cuda"),
    ):
        pass
