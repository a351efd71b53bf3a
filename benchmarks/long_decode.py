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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import spread
from benchmarks.decoder import BLOCK_SIZE, PROMPT_LEN
from benchmarks.engine_pair import REPOSITORY, Worker
from benchmarks.markdown import table
from benchmarks.options import whole_number
from benchmarks.serving.machine import hardware, versions
from randkv.config import RandKVConfig
from randkv.errors import RandKVConfigError
from randkv.patching import digest
from randkv.planner import rounds_run

REFERENCE_LEN = 500
"""Output tokens in the middle of the stretch that a long request's steps are compared with."""
LENGTHS = (600, 1200, 2400, 3600, 4800, 6000)
"""Output tokens at the end of each stretch; the first is the reference itself, so 1 is right."""
TURNS = 10
STEPS_PER_TURN = 20
STRETCH = TURNS * STEPS_PER_TURN


class WrongRunError(Exception):
    """The engine did not do what the figure is about."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Median seconds of a step, the long request's and the reference's, one after the other."""

    long: float
    reference: float

    @property
    def ratio(self) -> float:
        return self.long / self.reference


@dataclass(slots=True)
class Arm:
    """Two engines of one policy.

    Attributes:
        config: None for the full cache.
        blocks: KV blocks that the long request held, by length.
    """

    name: str
    config: RandKVConfig | None
    long: Worker
    reference: Worker
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    output_len: int = 0

    def approach(self, length: int) -> None:
        """Bring both requests to where the turns begin."""
        if self.output_len == 0:
            self.long.ask("start")
        self._decode(length - STRETCH - self.output_len)
        self.reference.ask("start")
        self.reference.ask(f"step {REFERENCE_LEN - STRETCH // 2}")
        self.turns[length] = []

    def take_turn(self, length: int, is_long_first: bool) -> None:
        if is_long_first:
            long = self._decode(STEPS_PER_TURN)
            reference = self.reference.ask(f"step {STEPS_PER_TURN}")
        else:
            reference = self.reference.ask(f"step {STEPS_PER_TURN}")
            long = self._decode(STEPS_PER_TURN)
        self.turns[length].append(Turn(median(long["seconds"]), median(reference["seconds"])))
        self.blocks[length] = long["blocks"]

    def _decode(self, num_steps: int) -> dict[str, Any]:
        """Raises WrongRunError unless the request has run the rounds that its length demands."""
        answer = self.long.ask(f"step {num_steps}")
        self.output_len += num_steps
        computed = PROMPT_LEN + self.output_len - 1
        expected = rounds_run(self.config, computed) if self.config else 0
        if answer["rounds"] != expected:
            raise WrongRunError(
                f"{self.name}: {answer['rounds']} rounds at {self.output_len} output tokens, "
                f"expected {expected}"
            )
        return answer


def measure(arms: Sequence[Arm], lengths: Sequence[int]) -> None:
    """Fill in the turns of every arm; says on the way how far it is."""
    for length in lengths:
        for arm in arms:
            arm.approach(length)
        for turn in range(TURNS):
            order = arms if turn % 2 == 0 else arms[::-1]
            for arm in order:
                arm.take_turn(length, is_long_first=turn // 2 % 2 == 0)
        now = [f"{arm.name} {spread.median(ratios(arm, length)).text()}" for arm in arms]
        sys.stderr.write(f"{datetime.now():%H:%M:%S} {length} tokens: {', '.join(now)}\n")
        sys.stderr.flush()


def ratios(arm: Arm, length: int) -> list[float]:
    return [turn.ratio for turn in arm.turns[length]]


def report(arms: Sequence[Arm], lengths: Sequence[int]) -> str:
    """Markdown; an entry is a step's time over that at 500 tokens, and the blocks held."""
    head, rows = ["output tokens"], [[f"{n - STRETCH:,} to {n:,}"] for n in lengths]
    for arm in arms:
        head += [arm.name, "KV blocks"]
        for length, row in zip(lengths, rows, strict=True):
            row += [spread.median(ratios(arm, length)).text(), str(arm.blocks[length])]
    return table(head, rows)


def draw(arms: Sequence[Arm], lengths: Sequence[int], path: Path) -> None:
    """The table's ratios by length, with their intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        picture, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
        at = [length - STRETCH / 2 for length in lengths]
        for arm, colour in zip(arms, ("#000000", "#0072B2"), strict=True):
            figures = [spread.median(ratios(arm, length)) for length in lengths]
            low, high = [each.low for each in figures], [each.high for each in figures]
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
            middle = [each.value for each in figures]
            axes.plot(at, middle, "o-", color=colour, label=arm.name, markersize=4)
        axes.axhspan(0.95, 1.05, color="#bbbbbb", alpha=0.3, linewidth=0)
        axes.set_xlabel("output tokens")
        axes.set_ylabel(f"step time over that at {REFERENCE_LEN} tokens")
        axes.set_xlim(left=0)
        axes.legend(frameon=False)
        picture.savefig(path, dpi=150)
        pyplot.close(picture)


def record(arms: Sequence[Arm]) -> dict[str, Any]:
    """What is stored: seconds of every turn, and what they were measured with."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware().model_dump(),
        "versions": versions(),
        "patch_digest": digest(),
        "prompt_len": PROMPT_LEN,
        "arms": {
            arm.name: {
                "kv_cache_policy": arm.config.to_dict() if arm.config else "dense",
                "turns": {
                    length: [(turn.long, turn.reference) for turn in turns]
                    for length, turns in arm.turns.items()
                },
                "blocks": arm.blocks,
            }
            for arm in arms
        },
    }


def run(model: Path, config: RandKVConfig, lengths: Sequence[int]) -> list[Arm]:
    """Both arms, measured. Raises WrongRunError."""
    max_len = str(PROMPT_LEN + lengths[-1] + BLOCK_SIZE)
    configs = {"dense": None, f"randkv-{config.budget}": config}
    with ExitStack() as stack:
        arms = []
        for name, each in configs.items():
            policy = json.dumps(each.to_dict()) if each else "dense"
            long, reference = (
                stack.enter_context(
                    closing(Worker("benchmarks.decoder", str(model), policy, max_len))
                )
                for _ in range(2)
            )
            arms.append(Arm(name, each, long, reference))
        measure(arms, lengths)
    return arms


def main() -> int:
    from tests.engine.models import SMOLLM2

    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_decode")
    parser.add_argument("--budget", type=whole_number(1), default=256)
    parser.add_argument("--buffer-size", type=whole_number(0), default=32)
    default = REPOSITORY / "build" / "bench" / "long-decode"
    parser.add_argument("--output", type=Path, default=default, help="directory")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        arms = run(SMOLLM2, RandKVConfig(arguments.budget, arguments.buffer_size), LENGTHS)
    except (WrongRunError, RandKVConfigError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    (arguments.output / "long-decode.json").write_text(json.dumps(record(arms), indent=1) + "\n")
    draw(arms, LENGTHS, arguments.output / "long-decode.png")
    sys.stdout.write(report(arms, LENGTHS))
    sys.stdout.write(f"\nNext: look at {arguments.output / 'long-decode.png'}.\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
