# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` on a port of its own."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import start_http_server
from vllm.v1.metrics.prometheus import get_prometheus_registry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class MetricsPort:
    """prometheus_client's own server, in a thread. Always in the text format, as on ``--port``.

    In OpenMetrics prometheus_client 0.26 writes vLLM's names as ``vllm_``, for Prometheus 2.
    """

    host: str
    port: int
    _server: Any = field(default=None, init=False)

    @classmethod
    def of(cls, args: Namespace, vllm_config: VllmConfig) -> MetricsPort | None:
        """None when not asked for; of several API server processes the first has it."""
        if args.metrics_port is None or vllm_config.parallel_config._api_process_rank > 0:
            return None
        return cls(args.metrics_host, args.metrics_port)

    def open(self) -> None:
        self._server, _ = start_http_server(
            self.port, self.host, registry=get_prometheus_registry()
        )
        negotiating = self._server.get_app()
        self._server.set_app(
            lambda environ, start: negotiating({**environ, "HTTP_ACCEPT": "*/*"}, start)
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
