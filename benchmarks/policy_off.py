# SPDX-License-Identifier: Apache-2.0
"""What the patch costs when the policy is off: patched against unpatched vLLM, in pairs.

``python -m benchmarks.policy_off`` prints the ratio of output tokens/s, patched over unpatched.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.engine_pair import Worker, compare, show
from benchmarks.options import whole_number
from benchmarks.unpatched import make_unpatched


@contextmanager
def workers(model: Path) -> Iterator[tuple[Worker, Worker]]:
    """A patched and an unpatched engine."""
    with tempfile.TemporaryDirectory() as directory:
        path = [make_unpatched(Path(directory))]
        command = ("benchmarks.workload", str(model))
        with (
            closing(Worker(*command)) as patched,
            closing(Worker(*command, path=path)) as unpatched,
        ):
            yield patched, unpatched


def main() -> int:
    from tests.engine.models import make_tiny_model

    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_off")
    parser.add_argument("--pairs", type=whole_number(1), default=400)
    parser.add_argument(
        "--tokens", type=whole_number(1), default=20, help="output tokens per request"
    )
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        workers(make_tiny_model(Path(directory))) as (patched, unpatched),
    ):
        ratios = compare(patched, unpatched, arguments.pairs, arguments.tokens)
    show("patched / unpatched, policy off", ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
