# SPDX-License-Identifier: Apache-2.0
"""Gauges of a server, sampled while a run lasts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.serving.record import Sample
from tests.server.process import Server

INTERVAL = 1.0
"""Seconds between samples; a scrape costs the server some milliseconds."""

_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)


@contextmanager
def monitor(server: Server) -> Iterator[list[Sample]]:
    """A list that grows by a sample every `INTERVAL`."""
    samples: list[Sample] = []
    ended = threading.Event()
    began = time.monotonic()

    def sample() -> None:
        while not ended.wait(INTERVAL):
            found = dict(_GAUGE.findall(server.get("/metrics").body.decode()))
            samples.append(
                Sample(
                    seconds=round(time.monotonic() - began, 3),
                    num_running=float(found["num_requests_running"]),
                    num_waiting=float(found["num_requests_waiting"]),
                    kv_usage=float(found["kv_cache_usage_perc"]),
                )
            )

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
