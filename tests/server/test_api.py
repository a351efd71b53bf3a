# SPDX-License-Identifier: Apache-2.0
"""What comes back: overrides, the report in every answer, identity, the project's own routes."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from randkv.config import RandKVConfig
from randkv.metrics import POLICY_REFUSALS
from randkv.retention import retention_map
from tests.server.process import Server, chat

SMALL = {"type": "randkv", "budget": 64, "buffer_size": 8}
REPORT = {
    "policy",
    "budget",
    "buffer_size",
    "seed",
    "request_key",
    "rounds",
    "evicted_tokens",
    "physical_tokens",
    "replayed_tokens",
    "preemptions",
    "long_prompt",
}


def bodies(**fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The same request to each generation route: 200 tokens, greedy, seed 7."""
    common = {"temperature": 0, "seed": 7, **fields}
    return [
        ("/v1/chat/completions", chat(max_tokens=200, ignore_eos=True, **common)),
        (
            "/v1/completions",
            {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, **common},
        ),
        ("/v1/responses", {"input": "Tell a story.", "max_output_tokens": 200, **common}),
    ]


@pytest.mark.parametrize("route", [0, 1, 2], ids=["chat", "completions", "responses"])
def test_the_body_overrides_the_policy_and_the_answer_says_so(server: Server, route: int) -> None:
    path, body = bodies(kv_cache_policy=SMALL)[route]
    if route == 2:
        body["kv_cache_policy"] = {**SMALL, "request_key": "seed:7"}
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    usage = reply.json["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    report = reply.json["kv_cache"]
    assert report.keys() == REPORT
    assert (report["policy"], report["budget"], report["buffer_size"]) == ("randkv", 64, 8)
    assert report["request_key"] == "seed:7"
    # The last token is sampled but not computed.
    assert report["physical_tokens"] + report["evicted_tokens"] == prompt + completion - 1
    if route < 2:
        assert report["rounds"] > 0
        assert report["physical_tokens"] <= 64 + 8 + 8


@pytest.mark.parametrize("route", [0, 1, 2], ids=["chat", "completions", "responses"])
def test_a_stream_ends_with_the_report(server: Server, route: int) -> None:
    path, body = bodies(stream=True, kv_cache_policy="randkv")[route]
    if route < 2:
        body["stream_options"] = {"include_usage": True}
    reply = server.post(path, body)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    reports = [
        event.get("kv_cache") or event.get("response", {}).get("kv_cache") for event in reply.events
    ]
    assert [report is not None for report in reports] == [False] * (len(reports) - 1) + [True]
    assert reports[-1].keys() == REPORT
    assert reports[-1]["budget"] == 96
    if route < 2:
        assert reply.events[-1]["choices"] == []
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert reports[-1]["evicted_tokens"] > 0


def test_a_stream_without_usage_is_left_alone(server: Server) -> None:
    reply = server.chat(stream=True)
    assert b"kv_cache" not in reply.body
    assert b'"usage"' not in reply.body


def test_content_that_looks_like_a_usage_chunk_is_left_alone(server: Server) -> None:
    text = '"choices":[] "usage":{}}\n\ndata: [DONE]'
    reply = server.post(
        "/v1/completions",
        {"prompt": text, "echo": True, "max_tokens": 2, "stream": True, "temperature": 0},
    )
    assert reply.status == 200, reply.body
    assert reply.events[0]["choices"][0]["text"].startswith(text)
    assert b"kv_cache" not in reply.body


@pytest.mark.parametrize(
    ("header", "policy"),
    [("dense", "dense"), ("randkv", "randkv"), (json.dumps(SMALL), "randkv")],
)
def test_a_header_does_for_clients_that_cannot_add_fields(
    server: Server, header: str, policy: str
) -> None:
    report = server.chat({"X-KV-Cache-Policy": header}).json["kv_cache"]
    assert report["policy"] == policy
    if header.startswith("{"):
        assert report["budget"] == 64


def test_the_same_value_in_two_places_is_fine_and_two_values_are_not(server: Server) -> None:
    header = {"X-KV-Cache-Policy": json.dumps(SMALL)}
    assert server.chat(header, kv_cache_policy=SMALL).status == 200
    for body in ({"kv_cache_policy": "dense"}, {"vllm_xargs": {"kv_cache_policy": "dense"}}):
        reply = server.chat(header, **body)
        assert reply.status == 400
        assert reply.error["param"] == "kv_cache_policy"
        assert "Give it in one place." in reply.error["message"]


@pytest.mark.parametrize(
    ("override", "param", "reason"),
    [
        ({"type": "randkv", "budge": 50}, "kv_cache_policy.budge", "unknown_field"),
        ({"type": "randkv", "budget": 0}, "kv_cache_policy.budget", "out_of_range"),
        ({"type": "randkv", "budget": "64"}, "kv_cache_policy.budget", "malformed"),
        ({"type": "randkv", "budget": True}, "kv_cache_policy.budget", "malformed"),
        ({"type": "randkv", "budget": 5}, "kv_cache_policy.budget", "long_prompt"),
        ({"type": "window"}, "kv_cache_policy.type", "malformed"),
        ({"budget": 64}, "kv_cache_policy.type", "malformed"),
        ({"type": "dense", "budget": 64}, "kv_cache_policy.budget", "unknown_field"),
        ({"type": "randkv", "request_key": ""}, "kv_cache_policy.request_key", "out_of_range"),
        ({"type": "randkv", "seed": -1}, "kv_cache_policy.seed", "out_of_range"),
        (["randkv"], "kv_cache_policy", "malformed"),
        (7, "kv_cache_policy", "malformed"),
        ("window", "kv_cache_policy", "malformed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_override_is_a_400_that_names_the_field_and_is_counted(
    server: Server, override: Any, param: str, reason: str, stream: bool
) -> None:
    before = server.metrics()
    reply = server.chat(kv_cache_policy=override, stream=stream)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["message"].startswith(f"{param} has value ")
    assert reply.error["code"] == 400
    after = server.metrics()
    grown = {
        name: after.total("randkv_refused_overrides_total", reason=name)
        - before.total("randkv_refused_overrides_total", reason=name)
        for name in POLICY_REFUSALS
    }
    assert {name: count for name, count in grown.items() if count} == {reason: 1}


def test_a_prompt_longer_than_the_budget_is_refused_with_both_numbers(server: Server) -> None:
    reply = server.chat(kv_cache_policy={"type": "randkv", "budget": 20})
    tokens = server.chat().json["usage"]["prompt_tokens"]
    message = reply.error["message"]
    assert "has value 20" in message
    assert f"at least the prompt's {tokens} tokens" in message
    assert f"Raise the budget to {tokens} or more" in message


def test_beam_search_is_a_400(server: Server) -> None:
    reply = server.chat(use_beam_search=True, n=2)
    assert reply.status == 400
    assert "beam search" in reply.error["message"]


def test_samples_have_their_own_reports_and_the_sum(server: Server) -> None:
    whole = server.chat(n=3, max_tokens=150, seed=1, ignore_eos=True, temperature=1)
    stream = server.chat(
        n=3,
        max_tokens=150,
        seed=1,
        ignore_eos=True,
        temperature=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    for report in (whole.json["kv_cache"], stream.events[-1]["kv_cache"]):
        samples = report["samples"]
        assert [sample["request_key"] for sample in samples] == [f"seed:1/{i}" for i in range(3)]
        assert report["evicted_tokens"] == sum(sample["evicted_tokens"] for sample in samples) > 0
        assert report["rounds"] == sum(sample["rounds"] for sample in samples)
    usage = stream.events[-1]["usage"]
    assert usage == {k: v for k, v in whole.json["usage"].items() if v is not None}


def test_a_seed_makes_the_keep_sets_and_the_text_reproducible(server: Server) -> None:
    first, again, other = (
        server.chat(max_tokens=150, seed=seed, ignore_eos=True).json for seed in (11, 11, 12)
    )
    assert first["kv_cache"] == again["kv_cache"]
    text = [answer["choices"][0]["message"]["content"] for answer in (first, again, other)]
    assert text[0] == text[1]
    # Greedy: only the keep-sets differ between seeds.
    assert text[0] != text[2]


def test_the_request_id_is_echoed_used_as_identity_and_logged(server: Server) -> None:
    reply = server.chat({"X-Request-Id": "order-66/a"})
    assert reply.headers["x-request-id"] == "order-66/a"
    assert reply.json["id"] == "chatcmpl-order-66/a"
    assert reply.json["kv_cache"]["request_key"] == "chatcmpl-order-66/a"
    line = server.logged("order-66/a")
    assert (line["status"], line["outcome"], line["policy"]) == (200, "length", "randkv")
    assert line["completion_tokens"] == reply.json["usage"]["completion_tokens"] == 20
    assert line["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert "Count from" not in json.dumps(line)


def test_without_a_request_id_one_is_made(server: Server) -> None:
    first, second = (server.get("/v1/models").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert len(first) == 32


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", 'a"b', "é"])
def test_a_bad_request_id_is_a_400(server: Server, given: str) -> None:
    headers = {"X-Request-Id": given.encode("latin-1").decode("latin-1")}
    reply = server.send("GET", "/v1/models", headers=headers)
    assert reply.status == 400
    assert reply.error["param"] == "X-Request-Id"


def test_the_policy_route_agrees_with_the_engine(server: Server) -> None:
    found = server.get("/v1/kv_cache/policy").json
    assert found["default"] == {"type": "randkv", "budget": 96, "buffer_size": 16, "seed": 0}
    assert found["limits"]["allow_dense"] is True
    assert found["limits"]["long_prompt"] == "refuse"
    model = found["model"]
    assert (model["num_layers"], model["num_kv_heads"], model["head_size"]) == (2, 2, 32)
    assert found["bytes_per_token"] == 2 * 2 * 2 * 32 * 4  # float32
    assert found["bound"]["tokens"] == 96 + 2 * 16
    assert found["bound"]["blocks"] == -(-128 // found["block_size"])
    assert found["requests_that_fit"] == found["num_blocks"] // found["bound"]["blocks"]
    # One block of what the engine was given is vLLM's null block.
    block_bytes = found["block_size"] * found["bytes_per_token"]
    assert found["num_blocks"] == 64 * 2**20 // block_bytes - 1
    text = server.metrics().text
    assert f'num_gpu_blocks="{found["num_blocks"] + 1}"' in text


def test_the_retention_map_of_an_answer(server: Server) -> None:
    answer = server.chat(max_tokens=120, seed=3, ignore_eos=True).json
    report, prompt = answer["kv_cache"], answer["usage"]["prompt_tokens"]
    computed = report["physical_tokens"] + report["evicted_tokens"]
    query = f"request_key=seed:3&prompt_tokens={prompt}&computed_tokens={computed}&layer=1"
    found = server.get(f"/v1/kv_cache/retention?{query}").json
    for name in ("rounds", "evicted_tokens", "physical_tokens"):
        assert found[name] == report[name]
    expected = retention_map(
        RandKVConfig(96, 16),
        request_key="seed:3",
        prompt_tokens=prompt,
        computed_tokens=computed,
        layer=1,
        num_kv_heads=2,
    )
    assert found == expected.to_dict()
    svg = server.get(f"/v1/kv_cache/retention?{query}&format=svg")
    assert svg.headers["content-type"].startswith("image/svg+xml")
    assert b"<svg" in svg.body
    png = server.get(f"/v1/kv_cache/retention?{query}&format=png")
    assert png.headers["content-type"] == "image/png"
    assert struct.unpack(">4s", png.body[:4])[0] == b"\x89PNG"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("prompt_tokens=5&computed_tokens=9", "request_key"),
        ("request_key=a&prompt_tokens=500&computed_tokens=900", "prompt_tokens"),
        ("request_key=a&prompt_tokens=5&computed_tokens=4", "computed_tokens"),
        ("request_key=a&prompt_tokens=5&computed_tokens=9&layer=2", "layer"),
        ("request_key=a&prompt_tokens=5&computed_tokens=9&budget=0", "budget"),
        ("request_key=a&prompt_tokens=5&computed_tokens=9&format=gif", "format"),
        ("request_key=a&prompt_tokens=x&computed_tokens=9", "prompt_tokens"),
    ],
)
def test_a_bad_retention_query_names_the_field(server: Server, query: str, param: str) -> None:
    reply = server.get(f"/v1/kv_cache/retention?{query}")
    assert reply.status == 400
    assert reply.error["param"] in (param, f"query.{param}")


def test_tokenize_and_models_are_vllms(server: Server) -> None:
    models = server.get("/v1/models").json
    assert models["data"][0]["id"] == "small"
    tokens = server.post("/tokenize", {"prompt": "One two"}).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json["prompt"] == "One two"
