# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.quality``: run every arm, or what is left of it, and write the report.

Writes settings.json, records.jsonl, report.md and quality.png into --output. Stopped at any
moment, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.options import whole_number
from benchmarks.quality.plan import Plan, make_plan
from benchmarks.quality.plot import draw
from benchmarks.quality.report import report
from benchmarks.quality.store import Store, StoreError
from benchmarks.validation import reasons
from randkv import patching
from server.options import DEFAULT_MODEL

FULL: dict[str, Any] = {
    "budgets": (64, 128, 256, 512, 1024),
    "num_texts": 10,
    "text_len": 1184,
    "num_keys": 16,
    "distances": (64, 256),
    "num_free": 10,
    "free_len": 320,
}
QUICK: dict[str, Any] = {
    "budgets": (64, 128),
    "num_texts": 6,
    "text_len": 320,
    "num_keys": 4,
    "distances": (64, 256),
    "num_free": 4,
    "free_len": 256,
}


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a temperature from 0 to 2")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/quality"), help="directory (%(default)s)")
    add("--report-only", type=Path, metavar="DIR", help="write DIR's report again; no engine")
    add("--quick", action="store_true", help="a small run; what is given besides still counts")
    add("--model", type=Path, default=DEFAULT_MODEL, help="folder with weights and tokenizer")
    add("--text", type=Path, nargs="+", metavar="FILE", help="instead of Python's topics")
    add("--budgets", type=whole_number(1), nargs="+", metavar="K", help="tokens, prompt included")
    add(
        "--buffers", type=whole_number(0), nargs="+", default=(32,), metavar="R", help="tokens (32)"
    )
    add("--no-window", dest="window", action="store_false", help="without the control arm")
    add("--num-texts", type=whole_number(1), metavar="N")
    add("--prompt-len", type=whole_number(1), default=32, metavar="N", help="tokens of a text (32)")
    add("--text-len", type=whole_number(2), metavar="N", help="tokens of a text, prompt included")
    add("--num-keys", type=whole_number(1), metavar="N")
    add(
        "--distances", type=whole_number(1), nargs="+", metavar="N", help="tokens, fact to question"
    )
    add("--num-free", type=whole_number(1), metavar="N", help="texts that are continued freely")
    add("--free-len", type=whole_number(4), metavar="N", help="output tokens of those")
    add("--temperature", type=_temperature, default=0.8, help="of those (%(default)s)")
    add("--seed", type=whole_number(0), default=0)
    add("--concurrency", type=whole_number(1), default=64, metavar="N", help="requests at once")
    add("--kv-cache-gib", type=whole_number(1), default=3, metavar="N", help="KV cache, GiB")
    return parser


def _with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    defaults = QUICK if options.quick else FULL
    chosen = {name: getattr(options, name) or value for name, value in defaults.items()}
    for name in ("budgets", "buffers", "distances"):
        chosen[name] = tuple(sorted(set(chosen.get(name, getattr(options, name)))))
    return argparse.Namespace(**{**vars(options), **chosen})


def write_report(store: Store) -> None:
    """Write report.md and quality.png from the stored settings and records."""
    settings, records = store.settings(), store.records()
    if not records:
        raise StoreError(f"{store.directory} holds no records yet")
    (store.directory / "report.md").write_text(report(settings, records))
    draw(settings, records, store.directory / "quality.png")
    sys.stderr.write(f"Wrote {store.directory / 'report.md'} and quality.png beside it.\n")


def _run(plan: Plan, store: Store, options: argparse.Namespace) -> None:
    done = {(record.arm.name, record.key) for record in store.records()}
    todo = [request for request in plan.requests if request.key not in done]
    if not todo:
        return
    from tqdm import tqdm

    from benchmarks.quality.measurement import measure, quality_engine

    num_tokens = sum(request.item.output_len for request in plan.requests)
    left = sum(request.item.output_len for request in todo)
    with (
        quality_engine(
            options.model, plan.longest, options.concurrency, options.kv_cache_gib * 2**30
        ) as running,
        tqdm(total=num_tokens, initial=num_tokens - left, unit="tok", unit_scale=True) as bar,
    ):
        measure(
            running,
            todo,
            store,
            concurrency=options.concurrency,
            temperature=options.temperature,
            bar=bar,
        )


def main(arguments: list[str] | None = None) -> int:
    """Returns 0; ends with 1 where there is no valid result.

    Ends with 2 for bad options, and for files that cannot be read or written.
    """
    parser = _parser()
    options = _with_defaults(parser.parse_args(arguments))
    try:
        if options.report_only:
            write_report(Store(options.report_only))
            return 0
        store = Store(options.output)
        plan = _plan(parser, options)
        store.begin(plan.settings)
        _run(plan, store, options)
        write_report(store)
    except StoreError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except ValidationError as error:
        parser.exit(1, f"{parser.prog}: refused as a result: {reasons(error)}\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    if not (options.model / "tokenizer.json").is_file():
        parser.error(f"--model {options.model}: expected a folder with a tokenizer.json")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    try:
        return make_plan(options, encode, f"vllm {vllm.__version__}", patching.digest())
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
