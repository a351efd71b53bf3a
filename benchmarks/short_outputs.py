# SPDX-License-Identifier: Apache-2.0
"""What the policy costs while no request reaches its budget: against the full cache, in pairs.

``python -m benchmarks.short_outputs`` prints the ratio of output tokens/s, policy over dense.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.engine_pair import Worker, compare, show
from benchmarks.options import whole_number

POLICY = {"type": "randkv", "budget": 2048, "buffer_size": 64}
"""No request of the workload gets near it."""


def main() -> int:
    from tests.engine.models import SMOLLM2, make_tiny_model

    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_outputs")
    parser.add_argument("--pairs", type=whole_number(1), default=400)
    parser.add_argument(
        "--tokens", type=whole_number(1), default=20, help="output tokens per request"
    )
    parser.add_argument(
        "--default-model",
        action="store_true",
        help="the embedded model; otherwise a small random one, in which the model itself takes "
        "little of the time",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = SMOLLM2 if arguments.default_model else make_tiny_model(Path(directory))
        policy, dense = (
            stack.enter_context(closing(Worker("benchmarks.workload", str(model), policy)))
            for policy in (json.dumps(POLICY), "dense")
        )
        ratios = compare(policy, dense, arguments.pairs, arguments.tokens)
    show("policy / dense, outputs below the budget", ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
