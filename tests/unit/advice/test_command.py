# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from randkv import RandKVConfig
from randkv.__main__ import main
from randkv.config import EnginePolicy
from tests.unit.advice.cases import QWEN3_4B_TOKEN, model
from tests.unit.advice.test_step_time import GOOD, latency
from tests.unit.advice.test_workload import log, logged

LENGTHS = ("--prompt-tokens", "1024", "--max-tokens", "32768")
ON_80_GIB = ("--gpu-memory", "80", *LENGTHS)


@pytest.fixture
def advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    folder = model(tmp_path)

    def run(*options: str, folder: Path = folder) -> str:
        assert main(["advise", "--model", str(folder), *options]) == 0
        return capsys.readouterr().out

    return run


def keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else None


HELD = dict.fromkeys(
    ("tokens", "blocks", "kv_bytes", "mean_tokens", "requests", "requests_half_grown",
     "tokens_per_second")
)  # fmt: skip


def test_json_has_this_schema(advise: Any) -> None:
    found = json.loads(advise(*ON_80_GIB, "--format", "json", "--memory-bandwidth", "3350"))
    assert found["schema"] == 1
    assert keys(found) == {
        "schema": None,
        "model": dict.fromkeys(
            ("name", "num_layers", "num_attention_heads", "num_kv_heads", "head_size", "dtype",
             "kv_dtype", "max_position_embeddings", "tensor_parallel_size",
             "kv_bytes_per_token_per_gpu", "weights_bytes", "weights_from")
        ),
        "memory": dict.fromkeys(
            ("kv_bytes_per_gpu", "gpu_bytes", "gpu_memory_utilization", "weights_bytes_per_gpu",
             "allowance_bytes", "block_size", "num_blocks")
        ),
        "workload": dict.fromkeys(
            ("source", "requests", "prompt_tokens", "output_tokens", "longest_tokens",
             "skipped_requests", "skipped_lines", "concurrency")
        ),
        "step_time": dict.fromkeys(
            ("kind", "fixed_seconds", "seconds_per_kv_byte", "seconds_per_sequence", "source")
        ),
        "dense": HELD,
        "budgets": [
            {
                "budget": None,
                "buffer_size": None,
                "held": HELD,
                "over_dense": None,
                "half_grown_over_dense": None,
                "modelled_speedup": None,
                "rounds": None,
                "share_of_output_kept": None,
                "share_kept": dict.fromkeys(("1024", "4096", "16384")),
                "generated_per_place": None,
                "refused_share": None,
            }
        ],
        "recommendation": {
            "budget": None,
            "buffer_size": None,
            "requests": None,
            "reasons": [None],
            "policy": dict.fromkeys(("type", "budget", "buffer_size")),
            "server_options": [None],
        },
        "notes": [None],
    }  # fmt: skip


def test_figures_of_qwen3_4b_on_80_gib(advise: Any) -> None:
    found = json.loads(advise(*ON_80_GIB, "--weights-gib", "7.6", "--format", "json"))
    assert found["model"]["kv_bytes_per_token_per_gpu"] == QWEN3_4B_TOKEN
    num_blocks = int((80 * 0.92 - 7.6 - 2) * 2**30 // (16 * QWEN3_4B_TOKEN)) - 1
    assert found["memory"]["num_blocks"] == num_blocks
    assert found["dense"]["requests"] == num_blocks // (33792 // 16)
    (one,) = (o for o in found["budgets"] if o["budget"] == 8192)
    assert one["held"]["kv_bytes"] == 8320 * QWEN3_4B_TOKEN
    assert one["held"]["requests"] == num_blocks // (8320 // 16)
    assert found["recommendation"]["budget"] == 8192
    assert found["step_time"] is None
    assert [o["modelled_speedup"] for o in found["budgets"]] == [None] * 6


def test_a_step_on_several_gpus_reads_a_share_of_the_weights(advise: Any) -> None:
    options = ("--weights-gib", "8", "--memory-bandwidth", "1000", "--format", "json")
    for num_ranks in (1, 2):
        found = json.loads(advise(*ON_80_GIB, *options, "--tensor-parallel-size", str(num_ranks)))
        fixed = found["step_time"]["fixed_seconds"]
        assert fixed == pytest.approx(8 * 2**30 / 1e12 / num_ranks)


def test_text_ends_with_options_that_the_policy_accepts(advise: Any) -> None:
    options = shlex.split(advise(*ON_80_GIB).splitlines()[-1])
    assert options[0] == "--kv-cache-policy"
    assert RandKVConfig.parse(options[1]) == RandKVConfig(8192, 64)
    assert options[2:] == ["--max-model-len", "33792"]


def test_text_calls_ratios_of_requests_no_speedup(advise: Any) -> None:
    text = advise(*ON_80_GIB)
    assert "of concurrency, not of speed" in text
    assert "modelled  " not in text
    modelled = advise(*ON_80_GIB, "--memory-bandwidth", "3350")
    assert "modelled, not measured" in modelled
    assert "3,350 GB/s" in modelled
    assert "measured" not in modelled.partition("Recommended")[0]


def test_rows_are_as_wide_as_their_head(advise: Any) -> None:
    head, *rows = advise(*ON_80_GIB, "--memory-bandwidth", "3350").split("\n\n")[1].splitlines()
    assert len(rows) == 7
    assert {len(row) for row in rows[:-1]} == {len(head)}
    assert rows[-1].split()[0] == "dense"


def test_every_option_that_differs_is_to_be_pasted(advise: Any) -> None:
    found = advise(
        "--gpu-memory", "40", *LENGTHS, "--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8",
        "--block-size", "32", "--gpu-memory-utilization", "0.8", "--budget", "8192",
        "--memory-bandwidth", "2000", "--dtype", "float16",
    )  # fmt: skip
    assert shlex.split(found.splitlines()[-1])[2:] == [
        "--max-model-len", "33792", "--tensor-parallel-size", "2", "--dtype", "float16",
        "--kv-cache-dtype", "fp8", "--block-size", "32", "--gpu-memory-utilization", "0.8",
    ]  # fmt: skip
    assert "on each of 2 GPUs" in found


@pytest.mark.parametrize(
    ("asked", "pasted"),
    [
        (("--dtype", "float32"), ["--dtype", "float32"]),
        (("--dtype", "bfloat16"), ["--dtype", "bfloat16"]),
        (("--dtype", "auto"), []),
        (
            ("--dtype", "float32", "--kv-cache-dtype", "bfloat16"),
            ["--dtype", "float32", "--kv-cache-dtype", "bfloat16"],
        ),
    ],
)
def test_what_sets_the_bytes_of_a_token_is_to_be_pasted(
    advise: Any, asked: tuple[str, ...], pasted: list[str]
) -> None:
    found = advise("--kv-memory", "64", *LENGTHS, *asked)
    assert shlex.split(found.splitlines()[-1])[4:] == pasted


def test_more_sequences_than_vllms_default_are_asked_for(advise: Any) -> None:
    def last(*options: str) -> str:
        lengths = ("--prompt-tokens", "50", "--max-tokens", "1000")
        return str(advise("--kv-memory", "24", *lengths, *options).splitlines()[-1])

    assert "--max-num-seqs 455" in last()
    assert "--max-num-seqs 300" in last("--concurrency", "300")
    assert "--max-num-seqs" not in last("--concurrency", "250")


def test_dense_that_does_not_fit_is_not_allowed_either(advise: Any) -> None:
    found = advise("--kv-memory", "4", *LENGTHS)
    assert "Not one dense request" in found
    options = shlex.split(found.splitlines()[-1])
    assert (options[0], options[2]) == ("--kv-cache-policy", "--kv-cache-policy-limits")
    policy = EnginePolicy.parse(options[1], options[3])
    assert policy is not None
    assert policy.max_physical_len == 8192 + 2 * 64


def test_nothing_is_to_be_pasted_where_nothing_is_recommended(advise: Any, tmp_path: Path) -> None:
    options = ("--kv-memory", "1", *LENGTHS)
    text = advise(*options, "--output", str(tmp_path / "advice.png"))
    assert "Recommended: nothing\n" in text
    assert "it takes 4.65 GiB for KV per GPU" in " ".join(text.split())
    assert "--kv-cache-policy" not in text
    assert not text.endswith("\n\n")
    found = json.loads(advise(*options, "--format", "json"))["recommendation"]
    assert (found["policy"], found["budget"], found["server_options"]) == (None, None, [])


def test_dense_is_pasted_as_its_name(advise: Any) -> None:
    last = advise(*ON_80_GIB, "--concurrency", "2").splitlines()[-1]
    assert last == "--kv-cache-policy dense --max-model-len 33792"


def test_an_access_log_takes_the_place_of_lengths(advise: Any, tmp_path: Path) -> None:
    path = log(tmp_path, *[logged(300, 9000)] * 19, logged(2500, 100), logged(1, 1, "abort"))
    text = advise("--kv-memory", "20", "--access-log", str(path))
    assert "20 requests of" in text
    assert "prompt 300 and output 9,000 tokens (95 % are no longer), longest 9,300" in text
    assert "1 unanswered requests and 0 other lines skipped" in text
    assert "refused" in text
    assert "5.0%" in text
    assert "--max-model-len" not in text


def test_constants_of_a_file_are_named_by_their_source(advise: Any, tmp_path: Path) -> None:
    path = latency(tmp_path, json.dumps({**GOOD, "source": "H200, our run of May"}))
    text = advise(*ON_80_GIB, "--latency", str(path))
    assert "with the constants of: H200, our run of May." in " ".join(text.split())


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))


@pytest.mark.parametrize(
    ("options", "panels"),
    [
        (ON_80_GIB, 2),
        ((*ON_80_GIB, "--memory-bandwidth", "3350", "--concurrency", "50"), 3),
        (("--kv-memory", "4", *LENGTHS, "--memory-bandwidth", "3350"), 2),
        (("--kv-memory", "4", "--prompt-tokens", "9", "--max-tokens", "1"), 2),
    ],
)
def test_the_picture_has_a_panel_for_each_figure(
    advise: Any, tmp_path: Path, options: tuple[str, ...], panels: int
) -> None:
    path = tmp_path / "advice.PNG"
    assert "Recommended" in advise(*options, "--output", str(path))
    height, width, _ = pixels(path).shape
    assert (width, height) == (1020, round(120 * (1.2 + 2.7 * panels)))


def test_the_recommended_budget_is_shaded(advise: Any, tmp_path: Path) -> None:
    band = np.array([0xFF, 0xF2, 0xCC])
    path = tmp_path / "advice.png"
    advise(*ON_80_GIB, "--output", str(path))
    assert (pixels(path) == band).all(axis=2).sum() > 10_000
    advise(*ON_80_GIB, "--concurrency", "2", "--output", str(path))
    assert not (pixels(path) == band).all(axis=2).any()


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    try:
        status: Any = main(["advise", *options])
    except SystemExit as left:  # argparse's own
        status = left.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LENGTHS, "--gpu-memory --kv-memory"),
        (("--kv-memory", "1", *ON_80_GIB), "not allowed with"),
        (("--kv-memory", "x", *LENGTHS), "--kv-memory"),
        (("--kv-memory", "0", *LENGTHS), "kv_memory has value 0.0: expected a number above 0"),
        (("--kv-memory", "0.0001", *LENGTHS), "kv_memory has value"),
        (("--gpu-memory", "nan", *LENGTHS), "gpu_memory has value nan"),
        (("--gpu-memory", "9", *LENGTHS), "expected more than 10.3 GiB: 7.5 for weights"),
        (("--kv-memory", "9"), "prompt_tokens has value None"),
        (("--kv-memory", "9", "--prompt-tokens", "9"), "Give --max-tokens, or --access-log"),
        (("--kv-memory", "9", *LENGTHS, "--access-log", "x"), "not both"),
        (("--kv-memory", "9", *LENGTHS, "--budget", "1000"), "at least the prompt's 1024"),
        (("--kv-memory", "9", *LENGTHS, "--budget", "0"), "budget has value 0"),
        (("--kv-memory", "9", *LENGTHS, "--buffer-size", "-1"), "buffer_size has value -1"),
        (("--kv-memory", "9", *LENGTHS, "--concurrency", "0"), "concurrency has value 0"),
        (("--kv-memory", "9", *LENGTHS, "--block-size", "0"), "block_size has value 0"),
        (("--kv-memory", "9", *LENGTHS, "--tensor-parallel-size", "3"), "tensor_parallel_size"),
        (("--kv-memory", "9", *LENGTHS, "--kv-cache-dtype", "nvfp4"), "invalid choice"),
        (("--kv-memory", "9", *LENGTHS, "--kv-cache-dtype", "float32"), "invalid choice"),
        (("--kv-memory", "9", *LENGTHS, "--latency", "none"), "latency has value 'none'"),
        (("--kv-memory", "9", *LENGTHS, "--memory-bandwidth", "0"), "memory_bandwidth has value"),
        (("--kv-memory", "9", *LENGTHS, "--output", "x.svg"), "has no suffix .png"),
        (("--kv-memory", "9", *LENGTHS, "--output", "/nowhere/x.png"), "No such file"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, "--model", str(model(tmp_path)), *options)


def test_a_model_that_is_refused_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = model(tmp_path, kv_lora_rank=512, attention_chunk_size=8192)
    error = refusal(capsys, "--model", str(folder), *ON_80_GIB)
    assert "multi-head latent attention (MLA): serve a model with" in error
    assert "; chunked local attention: " in error


def test_a_picture_needs_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    path = tmp_path / "x.png"
    options = ("--model", str(model(tmp_path)), *ON_80_GIB, "--output", str(path))
    assert "pip install matplotlib" in refusal(capsys, *options)
    assert not path.exists()


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from randkv.__main__ import main; main(sys.argv[1:]); "
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib', 'huggingface_hub'}; "
        "sys.exit(f'{heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    options = ["advise", "--model", str(model(tmp_path)), *ON_80_GIB]
    subprocess.run([sys.executable, "-c", code, *options], check=True, stdout=subprocess.DEVNULL)
