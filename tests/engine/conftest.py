# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import POLICY, Engine, Watcher, engine
from tests.engine.models import SMOLLM2, TINY_VOCABULARY, make_tiny_model
from tests.engine.oracle import Oracle


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    return Oracle(SMOLLM2)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def any_engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    """One engine of the small model for a whole file; both schedulers, overrides allowed."""
    with engine(tiny_model, asynchronous=request.param, kv_cache_policy=POLICY) as started:
        yield started


@pytest.fixture
def watcher(any_engine: Engine) -> Iterator[Watcher]:
    watching = Watcher(any_engine)
    yield watching
    watching.stop()


class Prompts:
    """Random prompts of the small model, the same on every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(2, TINY_VOCABULARY) for _ in range(num_tokens)]

    def any(self, low: int, high: int) -> list[int]:
        return self(self._random.randint(low, high))


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(0)
