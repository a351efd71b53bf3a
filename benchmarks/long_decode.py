# SPDX-License-Identifier: Apache-2.0
"""The step time of one long request by its length, with the full cache and under the policy.

``python -m benchmarks.long_decode`` decodes 6,000 tokens. A machine that slows down for a minute
would look like a step that gets longer. So each arm has two engines: when the long request has come
to one of `LENGTHS`, a second request decodes its own tokens around 500 in turn with it, 20 steps
each, and a figure is the ratio of their median steps. No HTTP, which adds the same to every token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from benchmarks import spread
from benchmarks.decoder import BLOCK_SIZE, PROMPT_LEN
from benchmarks.engine_pair import REPOSITORY, Worker
from benchmarks.markdown import table
from benchmarks.options import whole_number
from benchmarks.serving.machine import hardware, versions
from benchmarks.serving.record import Hardware, Record
from benchmarks.validation import reasons
from randkv.config import RandKVConfig
from randkv.errors import RandKVConfigError
from randkv.patching import digest
from randkv.planner import rounds_run

REFERENCE_LEN = 500
"""Output tokens in the middle of the stretch that a long request's steps are compared with."""
LENGTHS = (600, 1200, 2400, 3600, 4800, 6000)
"""Output tokens at the end of each stretch. In the first both requests are where the reference is:
what the two engines differ by all the same, a few per cent, is divided out of every figure."""
TURNS = 10
STEPS_PER_TURN = 20
STRETCH = TURNS * STEPS_PER_TURN


class WrongRunError(Exception):
    """The engine did not do what the figure is about."""


class Turn(NamedTuple):
    """Median seconds of a step, the long request's and the reference's, one after the other."""

    long: float
    reference: float


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured of one arm.

    Attributes:
        kv_cache_policy: As the engine was given it.
        turns: By length.
        blocks: KV blocks that the long request held, by length.
    """

    name: str
    kv_cache_policy: Any
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)

    def growth(self, length: int) -> list[float]:
        """The long request's step over that at 500 tokens, turn by turn."""
        first = median(turn.long / turn.reference for turn in self.turns[min(self.turns)])
        return [turn.long / turn.reference / first for turn in self.turns[length]]


class Measured(Record):
    """What is stored."""

    ended_at: str = Field(description="ISO 8601, UTC.")
    hardware: Hardware
    versions: dict[str, str]
    patch_digest: str
    arms: list[Curve] = Field(min_length=1)


@dataclass(slots=True)
class Arm:
    """Two engines of one policy; `config` is None for the full cache."""

    curve: Curve
    config: RandKVConfig | None
    long: Worker
    reference: Worker
    output_len: int = 0

    def approach(self, length: int) -> None:
        """Bring both requests to where the turns begin."""
        if self.output_len == 0:
            self.long.ask("start")
        self._decode(length - STRETCH - self.output_len)
        self.reference.ask("start")
        self.reference.ask(f"step {REFERENCE_LEN - STRETCH // 2}")
        self.curve.turns[length] = []

    def take_turn(self, length: int, is_long_first: bool) -> None:
        if is_long_first:
            long = self._decode(STEPS_PER_TURN)
            reference = self.reference.ask(f"step {STEPS_PER_TURN}")
        else:
            reference = self.reference.ask(f"step {STEPS_PER_TURN}")
            long = self._decode(STEPS_PER_TURN)
        turn = Turn(median(long["seconds"]), median(reference["seconds"]))
        self.curve.turns[length].append(turn)
        self.curve.blocks[length] = long["blocks"]

    def _decode(self, num_steps: int) -> dict[str, Any]:
        """Raises WrongRunError unless the request has run the rounds that its length demands."""
        answer = self.long.ask(f"step {num_steps}")
        self.output_len += num_steps
        computed = PROMPT_LEN + self.output_len - 1
        expected = rounds_run(self.config, computed) if self.config else 0
        if answer["rounds"] != expected:
            raise WrongRunError(
                f"{self.curve.name}: {answer['rounds']} rounds at {self.output_len} output tokens, "
                f"expected {expected}"
            )
        return answer


@contextmanager
def started(
    model: Path, configs: Mapping[str, RandKVConfig | None], longest: int
) -> Iterator[list[Arm]]:
    """An arm for each config by name, for requests of up to `longest` output tokens."""
    max_len = str(PROMPT_LEN + longest + BLOCK_SIZE)
    with ExitStack() as stack:
        arms = []
        for name, config in configs.items():
            policy = config.to_dict() if config else "dense"
            given = json.dumps(policy) if config else "dense"
            command = ("benchmarks.decoder", str(model), given, max_len)
            long, reference = (stack.enter_context(closing(Worker(*command))) for _ in range(2))
            arms.append(Arm(Curve(name, policy), config, long, reference))
        yield arms


def measure(arms: Sequence[Arm], lengths: Sequence[int]) -> None:
    """Fill in every arm's curve; says on the way how far it is."""
    for length in lengths:
        for arm in arms:
            arm.approach(length)
        for turn in range(TURNS):
            order = arms if turn % 2 == 0 else arms[::-1]
            for arm in order:
                arm.take_turn(length, is_long_first=turn // 2 % 2 == 0)
        curves = [arm.curve for arm in arms]
        now = [f"{curve.name} {spread.median(curve.growth(length)).text()}" for curve in curves]
        sys.stderr.write(f"{datetime.now():%H:%M:%S} {length} tokens: {', '.join(now)}\n")
        sys.stderr.flush()


def measured(arms: Sequence[Arm]) -> Measured:
    return Measured(
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware(),
        versions=versions(),
        patch_digest=digest(),
        arms=[arm.curve for arm in arms],
    )


def read(path: Path) -> list[Curve]:
    """The curves of a stored `Measured`. Raises WrongRunError for anything else."""
    try:
        return Measured.model_validate_json(path.read_bytes()).arms
    except ValidationError as error:
        raise WrongRunError(f"{path}: {reasons(error)}") from None


def report(curves: Sequence[Curve]) -> str:
    """Markdown; an entry is a step's time over that at 500 tokens, and the blocks held."""
    lengths = list(curves[0].turns)
    head, rows = ["output tokens"], [[f"{n - STRETCH:,} to {n:,}"] for n in lengths]
    for curve in curves:
        head += [curve.name, "KV blocks"]
        for length, row in zip(lengths, rows, strict=True):
            row += [spread.median(curve.growth(length)).text(), str(curve.blocks[length])]
    return table(head, rows)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """The table's ratios by length, with their intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        picture, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
        for curve, colour in zip(curves, ("#000000", "#0072B2"), strict=False):
            at = [length - STRETCH / 2 for length in curve.turns]
            figures = [spread.median(curve.growth(length)) for length in curve.turns]
            low, high = [each.low for each in figures], [each.high for each in figures]
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
            middle = [each.value for each in figures]
            axes.plot(at, middle, "o-", color=colour, label=curve.name, markersize=4)
        axes.set_xlabel("output tokens")
        axes.set_ylabel(f"step time over that at {REFERENCE_LEN} tokens")
        axes.set_xlim(left=0)
        axes.legend(frameon=False)
        picture.savefig(path, dpi=150)
        pyplot.close(picture)


def main() -> int:
    from tests.engine.models import SMOLLM2

    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_decode")
    parser.add_argument("--budget", type=whole_number(PROMPT_LEN), default=256)
    parser.add_argument("--buffer-size", type=whole_number(0), default=32)
    parser.add_argument("--report-only", action="store_true", help="of what --output holds")
    default = REPOSITORY / "build" / "bench" / "long-decode"
    parser.add_argument("--output", type=Path, default=default, help="directory")
    arguments = parser.parse_args()
    stored = arguments.output / "long-decode.json"
    try:
        if not arguments.report_only:
            config = RandKVConfig(arguments.budget, arguments.buffer_size)
            configs = {"dense": None, f"randkv-{config.budget}": config}
            arguments.output.mkdir(parents=True, exist_ok=True)
            with started(SMOLLM2, configs, LENGTHS[-1]) as arms:
                measure(arms, LENGTHS)
            stored.write_text(measured(arms).model_dump_json(indent=1) + "\n")
        curves = read(stored)
        sys.stdout.write(report(curves))
        draw(curves, stored.with_suffix(".png"))
    except (WrongRunError, RandKVConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"\nNext: look at {stored.with_suffix('.png')}.\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
