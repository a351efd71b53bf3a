# SPDX-License-Identifier: Apache-2.0
"""What is compared: the full cache, the policy at several budgets, a window as control."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from randkv.config import RandKVConfig

DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Arm:
    """How one server is started.

    Attributes:
        name: ``dense``, ``randkv-<budget>`` or ``window-<budget>``.
        config: The policy; None for the full cache.
        is_window: The oldest generated tokens are evicted, not random ones.
    """

    name: str
    config: RandKVConfig | None = None
    is_window: bool = False

    @property
    def server_options(self) -> list[str]:
        if self.config is None:
            return ["--kv-cache-policy", "dense"]
        options = ["--kv-cache-policy", json.dumps(self.config.to_dict())]
        if self.is_window:
            options += ["--kv-cache-compactor", "pytorch", "--allow-route", "/collective_rpc"]
            options += ["--worker-extension-cls", "benchmarks.window.WorkerExtension"]
        return options

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its server needs."""
        return {"VLLM_SERVER_DEV_MODE": "1"} if self.is_window else {}


def parse_arm(name: str, buffer_size: int) -> Arm:
    """The arm called `name`.

    Raises:
        ValueError: There is none of that name.
    """
    if name == DENSE:
        return Arm(name)
    match = re.fullmatch(r"(randkv|window)-([1-9]\d*)", name)
    if match is None:
        raise ValueError(
            f"arm {name!r}: expected dense, randkv-<budget> or window-<budget>, as in randkv-256"
        )
    return Arm(name, RandKVConfig(int(match[2]), buffer_size), match[1] == "window")
