# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.models import make_small_chat_model
from tests.server.process import Server, serve

POLICY = '{"type": "randkv", "budget": 96, "buffer_size": 16}'


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded default model under a small budget: text that can be read."""
    with serve(tmp_path_factory.mktemp("default"), "--kv-cache-policy", POLICY) as running:
        yield running


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that serve a model of random weights: fast, and says anything."""
    directory: Path = make_small_chat_model(tmp_path_factory.mktemp("small"))
    return [
        *(str(directory), "--served-model-name", "small", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(64 * 2**20)),
        *("--max-model-len", "8192", "--dtype", "float32"),
    ]


@pytest.fixture(scope="session")
def server(small_model: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The small model under a small budget, no API keys; for the whole run."""
    directory = tmp_path_factory.mktemp("server")
    with serve(directory, *small_model, "--kv-cache-policy", POLICY) as running:
        yield running
