# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from randkv.selection import evicted_slots, evicted_slots_by_head, priorities, stream_key

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "selection_vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["select"], ids=lambda v: v["input"]["request_key"][:12])
def test_known_answers(vector: dict[str, Any]) -> None:
    given_input = dict(vector["input"])
    key = stream_key(given_input.pop("request_key"), given_input.pop("seed"))
    slots = evicted_slots(key, **given_input)
    assert slots.dtype == np.int32
    assert slots.tolist() == vector["evicted_slots"]
    first = vector["priorities_first8"]
    found = priorities(
        key,
        given_input["round_index"],
        np.array([given_input["layer"]]),
        np.array([given_input["kv_head"]]),
        given_input["first_slot"],
        given_input["stop_slot"],
    )
    assert found[0, 0, : len(first)].tolist() == first


def test_stream_key_known_answer() -> None:
    vector = VECTORS["replay"][0]
    key = stream_key(vector["input"]["request_key"], vector["input"]["seed"])
    assert list(key) == vector["stream_key"]


@given(
    seed=st.integers(0, 2**64 - 1),
    first=st.integers(0, 50),
    num_candidates=st.integers(0, 60),
    data=st.data(),
)
def test_all_heads_at_once_is_one_head_at_a_time_in_any_order(
    seed: int, first: int, num_candidates: int, data: st.DataObject
) -> None:
    num_evict = data.draw(st.integers(0, num_candidates))
    layers = np.array(data.draw(st.permutations(range(3))))
    heads = np.array(data.draw(st.permutations(range(4))))
    key = stream_key("any", seed)
    stop = first + num_candidates
    together = evicted_slots_by_head(key, 5, layers, heads, first, stop, num_evict)
    assert together.shape == (3, 4, num_evict)
    for i, layer in enumerate(layers):
        for j, head in enumerate(heads):
            alone = evicted_slots(key, 5, int(layer), int(head), first, stop, num_evict)
            assert together[i, j].tolist() == alone.tolist()
            assert sorted(set(alone.tolist())) == alone.tolist()
            assert ((first <= alone) & (alone < stop)).all()


@pytest.mark.parametrize(("stop", "num_evict"), [(9, 5), (5, 1), (4, 1), (9, -1)])
def test_more_than_the_candidates_is_an_error(stop: int, num_evict: int) -> None:
    with pytest.raises(ValueError, match=f"num_evict is {num_evict}"):
        evicted_slots(stream_key("a", 0), 0, 0, 0, 5, stop, num_evict)


def test_uniform_over_candidates() -> None:
    counts = np.zeros(40)
    for seed in range(400):
        slots = evicted_slots_by_head(
            stream_key("uniform", seed), 0, np.arange(2), np.arange(2), 7, 47, 10
        )
        counts += np.bincount(slots.ravel() - 7, minlength=40)
    assert chisquare(counts).pvalue > 1e-3


def test_heads_layers_rounds_and_requests_draw_independently() -> None:
    def draw(request_key: str, round_index: int, layer: int, head: int) -> set[int]:
        key = stream_key(request_key, 0)
        return set(evicted_slots(key, round_index, layer, head, 0, 1000, 100).tolist())

    base = draw("a", 0, 0, 0)
    for other in (draw("b", 0, 0, 0), draw("a", 1, 0, 0), draw("a", 0, 1, 0), draw("a", 0, 0, 1)):
        assert len(base & other) < 30  # 10 expected by chance, 100 if the argument were ignored
