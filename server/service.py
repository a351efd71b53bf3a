# SPDX-License-Identifier: Apache-2.0
"""What one API server process holds while it serves."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
from argparse import Namespace
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

from fastapi import FastAPI

from randkv import patching
from randkv.config import EnginePolicy
from randkv.errors import RandKVError
from randkv.metrics import Metrics
from randkv.vllm.hooks import engine_policy
from randkv.vllm.stat_logger import PolicyStatLogger
from server.api_keys import ApiKeys
from server.metrics_port import MetricsPort
from server.record import RequestRecord
from server.refusal import Refusal
from server.reporting_engine import ReportingEngine
from server.request_limits import RequestLimits

logger = logging.getLogger("vllm.randkv.server")

_SERVING = (
    "openai_serving_chat",
    "openai_serving_chat_batch",
    "openai_serving_completion",
    "openai_serving_responses",
    "anthropic_serving_messages",
    "serving_tokens",
)
_LOOK_SECONDS = 0.25
RETRY_AFTER = {"Retry-After": "5"}


class Service:
    """Limits, keys, metrics, the requests in flight, and the way to the end.

    An async context manager around the app's life.

    Attributes:
        has_given_up: What still ran when the time to drain was over has been cancelled.
    """

    def __init__(self, app: FastAPI, args: Namespace) -> None:
        self._app = app
        self._args = args
        self.engine_client = app.state.engine_client
        vllm_config = self.engine_client.vllm_config
        self.policy: EnginePolicy | None = engine_policy(vllm_config)
        self.limits = RequestLimits.of(args)
        self.max_body_bytes: int = args.max_body_bytes
        self.max_header_bytes: int = args.max_header_bytes
        self.more_routes = frozenset(args.allow_route)
        self.is_readiness_open: bool = args.open_readiness
        self.has_access_log: bool = not args.no_access_log
        environment = os.environ.get("RANDKV_API_KEYS", "").split(",")
        environment.append(os.environ.get("VLLM_API_KEY", ""))
        self.keys = ApiKeys([*args.front_end_keys, *environment], args.api_keys_file)
        self._metrics_token = _metrics_token(args.metrics_token_file)
        self._metrics_port = MetricsPort.of(args, vllm_config)
        self._metrics = self._take_metrics()
        self._in_flight: set[RequestRecord] = set()
        self._is_draining = False
        self.has_given_up = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def of(cls, app: FastAPI) -> Service:
        """The service of vLLM's app, whose state is complete. Adds this project's routes."""
        from server.routes import router

        service = cls(app, app.state.args)
        reporting = ReportingEngine(service.engine_client)
        for name in _SERVING:
            serving = getattr(app.state, name, None)
            if serving is not None:
                serving.engine_client = reporting
        app.state.service = service
        app.include_router(router)
        return service

    def _take_metrics(self) -> Metrics | None:
        """The metrics that the engine's stat logger feeds.

        Raises:
            RandKVError: There is a policy, but no stat logger for it.
        """
        if self.policy is None:
            return None
        manager = self.engine_client.logger_manager
        loggers = [] if manager is None else manager.stat_loggers
        for one in loggers:
            if isinstance(one, PolicyStatLogger) and one.metrics is not None:
                one.metrics.family(
                    "randkv_build_info",
                    version=version("randkv"),
                    vllm_version=patching.VLLM_VERSION,
                    patch=patching.digest(),  # checked when the engine was configured
                    compactor=self.engine_client.vllm_config.cache_config.kv_cache_compactor,
                ).set(1)
                self._show_bound(one.metrics)
                one.metrics.start_front_end()
                return one.metrics
        raise RandKVError(
            "vLLM did not load the stat logger plugin 'randkv', so there would be no metrics: "
            "VLLM_PLUGINS, when set, must name it; else run make setup again"
        )

    def _show_bound(self, metrics: Metrics) -> None:
        """The bound that ``/v1/kv_cache/policy`` tells."""
        if self.policy is not None and self.policy.default is not None:
            max_model_len = self.engine_client.vllm_config.model_config.max_model_len
            bound = min(self.policy.default.max_physical_len, max_model_len)
            metrics.family("randkv_default_bound_tokens").set(bound)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        self._tasks.append(loop.create_task(self._watch_engine()))
        self._show_readiness()
        if self._metrics_port is not None:
            self._metrics_port.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._metrics_port is not None:
            self._metrics_port.close()

    # Requests

    def admit(self, record: RequestRecord) -> None:
        """Count a request for generation in. Raises Refusal when it has to wait or go."""
        if self._is_draining:
            raise self.too_late()
        limit = self._args.max_inflight_requests
        if len(self._in_flight) >= limit:
            message = f"{limit} requests are in progress, the most this server takes: retry later"
            raise Refusal(429, message, "overload", headers=RETRY_AFTER)
        self._in_flight.add(record)

    @staticmethod
    def too_late() -> Refusal:
        message = "the server is shutting down: send the request to another, or again later"
        return Refusal(503, message, "draining", headers={**RETRY_AFTER, "Connection": "close"})

    def release(self, record: RequestRecord) -> None:
        """The request has ended, one way or another."""
        self._in_flight.discard(record)

    def count(self, record: RequestRecord) -> None:
        """Count a request for generation that has ended."""
        if self._metrics is None:
            return
        labels = {"policy": record.policy or "none", "outcome": record.outcome}
        self._metrics.family("randkv_requests", **labels).inc()
        param = record.error_param or ""
        # What the front end refused was counted there; this is known to the input processor alone.
        if not record.was_refused and param.startswith("kv_cache_policy"):
            reason = "long_prompt" if param == "kv_cache_policy.budget" else "not_allowed"
            self._metrics.family("randkv_refused_overrides", reason=reason).inc()

    def count_refusal(self, refusal: Refusal) -> None:
        if self._metrics is None:
            return
        if refusal.policy_reason is not None:
            self._metrics.family("randkv_refused_overrides", reason=refusal.policy_reason).inc()
        else:
            self._metrics.family("randkv_refused_requests", reason=refusal.reason).inc()

    def check_metrics_access(self, authorization: str | None) -> None:
        """Raises Refusal unless ``/metrics`` may be read here."""
        if self._args.metrics_port is not None:
            raise Refusal(404, f"/metrics is on port {self._args.metrics_port}", "route")
        if self._metrics_token is not None:
            given = (authorization or "").removeprefix("Bearer ").encode()
            if hmac.compare_digest(given, self._metrics_token):
                return
        elif not self.keys:
            return
        raise Refusal(
            401,
            "/metrics has a token of its own (--metrics-token-file): expected the header "
            "Authorization: Bearer TOKEN. With API keys and without such a token it is only on "
            "--metrics-port.",
            "authentication",
            headers={"WWW-Authenticate": "Bearer"},
        )

    # The end

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and not self.engine_client.errored

    def _show_readiness(self) -> None:
        if self._metrics is not None:
            self._metrics.family("randkv_ready").set(self.is_ready)

    def _stop(self) -> None:
        """A signal to end: the first drains, the second does not wait any longer."""
        loop = asyncio.get_running_loop()
        if self._is_draining:
            self._abort_all()
            return
        self._is_draining = True
        self._show_readiness()
        self._tasks.append(loop.create_task(self._drain()))

    async def _drain(self) -> None:
        """Let what runs finish, for as long as --shutdown-timeout says; then end."""
        timeout = self._args.shutdown_timeout
        deadline = asyncio.get_running_loop().time() + timeout
        logger.info("Shutting down: %d requests have up to %d s", len(self._in_flight), timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._in_flight:
                    await asyncio.sleep(0.05)
        self._abort_all()
        while self._in_flight:
            await asyncio.sleep(0.02)
        self._end(deadline - asyncio.get_running_loop().time())

    def _end(self, seconds: float) -> None:
        """End the process, after at most `seconds` for clients that have not read their answers."""
        server = self._app.state.server
        server.config.timeout_graceful_shutdown = max(seconds, 1)
        server.should_exit = True

    def _abort_all(self) -> None:
        self.has_given_up = True
        for record in self._in_flight:
            if record.task is not None:
                record.task.cancel()

    async def _watch_engine(self) -> None:
        """End the process with an error once the engine is dead."""
        while not self.engine_client.errored:
            await asyncio.sleep(_LOOK_SECONDS)
        logger.error("The engine is dead: this server ends, for a supervisor to restart it")
        self._args.engine_is_dead = True
        self._is_draining = True
        self._show_readiness()
        await asyncio.sleep(1)  # for the requests in flight to get their errors
        self._end(0)


def _metrics_token(path: Path | None) -> bytes | None:
    token = os.environ.get("RANDKV_METRICS_TOKEN", "")
    if path is not None:
        token = path.read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError(f"--metrics-token-file {path} is empty: one token expected")
    return token.encode() or None
