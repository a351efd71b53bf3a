# SPDX-License-Identifier: Apache-2.0
"""Gauges of a server, sampled while a run lasts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.serving.record import RefusedRunError, Sample
from tests.server.process import Server

INTERVAL = 1.0
"""Seconds between samples; a scrape costs the server some milliseconds."""

_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)


@contextmanager
def monitor(server: Server) -> Iterator[list[Sample]]:
    """A list that grows by a sample every `INTERVAL`.

    Raises:
        RefusedRunError: On the way out, when a sample could not be taken.
    """
    samples: list[Sample] = []
    failures: list[Exception] = []
    ended = threading.Event()
    began = time.monotonic()

    def take() -> None:
        found = dict(_GAUGE.findall(server.get("/metrics").body.decode()))
        samples.append(
            Sample(
                seconds=round(time.monotonic() - began, 3),
                num_running=float(found["num_requests_running"]),
                num_waiting=float(found["num_requests_waiting"]),
                kv_usage=float(found["kv_cache_usage_perc"]),
            )
        )

    def run() -> None:
        try:
            while not ended.wait(INTERVAL):
                take()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
    if failures:
        raise RefusedRunError(f"/metrics could not be sampled during the run: {failures[0]!r}")
