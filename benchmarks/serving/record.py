# SPDX-License-Identifier: Apache-2.0
"""One run as it is stored: what ran, on what, and everything raw that was seen.

``python -m benchmarks.serving.record`` writes the JSON schema again after a change to the models.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.validation import reasons
from randkv.config import RandKVConfig
from randkv.planner import rounds_run

SCHEMA_VERSION = 1
SUFFIX = ".run.json.gz"
SCHEMA_FILE = Path(__file__).with_name(f"run-v{SCHEMA_VERSION}.schema.json")

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class RefusedRunError(Exception):
    """A run that must not be taken for a result."""


class Record(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(Record):
    """The machine that server and client ran on."""

    cpu: str
    num_cores: Count
    memory_bytes: Count
    accelerators: list[str]


class Settings(Record):
    """What a run is a repetition of: equal settings give comparable runs."""

    model: str
    workload: str
    arm: str
    num_requests: Count
    input_len: Count = Field(description="Prompt tokens asked for, of each request.")
    output_len: Count = Field(description="Output tokens asked for, on average.")
    num_kv_blocks: Count = Field(description="Blocks that requests can have.")
    block_size: Count = Field(description="Tokens of a block.")
    budget: Count | None = Field(description="K, tokens; null for the full cache.")
    buffer_size: Count | None = Field(description="r, tokens; null for the full cache.")
    server_options: list[str] = Field([], description="Those that were given for every server.")

    @property
    def load(self) -> dict[str, object]:
        """What all arms of a comparison have in common."""
        return self.model_dump(exclude={"arm", "budget", "buffer_size"})


class Request(Record):
    """One request, as the client saw it."""

    input_len: Count
    output_len: Count
    ttft: Seconds = Field(description="Time to the first token, seconds.")
    itls: list[Seconds] = Field(description="Inter-token latencies in order, seconds.")


class Sample(Record):
    """Gauges of the server at one moment."""

    seconds: Seconds = Field(description="Since the run began.")
    num_running: Count
    num_waiting: Count
    kv_usage: float = Field(ge=0, le=1, description="Share of the blocks in use.")


class Run(Record):
    """One run of one arm."""

    schema_version: Literal[1] = SCHEMA_VERSION
    settings: Settings
    pair: Count = Field(description="Runs of all arms with the same number had the same prompts.")
    seed: Count = Field(description="Of prompts and lengths.")
    started_at: str = Field(description="ISO 8601, UTC.")
    hardware: Hardware
    versions: dict[str, str]
    patch_digest: str
    compactor: str
    server_command: list[str]
    server_environment: dict[str, str]
    client_command: list[str]
    seconds: Seconds = Field(description="From the first request sent to the last token.")
    requests: list[Request]
    counters_before: dict[str, float] = Field(description="From /metrics.")
    counters_after: dict[str, float]
    samples: list[Sample]

    def grown(self, counter: str) -> float:
        """How much a counter of the server grew during the run."""
        return self.counters_after.get(counter, 0.0) - self.counters_before.get(counter, 0.0)

    @property
    def num_rounds_due(self) -> int:
        """Rounds that these lengths demand, over all requests."""
        settings = self.settings
        if settings.budget is None or settings.buffer_size is None:
            return 0
        config = RandKVConfig(settings.budget, settings.buffer_size)
        # The last token is never computed.
        return sum(rounds_run(config, r.input_len + r.output_len - 1) for r in self.requests)

    def check(self) -> None:
        """Raises `RefusedRunError` for a run whose counters say that it is not what it claims."""
        name = f"{self.settings.workload}, {self.settings.arm}, pair {self.pair}"
        evicted = self.grown("randkv_evicted_token_head_pairs_total")
        rounds, due = self.grown("randkv_compaction_rounds_total"), self.num_rounds_due
        is_exact = not self.grown("vllm:num_preemptions_total")  # they are replayed, and count
        if rounds < due or (is_exact and rounds != due) or bool(evicted) is not bool(due):
            raise RefusedRunError(
                f"{name}: these lengths demand {due} rounds, but the server counted {rounds:.0f} "
                f"and {evicted:.0f} evicted pairs: the policy did not run as it should"
            )
        tokens = sum(request.output_len for request in self.requests)
        counted = self.grown("vllm:generation_tokens_total")
        if counted != tokens:
            raise RefusedRunError(
                f"{name}: the client got {tokens} tokens, the server counted {counted:.0f}: "
                "somebody else used the server"
            )


def schema() -> str:
    """The JSON schema of `Run`, as it is kept beside this module."""
    return json.dumps(Run.model_json_schema(), indent=2) + "\n"


def load(directory: Path) -> list[Run]:
    """Every run stored in `directory`, checked.

    Raises:
        RefusedRunError: A file that is not such a run, or one that must not be a result.
    """
    runs = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            run = Run.model_validate_json(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, zlib.error) as error:
            raise RefusedRunError(f"{path}: expected a compressed file, whole ({error})") from None
        except ValidationError as error:
            raise RefusedRunError(f"{path}: {reasons(error)}") from None
        run.check()
        runs.append(run)
    return runs


def file_name(run: Run) -> str:
    return f"{run.settings.workload}.{run.settings.arm}.{run.pair:03}{SUFFIX}"


def store(run: Run, directory: Path) -> Path:
    """Write `run` into `directory`; whole or not at all."""
    path = directory / file_name(run)
    partial = path.with_suffix(".partial")
    partial.write_bytes(gzip.compress(run.model_dump_json().encode() + b"\n", mtime=0))
    partial.rename(path)
    return path


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema())
