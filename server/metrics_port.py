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
    """prometheus_client's own server, in a thread."""

    host: str
    port: int
    _server: Any = field(default=None, init=False)

    @classmethod
    def of(cls, args: Namespace, vllm_config: VllmConfig) -> MetricsPort | None:
        """None when there is no such port. Of several API servers, the first opens it for all."""
        if args.metrics_port is None:
            return None
        if vllm_config.parallel_config._api_process_rank > 0:
            return _Elsewhere(args.metrics_host, args.metrics_port)
        return cls(args.metrics_host, args.metrics_port)

    def open(self) -> None:
        self._server, _ = start_http_server(
            self.port, self.host, registry=get_prometheus_registry()
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Elsewhere(MetricsPort):
    """Another API server process has it."""

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass
