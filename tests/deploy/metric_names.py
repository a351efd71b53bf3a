# SPDX-License-Identifier: Apache-2.0
"""Names of the series that a server has on /metrics, as PromQL selects them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from randkv.metrics import METRICS

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_DECLARED = re.compile(r'self\._(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"')


def ours() -> set[str]:
    return {metric.name + suffix for metric in METRICS for suffix in _SUFFIXES[metric.kind]}


def of_vllm() -> set[str]:
    """From the sources of vLLM's own metrics, without importing it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(next(iter(spec.submodule_search_locations))) / "v1" / "metrics" / "loggers.py"
    declared = _DECLARED.findall(source.read_text(encoding="utf-8"))
    return {name + suffix for kind, name in declared for suffix in _SUFFIXES[kind]}
