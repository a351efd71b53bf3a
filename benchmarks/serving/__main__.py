# SPDX-License-Identifier: Apache-2.0
"""Matched serving runs: the full cache against the policy, in pairs, over HTTP.

``run`` starts a server for each arm, drives them in turn with vLLM's own benchmark client (same
prompts, same output lengths) and stores every run as JSON; ``report`` makes tables and plots of
stored runs. A run in which the policy should have evicted and did not is no result.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.options import whole_number
from benchmarks.serving.arms import Arm, parse_arm
from benchmarks.serving.record import RefusedRunError
from benchmarks.serving.runner import DEFAULT_MODEL, Plan, run_workload
from benchmarks.serving.workloads import PROMPT_SLACK, WORKLOADS, Workload
from tests.server.process import REPOSITORY

QUICK = ("memory-bound", "roomy", "short")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__.split("\n", 1)[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = "; ".join(f"{workload.name}: {workload.about}" for workload in WORKLOADS.values())
    run = commands.add_parser("run", help="run and store", description=f"Workloads: {listed}.")
    add = run.add_argument
    add("--workload", action="append", choices=WORKLOADS, help="may be repeated; default: all")
    add("--arm", action="append", help="dense, randkv-<budget>, window-<budget>; may be repeated")
    add("--pairs", type=whole_number(1), help="runs of every arm (default 5; quick: 2)")
    add("--quick", action="store_true", help="smaller, dense and one budget, three workloads")
    add(
        "--buffer-size",
        type=whole_number(0),
        default=32,
        help="of the policy (default %(default)s)",
    )
    add("--model", default=DEFAULT_MODEL, help="directory or Hub name (default: the embedded one)")
    for name in ("num-requests", "input-len", "output-len", "num-kv-blocks", "block-size"):
        add(f"--{name}", type=whole_number(1), help="instead of the workload's own")
    add(
        "--servers",
        choices=("together", "one-at-a-time"),
        help="whether the servers of all arms stay up (default on a CPU) or each run starts its "
        "own (default on a GPU, whose memory one server takes)",
    )
    add("--server-options", default="", help="more options of every server, as one string")
    add("--output", type=Path, help="directory; a run that it holds already is not run again")
    report = commands.add_parser("report", help="tables and plots of stored runs")
    report.add_argument("directory", type=Path)
    return parser


def _workload(name: str, arguments: argparse.Namespace) -> Workload:
    workload = WORKLOADS[name].quick() if arguments.quick else WORKLOADS[name]
    fields = ("num_requests", "input_len", "output_len", "num_kv_blocks", "block_size")
    given = {field: getattr(arguments, field) for field in fields}
    found = replace(workload, **{field: value for field, value in given.items() if value})
    if found.shared_prefix_len and (
        found.input_len <= found.shared_prefix_len or found.num_requests % 2
    ):
        raise ValueError(
            f"workload {name}: expected --input-len above {found.shared_prefix_len}, its shared "
            "prefix, and an even --num-requests"
        )
    return found


def _arms(workload: Workload, arguments: argparse.Namespace) -> list[Arm]:
    names = arguments.arm or workload.arms
    arms = [parse_arm(name, arguments.buffer_size) for name in dict.fromkeys(names)]
    for arm in arms:
        least = workload.input_len + PROMPT_SLACK
        if arm.config and arm.config.budget < least:
            raise ValueError(
                f"arm {arm.name!r}: expected a budget of at least {least}, to hold the prompt of "
                f"workload {workload.name} and {PROMPT_SLACK} tokens that the client may add"
            )
    return arms


def _run(arguments: argparse.Namespace) -> Path:
    import torch

    names = arguments.workload or (QUICK if arguments.quick else tuple(WORKLOADS))
    work = [
        (workload, _arms(workload, arguments))
        for workload in (_workload(name, arguments) for name in names)
    ]
    now = datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
    output: Path = arguments.output or REPOSITORY / "build" / "bench" / f"serving-{now}"
    output.mkdir(parents=True, exist_ok=True)
    servers = arguments.servers
    if servers is None:
        servers = "one-at-a-time" if torch.cuda.is_available() else "together"
    plan = Plan(
        arguments.model,
        output,
        arguments.pairs or (2 if arguments.quick else 5),
        servers == "together",
        tuple(shlex.split(arguments.server_options)),
    )
    for workload, arms in work:
        run_workload(plan, workload, arms, _say)
    return output


def _say(text: str) -> None:
    sys.stderr.write(f"{datetime.now():%H:%M:%S} {text}\n")
    sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending the servers
    from benchmarks.serving.report import write

    try:
        directory = _run(arguments) if arguments.command == "run" else arguments.directory
        path = write(directory)
    except (RefusedRunError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command with the same --output goes on here\n")
        return 130
    sys.stdout.write(path.read_text())
    sys.stdout.write(f"\nNext: read {path}, beside which are the plots and every run.\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
