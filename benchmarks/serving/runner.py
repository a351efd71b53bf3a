# SPDX-License-Identifier: Apache-2.0
"""Start the servers of a workload's arms, and drive them in pairs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import client
from benchmarks.serving import machine, record
from benchmarks.serving.arms import Arm
from benchmarks.serving.monitor import monitor
from benchmarks.serving.record import RefusedRunError, Request, Run, Settings
from benchmarks.serving.workloads import Workload
from server.options import DEFAULT_MODEL as DEFAULT_MODEL_PATH
from server.options import REPOSITORY
from tests.server.process import Metrics, Server, serve

COUNTERS = (
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "randkv_compaction_rounds_total",
    "randkv_compaction_seconds_sum",
    "randkv_copied_token_head_pairs_total",
    "randkv_evicted_token_head_pairs_total",
    "randkv_freed_blocks_total",
    "randkv_replayed_tokens_total",
)
DEFAULT_MODEL = str(DEFAULT_MODEL_PATH.relative_to(REPOSITORY))
NAME = "benchmark"
"""What the model is served as."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        model: Directory or Hub name.
        pairs: Runs of every arm of a workload whose `repeats` is 1.
        are_servers_kept: Each arm has its server up all the time; otherwise every run starts and
            stops its own, as a GPU's memory asks for.
        more_server_options: Of every server.
    """

    model: str
    output: Path
    pairs: int
    are_servers_kept: bool
    more_server_options: tuple[str, ...] = ()


def settings_of(plan: Plan, workload: Workload, arm: Arm) -> Settings:
    return Settings(
        model=plan.model,
        workload=workload.name,
        arm=arm.name,
        num_requests=workload.num_requests,
        input_len=workload.input_len,
        output_len=workload.output_len,
        num_kv_blocks=workload.num_kv_blocks,
        block_size=workload.block_size,
        budget=arm.config.budget if arm.config else None,
        buffer_size=arm.config.buffer_size if arm.config else None,
        server_options=list(plan.more_server_options),
    )


def run_workload(
    plan: Plan, workload: Workload, arms: Sequence[Arm], say: Callable[[str], None]
) -> None:
    """Every pair of `workload` that `plan.output` does not hold yet; who goes first changes.

    Raises:
        RefusedRunError: A run is no result, or `plan.output` holds one of other settings.
    """
    wanted = {arm.name: settings_of(plan, workload, arm) for arm in arms}
    load = wanted[arms[0].name].load
    stored = set()
    for run in record.load(plan.output):
        if run.settings.workload != workload.name:
            continue
        if run.settings.load != load or run.settings != wanted.get(run.settings.arm, run.settings):
            raise RefusedRunError(
                f"{plan.output} holds {record.file_name(run)}, a run of other settings: give "
                "another --output"
            )
        stored.add((run.settings.arm, run.pair))
    todo = []
    for pair in range(plan.pairs * workload.repeats):
        first = pair % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            if (arm.name, pair) not in stored:
                todo.append((pair, arm))
    with ExitStack() as kept:
        servers: dict[str, Server] = {}
        for number, (pair, arm) in enumerate(todo, start=1):
            with ExitStack() as once:
                if arm.name not in servers:
                    say(f"{workload.name}: starting the server of {arm.name}")
                    lives = kept if plan.are_servers_kept else once
                    servers[arm.name] = lives.enter_context(started(plan, workload, arm))
                run = measure(plan, workload, arm, servers[arm.name], pair)
            if not plan.are_servers_kept:
                servers.clear()
            run.check()
            record.store(run, plan.output)
            tokens = sum(request.output_len for request in run.requests)
            say(
                f"{workload.name} {number}/{len(todo)}: {arm.name}, pair {pair}: "
                f"{tokens / run.seconds:.1f} output tokens/s in {run.seconds:.0f} s"
            )


@contextmanager
def started(plan: Plan, workload: Workload, arm: Arm) -> Iterator[Server]:
    """The arm's server, warmed up."""
    options = [
        *([] if plan.model == DEFAULT_MODEL else ["--model", plan.model]),
        *("--served-model-name", NAME, "--no-access-log"),
        *workload.server_options,
        *arm.server_options,
        *plan.more_server_options,
    ]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            server = stack.enter_context(
                serve(directory, *options, environment=arm.environment, seconds=1800)
            )
        except AssertionError as error:
            raise RefusedRunError(f"{arm.name}: its server did not start:\n{error}") from None
        if arm.is_window:
            answer = server.post("/collective_rpc", {"method": "use_window"})
            if answer.status != 200 or "WindowCompactor" not in str(answer.json):
                raise RefusedRunError(f"{arm.name}: {answer.status} {answer.body[:200]!r}")
        short = ["--num-prompts", "2", "--random-input-len", "16", "--random-output-len", "8"]
        client.drive(client.options(server.url, NAME, plan.model, 0, *short))
        yield server


def measure(plan: Plan, workload: Workload, arm: Arm, server: Server, pair: int) -> Run:
    """One run, with the prompts of `pair`."""
    # The servers of a workload saw the same prompts before, so their prefix caches are alike.
    options = client.options(server.url, NAME, plan.model, pair + 1, *workload.client_options)
    options += ["--request-id-prefix", f"{workload.name}-{pair}-"]
    before = server.metrics()
    began = datetime.now(UTC)
    with monitor(server) as samples:
        result = client.drive(options)
    failed = [error for error in result["errors"] if error]
    if failed or result["failed"]:
        raise RefusedRunError(f"{workload.name}, {arm.name}, pair {pair}: {failed or 'failed'}")
    after = server.metrics()
    (build,) = (
        sample.labels
        for family in after.families
        for sample in family.samples
        if sample.name == "randkv_build_info"
    )
    columns = (result[name] for name in ("input_lens", "output_lens", "ttfts", "itls"))
    return Run(
        settings=settings_of(plan, workload, arm),
        pair=pair,
        seed=pair + 1,
        started_at=began.isoformat(timespec="seconds"),
        hardware=machine.hardware(),
        versions=machine.versions(),
        patch_digest=build["patch"],
        compactor=build["compactor"],
        server_command=[_relative(word) for word in server.process.args],
        server_environment=arm.environment,
        client_command=["vllm", "bench", "serve", *(_relative(word) for word in options)],
        seconds=result["duration"],
        requests=[
            Request(
                input_len=input_len,
                output_len=output_len,
                ttft=round(ttft, 5),
                itls=[round(itl, 5) for itl in itls],
            )
            for input_len, output_len, ttft, itls in zip(*columns, strict=True)
        ],
        counters_before=_counters(before),
        counters_after=_counters(after),
        samples=samples,
    )


def _counters(metrics: Metrics) -> dict[str, float]:
    return {name: metrics.total(name) for name in COUNTERS}


def _relative(word: object) -> str:
    """`word` without the parts of this machine."""
    text = str(word)
    if text == sys.executable:
        return "python"
    return text.replace(f"{REPOSITORY}/", "")
