# SPDX-License-Identifier: Apache-2.0
"""Traps that front ends on vLLM have fallen into, by their numbers in the field study.

Where each is tested:

- 1, 2, 3, 24, 25, 35: test_lifecycle.py.
- 4, 6, 28: test_api.py.
- 5: test_clients.py.
- 8, 9, 10, 11, 12, 14, 15: test_malformed.py; what makes 8 hold, and 15 where it is right, here.
- 7, 13, 16 to 19, 21 to 23, 40: here.
- 20: the front end renames nothing; test_api.py has the streams that are left alone.
- 26, 27, 33: test_security.py.
- 29: test_api.py, by the seed and by the request's id.
- 32: test_processes.py.
- 41: test_api.py and test_lifecycle.py, by the access log.
- 30, 31, 34, 36 to 39 concern dashboards, routers and containers: not this directory.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.process import PROMPT, Reply, Server, chat, serve

CONTEXT = 8192
LONG = {"max_tokens": 160, "ignore_eos": True}  # beyond the budget of 96 + 2 * 16
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "minLength": 100, "maxLength": 200}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def streamed(reply: Reply) -> str:
    """Content of choice 0 of a stream of chat completions."""
    parts = [choice for event in reply.events for choice in event["choices"]]
    return "".join(part["delta"].get("content") or "" for part in parts)


def content(reply: Reply) -> str:
    text: str = reply.json["choices"][0]["message"]["content"]
    return text


def test_trap_7_a_stream_has_usage_only_where_it_was_asked_for(server: Server) -> None:
    plain = server.chat(stream=True)
    last = server.chat(stream=True, stream_options={"include_usage": True})
    options = {"include_usage": True, "continuous_usage_stats": True}
    every = server.chat(stream=True, stream_options=options)
    assert not any("usage" in event for event in plain.events)
    *chunks, end = last.events
    assert not any(event.get("usage") for event in chunks)
    assert all(event["choices"] for event in chunks)
    assert end["choices"] == []
    assert end["usage"]["completion_tokens"] == 20
    counts = [event["usage"]["completion_tokens"] for event in every.events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 20)
    for reply in (plain, last, every):
        assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_traps_13_22_23_an_error_before_the_first_token_is_its_own_status(
    server: Server, path: str
) -> None:
    prompt = {
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
        "completions": {"prompt": PROMPT},
        "responses": {"input": PROMPT},
    }[path]
    body = {**prompt, "stream": True, "logit_bias": {"99999999": 1}}
    reply = server.post(f"/v1/{path}", body)
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert reply.error["param"] == "logit_bias"


def test_trap_15_echo_without_generation_is_the_prompt(server: Server) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == reply.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_trap_16_more_output_than_the_context_leaves_is_a_400_with_the_numbers(
    server: Server, stream: bool
) -> None:
    prompt = server.chat().json["usage"]["prompt_tokens"]
    left = CONTEXT - prompt
    fits = server.chat(max_tokens=left, stop=[" "], stream=stream)
    beyond = server.chat(max_tokens=left + 1, stream=stream)
    alone = server.chat(max_tokens=CONTEXT + 1, stream=stream)
    assert fits.status == 200
    assert (beyond.status, alone.status) == (400, 400)
    for number in (CONTEXT, left + 1, prompt):
        assert re.search(rf"\b{number}\b", beyond.error["message"])
    assert alone.error["param"] == "max_tokens"
    for number in (CONTEXT, CONTEXT + 1):
        assert re.search(rf"\b{number}\b", alone.error["message"])


def test_trap_16_without_max_tokens_the_context_is_the_limit(server: Server) -> None:
    body = {"prompt": [5] * (CONTEXT - 3), "temperature": 0, "ignore_eos": True}
    asked = chat(kv_cache_policy="dense", max_tokens=None, ignore_eos=True)
    asked["messages"][0]["content"] = "a " * 8000
    reply = server.post("/v1/completions", {**body, "max_tokens": 3, "kv_cache_policy": "dense"})
    assert reply.json["usage"]["total_tokens"] == CONTEXT
    reply = server.post("/v1/chat/completions", asked)
    assert reply.json["usage"]["total_tokens"] == CONTEXT
    assert reply.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_trap_17_each_of_several_choices_ends_once_and_usage_is_their_sum(
    server: Server, stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = server.chat(n=4, temperature=1, seed=5, max_tokens=30, ignore_eos=True, **options)
    answers = reply.events if stream else [reply.json]
    ends: dict[int, list[str]] = defaultdict(list)
    for choice in (choice for answer in answers for choice in answer["choices"]):
        if choice["finish_reason"] is not None:
            ends[choice["index"]].append(choice["finish_reason"])
    assert dict(sorted(ends.items())) == {index: ["length"] for index in range(4)}
    usage = answers[-1]["usage"]
    assert usage["completion_tokens"] == 4 * 30
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4 * 30


def test_trap_17_the_choices_differ_and_a_seed_repeats_all_of_them(server: Server) -> None:
    first, again = (
        [
            choice["message"]["content"]
            for choice in server.chat(n=3, temperature=1, seed=5).json["choices"]
        ]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_trap_18_logprobs_are_finite_json(server: Server, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 5, "stream": stream}
    reply = server.chat(allowed_token_ids=[100, 101, 102], max_tokens=5, **fields)
    data = [line.removeprefix("data: ") for line in reply.body.decode().splitlines() if line]
    answers = [json.loads(text, parse_constant=no_constant) for text in data if text != "[DONE]"]
    tokens = [
        token
        for answer in answers
        for choice in answer["choices"]
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert len(tokens) == 5
    values = [one["logprob"] for token in tokens for one in [token, *token["top_logprobs"]]]
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert {token["token"] for token in tokens} <= {
        server.post("/detokenize", {"tokens": [token]}).json["prompt"] for token in (100, 101, 102)
    }


def test_trap_19_a_stop_string_does_not_leak_in_parts(server: Server) -> None:
    whole = content(server.chat(**LONG))
    for at in (20, 57, 200):
        stop = whole[at : at + 9]
        end = whole.index(stop)
        stopped = server.chat(**LONG, stop=[stop])
        stream = server.chat(**LONG, stop=[stop], stream=True)
        assert content(stopped) == streamed(stream) == whole[:end]
        assert stopped.json["choices"][0]["finish_reason"] == "stop"


def test_trap_19_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    assert streamed(server.chat(**LONG, seed=3, stream=True)) == content(
        server.chat(**LONG, seed=3)
    )


@pytest.fixture(scope="module")
def tool_server(
    small_model: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that knows how its model writes tool calls."""
    with serve(
        tmp_path_factory.mktemp("tools"),
        *small_model,
        *("--kv-cache-policy", '{"type": "randkv", "budget": 256, "buffer_size": 16}'),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ) as running:
        yield running


def test_trap_21_a_streamed_tool_call_is_the_whole_one(tool_server: Server) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
    whole = tool_server.chat(**fields).json["choices"][0]["message"]["tool_calls"]
    stream = tool_server.chat(**fields, stream=True)
    deltas = [choice["delta"] for event in stream.events for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [call["name"] for call in calls if call.get("name")] == ["look_up"]
    arguments = "".join(call.get("arguments") or "" for call in calls)
    assert len(whole) == 1
    # vLLM writes the whole answer's arguments anew: only their white space may differ.
    assert json.loads(arguments) == json.loads(whole[0]["function"]["arguments"])
    assert len(calls) > 10


def test_trap_8_a_schema_holds_beyond_the_budget(server: Server) -> None:
    schema = {"type": "string", "minLength": 900, "maxLength": 1000}
    format_ = {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}
    reply = server.chat(max_tokens=1200, response_format=format_)
    assert reply.status == 200, reply.body
    assert 900 <= len(json.loads(content(reply))) <= 1000
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert reply.json["kv_cache"]["evicted_tokens"] > 0


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "object", "patternProperties": {"(": {}}}},
        {"json": {"type": "string", "minLength": -1}},
        {"grammar": "root ::= root"},
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_trap_8_what_the_engine_cannot_compile_is_a_400_and_the_next_one_is_served(
    server: Server, constraint: dict[str, Any], stream: bool
) -> None:
    reply = server.chat(structured_outputs=constraint, stream=stream)
    assert reply.status == 400, reply.body
    good = server.chat(structured_outputs={"regex": "[0-9]{4}"})
    assert re.fullmatch("[0-9]{4}", content(good))


def test_trap_40_what_is_kept_does_not_depend_on_what_else_runs(server: Server) -> None:
    answer = server.chat(**LONG, seed=9).json
    alone, prompt = answer["kv_cache"], answer["usage"]["prompt_tokens"]
    together = server.chat(**LONG, seed=9, n=3, temperature=1).json["kv_cache"]["samples"]
    query = f"request_key=seed:9&prompt_tokens={prompt}&computed_tokens={prompt + 159}"
    kept, again = (server.get(f"/v1/kv_cache/retention?{query}") for _ in range(2))
    assert kept.body == again.body
    for name in ("rounds", "evicted_tokens", "physical_tokens"):
        assert {one[name] for one in [alone, *together]} == {kept.json[name]}
    assert alone["request_key"] == "seed:9"
