# SPDX-License-Identifier: Apache-2.0
"""The commands that the documents show give the output that they show."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from randkv.__main__ import main
from randkv.advice.step_time import read_latency
from tests.unit.advice.cases import QWEN3_4B, model
from tests.unit.advice.test_workload import log, logged

ROOT = Path(__file__).parents[3]
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(document: str) -> list[tuple[list[str], list[str]]]:
    """Arguments of each ``randkv advise`` command, and the lines shown below it, if any."""
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    found = []
    for i, (language, text) in enumerate(blocks):
        if language == "console" and "randkv advise" in text:
            _, _, arguments = text.replace("\\\n", " ").partition("-m randkv ")
            is_shown = i + 1 < len(blocks) and blocks[i + 1][0] == "text"
            shown = blocks[i + 1][1].splitlines() if is_shown else []
            found.append((shlex.split(arguments), shown))
    return found


@pytest.mark.parametrize(("document", "number"), [("README.md", 1), ("docs/budget.md", 3)])
def test_shown_output_is_the_real_one(
    document: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (("Qwen3-4B", QWEN3_4B), ("models/smollm2-135m-instruct", SMOLLM2)):
        Path(name).mkdir(parents=True)
        model(Path(name), **{**dict.fromkeys(QWEN3_4B, ...), **config})
    log(tmp_path, *[logged(300, 9000)] * 20)
    found = examples(document)
    assert len(found) == number
    for arguments, shown in found:
        assert main(arguments) == 0
        lines = iter(capsys.readouterr().out.splitlines())
        for line in shown:
            if line != "...":
                assert any(real == line for real in lines), f"{line!r} is not printed, or not there"


def test_the_shown_constants_are_read(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs/budget.md").read_text(encoding="utf-8"))
    (shown,) = (text for language, text in blocks if language == "json")
    path = tmp_path / "latency.json"
    path.write_text(shown, encoding="utf-8")
    assert read_latency(path).source == json.loads(shown)["source"]
