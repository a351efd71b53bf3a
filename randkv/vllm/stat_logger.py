# SPDX-License-Identifier: Apache-2.0
"""vLLM's stat logger plugin (``vllm.stat_logger_plugins``) that feeds the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from randkv.metrics import Metrics, from_dict
from randkv.vllm.hooks import engine_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats


class PolicyStatLogger(AggregateStatLoggerBase):
    """Adds what each engine's scheduler reports to the metrics. Idle without a policy.

    Attributes:
        metrics: Of this process; None without a policy.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self.metrics: Metrics | None = None
        if engine_policy(vllm_config) is not None:
            _unregister()
            self.metrics = Metrics(str(vllm_config.model_config.served_model_name))
            for engine in engine_indexes:
                self.metrics.start_engine(str(engine))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        *_: Any,
        engine_idx: int = 0,
        **__: Any,
    ) -> None:
        stats = None if scheduler_stats is None else scheduler_stats.kv_cache_policy
        if stats is not None and self.metrics is not None:
            self.metrics.record(str(engine_idx), from_dict(stats))

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _unregister() -> None:
    """A second engine in one process replaces the metrics of the first, as vLLM's own do."""
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith("randkv_"):
            REGISTRY.unregister(collector)
