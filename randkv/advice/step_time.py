# SPDX-License-Identifier: Apache-2.0
"""A model of one decode step's time. Whatever comes out of it is modelled, not measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from randkv.config import check_number
from randkv.errors import RandKVConfigError

_CONSTANTS = ("fixed_seconds", "seconds_per_kv_byte", "seconds_per_sequence")
_KEYS = (*_CONSTANTS, "source")
MAX_SECONDS = 3600.0
ROOFLINE = "roofline"
CONSTANTS = "constants"


@dataclass(frozen=True, slots=True)
class StepTime:
    """``t_step = fixed + per_kv_byte * resident KV bytes + per_sequence * sequences``.

    Attributes:
        kind: `ROOFLINE`, or `CONSTANTS` for those of a file.
        fixed_seconds: Per step, whatever runs in it.
        seconds_per_kv_byte: Per KV byte on one GPU that the step reads.
        seconds_per_sequence: Per sequence in the step.
        source: Where the constants come from, in words.
    """

    kind: str
    fixed_seconds: float
    seconds_per_kv_byte: float
    seconds_per_sequence: float
    source: str

    def tokens_per_second(self, num_sequences: int, kv_bytes: float) -> float:
        """Output tokens per second of `num_sequences` that hold `kv_bytes` each on one GPU."""
        step = self.fixed_seconds + num_sequences * (
            self.seconds_per_kv_byte * kv_bytes + self.seconds_per_sequence
        )
        return num_sequences / step

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def roofline(weights_bytes: float, bandwidth_gb: float) -> StepTime:
    """A step reads the weights once and the resident KV once, at the full bandwidth.

    Args:
        weights_bytes: Weights on one GPU.
        bandwidth_gb: Memory bandwidth of one GPU; 10**9 bytes per second.
    """
    per_second = check_number("memory_bandwidth", bandwidth_gb, high=1e6) * 1e9
    return StepTime(
        ROOFLINE,
        weights_bytes / per_second,
        1 / per_second,
        0.0,
        f"weights and resident KV read once per step at {bandwidth_gb:,.0f} GB/s",
    )


def read_latency(path: Path) -> StepTime:
    """The constants of a JSON file; `source` in it says who measured them and how.

    Raises:
        RandKVConfigError: Unreadable, an unknown or missing key, a value that is no time, or a
            model in which no step takes time.
    """
    example = json.dumps(dict.fromkeys(_CONSTANTS, 0.001) | {"source": "..."})
    expected = f"an object like {example}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RandKVConfigError(
            "latency", str(path), f"a readable file ({error.strerror or error})"
        ) from None
    except (ValueError, RecursionError):
        raise RandKVConfigError("latency", str(path), f"JSON, {expected}") from None
    if not isinstance(found, dict) or set(found) != set(_KEYS):
        keys = sorted(found) if isinstance(found, dict) else found
        raise RandKVConfigError("latency", keys, expected, f"All four keys are needed in {path}.")
    fixed, per_kv_byte, per_sequence = (
        check_number(f"latency.{key}", found[key], low=0.0, high=MAX_SECONDS) for key in _CONSTANTS
    )
    source = found["source"]
    if not isinstance(source, str) or not source.strip():
        raise RandKVConfigError("latency.source", source, "a text: who measured this, and how")
    if not fixed:
        raise RandKVConfigError("latency.fixed_seconds", fixed, "a time above 0")
    return StepTime(CONSTANTS, fixed, per_kv_byte, per_sequence, source.strip())
