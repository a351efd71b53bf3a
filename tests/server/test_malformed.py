# SPDX-License-Identifier: Apache-2.0
"""Bodies that are wrong in every way that clients and attackers have found.

Each gets a 4xx with OpenAI's error object, and the engine goes on as if nothing had been.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.server.process import Server

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BATCH = 100
HUGE = 10**400
MEBIBYTE = 2**20
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2, "temperature": 0},
    COMPLETION: {"prompt": "hi there", "max_tokens": 2, "temperature": 0},
    RESPONSE: {"input": "hi", "max_output_tokens": 2, "temperature": 0},
}


class Case(NamedTuple):
    """A request that has to be refused."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str | None]


def case(name: str, path: str, body: Any, **headers: str | None) -> Case:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Case(name, path, data, {"Content-Type": "application/json", **named})


def short(value: Any) -> str:
    return str(value)[:60]


def not_an_object() -> Iterator[Case]:
    """JSON of another type, no JSON, half of it, or nothing."""
    scalars = ["null", "true", "5", "1e999", "-0.0", '"text"', "[]", "[{}]", "[1, 2]", '"{}"']
    broken = ["", " ", "}", "{]", "{'a': 1}", "{a: 1}", '{"a"}', '{"a":}', "{}{}", "nul", "\\"]
    numbers = ["NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x10", "9" * 5000]
    for path, good in GOOD.items():
        for text in scalars + broken:
            yield case(f"body {text!r}", path, text.encode())
        for number in numbers:
            body = json.dumps({**good, "seed": 0}).replace('"seed": 0', f'"seed": {number}')
            yield case(f"seed {short(number)}", path, body.encode())
        for opening in ("[", '{"a":', '{"messages":['):
            yield case(f"{opening} without end", path, (opening * 10_000).encode())
        nested = "[" * 10_000 + "]" * 10_000
        for field in ("user", next(iter(good)), "kv_cache_policy"):
            body = json.dumps({**good, field: 0}).replace(f'"{field}": 0', f'"{field}": {nested}')
            yield case(f"{field} nested", path, body.encode())


def cut_or_damaged() -> Iterator[Case]:
    """A good body, cut off or with a byte that is wrong, at random places."""
    choose = random.Random(20)
    for path, good in GOOD.items():
        text = json.dumps(good).encode()
        for at in choose.sample(range(len(text)), 12):
            yield case(f"cut at {at}", path, text[:at])
        for at in choose.sample(range(1, len(text)), 12):
            wrong = choose.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\x01"])
            yield case(f"{wrong!r} at {at}", path, text[:at] + wrong + text[at:])


def other_encodings() -> Iterator[Case]:
    """Content types, character sets, compression."""
    types = [None, "", "text/plain", "application/x-www-form-urlencoded", "application/xml"]
    types += ["multipart/form-data; boundary=x", "application/jsonp", "json", "a" * 5000]
    for path, good in GOOD.items():
        text = json.dumps(good)
        for content_type in types:
            yield case(f"type {content_type!r}"[:60], path, good, Content_Type=content_type)
        for encoding in ("gzip", "br", "deflate", "identity, gzip", "nonsense"):
            yield case(f"encoding {encoding}", path, good, Content_Encoding=encoding)
        for charset in ("utf-16", "utf-32", "utf-8-sig", "utf-16-be"):
            yield case(f"charset {charset}", path, text.encode(charset))
        for lone in (r"\ud800", r"\uDFFF", r"a\udc00b", r"\ud800\ud800"):
            yield case(f"lone surrogate {lone}", path, text.replace("hi", lone).encode())


def too_large() -> Iterator[Case]:
    """Ten megabytes are beyond the limit; seven are not, and are too long for the model."""
    for path, good in GOOD.items():
        yield case("10 MB", path, {**good, "user": "a" * 10 * MEBIBYTE})
    text = "a" * 7 * MEBIBYTE
    yield case("7 MB content", CHAT, {"messages": [{"role": "user", "content": text}]})
    yield case("7 MB prompt", COMPLETION, {"prompt": text})
    for field in ("temperature", "messages", "model", "tool_choice", "kv_cache_policy"):
        yield case(f"7 MB {field}", CHAT, {**GOOD[CHAT], field: text})


SHARED: dict[str, list[Any]] = {
    "model": ["nope", 5, [], {}, "a" * 5000, "\0"],
    "temperature": [-1, 3, "x", 1e300, HUGE, [], {}],
    "top_p": [0, -1, 2, "x", [], HUGE],
    "stream": ["x", 2, [], {}],
    "top_k": [-5, "x", 1.5, HUGE, []],
    "presence_penalty": [3, -3, "x", []],
    "frequency_penalty": [3, -3, "x", []],
    "logit_bias": [{"99999999": 1}, {"-1": 1}, {"a": 1}, {"1": "x"}, [], "x", {"1": None}],
    "priority": ["x", HUGE, 10**30, 1.5],
    "cache_salt": ["", 1, []],
    "request_id": [1, [], {}],
    "skip_special_tokens": ["x", [], 2],
    "structured_outputs": [
        *("x", [], 5, {}, {"json": "{"}, {"json": 5}, {"json": ""}, {"json": "[" * 20_000}),
        *({"regex": "("}, {"regex": 5}, {"regex": "\\"}, {"regex": "\0"}, {"regex": "a" * 10**5}),
        *({"choice": []}, {"choice": "x"}, {"choice": [1]}, {"choice": ["a" * 300] * 300}),
        *({"grammar": ""}, {"grammar": "x"}, {"grammar": "(" * 5000}, {"grammar": "root ::= x"}),
        *({"grammar": "root ::= root"}, {"grammar": "root ::= a\na ::= b\nb ::= a"}),
        *({"json": {"type": "nope"}}, {"json": {"$ref": "#/nope"}}, {"json": "null"}),
        *({"json": {"type": "object", "properties": []}}, {"json_object": False}),
        *({"json": {"type": "string", "minLength": -1}}, {"regex": "a", "choice": ["b"]}),
        *(
            {"json": {"type": "string", "pattern": "("}},
            {"json": {"$defs": 1, "$ref": "#/$defs/a"}},
        ),
    ],
    "vllm_xargs": ["x", [], {"a": {}}, {"a": None}, {"kv_cache_policy": 7}],
    "kv_cache_policy": [
        *(5, True, [], ["randkv"], {}, "x", "", "{", "[]", '{"type": "x"}', {"type": "x"}),
        *({"type": None}, {"type": 5}, {"type": []}, {"type": {}}, {"type": "RANDKV"}),
        *({"budget": 64}, {"type": "dense", "budget": 64}, {"type": "randkv", "extra": 1}),
        *({"type": "randkv", "\0": 1}, {"type": "randkv", "a" * 5000: 1}),
        *({"type": "randkv", "budget": value} for value in (0, -1, HUGE, 2**31, "64", 64.0, True)),
        *({"type": "randkv", "budget": value} for value in ([], {}, "x", 1e300, False)),
        *({"type": "randkv", "buffer_size": value} for value in (-1, HUGE, 2**31, "4", 4.0, True)),
        *({"type": "randkv", "buffer_size": value} for value in ([], {}, "x", False)),
        *({"type": "randkv", "seed": value} for value in (-1, 2**64, HUGE, "1", 1.0, True, [], {})),
        *({"type": "randkv", "request_key": value} for value in ("", "a" * 513, 5, [], {}, True)),
    ],
}
"""Values that no generation route takes, by field."""

BOTH: dict[str, list[Any]] = {
    "max_tokens": [0, -1, HUGE, 10**30, "x", "5", 1.5, 5.0, [], {}, True],
    "n": [0, -1, 10**9, HUGE, "x", "3", 1.5, [], 129, 2],
    "stop": ["", [""], [1], {}, 5, ["a"] * 17, ["a", ""], [None]],
    "stop_token_ids": [[-1], [49152], [10**9], [2**63], [HUGE], ["x"], 7, [1.5], [None], {}],
    "stream_options": [{"include_usage": True}, "x", [1], 5],
    "seed": [HUGE, 2**63, -(2**63) - 1, "x", 1.5, []],
    "min_tokens": [5, -1, HUGE, "x", 2**40, []],
    "min_p": [-1, 2, "x", 10**30],
    "repetition_penalty": [0, -1, "x", []],
    "length_penalty": ["x", []],
    "prompt_logprobs": [10**9, -2, "x", 1.5, 21, HUGE, []],
    "allowed_token_ids": [[], [-1], [10**9], ["a"], "x", [HUGE], list(range(1025))],
    "bad_words": [[""], [" "], "x", [1], [None], [f"w{i}" for i in range(500)], ["a b " * 600]],
    "logprob_token_ids": [[1], [-1], "x", [10**9]],
    "truncate_prompt_tokens": [-2, HUGE, "x", 0, 10**6, 1.5],
    "truncation_side": ["up", 5],
    "repetition_detection": [
        *({"max_pattern_size": 5}, {"max_pattern_size": -1}, "x", [], {"min_count": "x"}),
        {"max_pattern_size": HUGE, "min_count": 2},
    ],
    "stream_interval": [0, -1, "x", HUGE],
    "ignore_eos": ["x", [], 2],
    "echo": ["x", [], 2],
    "include_stop_str_in_output": ["x", []],
    "add_special_tokens": ["x", []],
    "response_format": [
        *("json", 5, [], {}, {"type": "x"}, {"type": 5}, {"type": "json_schema"}),
        *({"type": "json_schema", "json_schema": value} for value in ([], "x", 5, {}, {"name": 5})),
        *({"type": "structural_tag"}, {"type": "structural_tag", "format": 5}),
        *(
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            for schema in ("x", 5, [], {"type": "nope"}, {"$ref": "#/x"}, {"properties": 5})
        ),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": 10**30}}},
    ],
    "use_beam_search": [True, "x"],
    "kv_transfer_params": ["x", 5, []],
}
"""The same of chat completions and completions."""


def call(**fields: Any) -> list[Any]:
    """A history with a tool call of which `fields` are wrong."""
    good = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{**good, **fields}]}, USER]


def arguments(value: Any) -> list[Any]:
    return call(function={"name": "f", "arguments": value})


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ONLY_CHAT: dict[str, list[Any]] = {
    "messages": [
        *(None, [], "x", 5, {}, [5], ["x"], [None], [[]], [{}]),
        *([{"role": 5, "content": "x"}], [{"content": "x"}], [{"role": None, "content": "x"}]),
        *(user(5), user([5]), user([{}]), user([{"type": "text"}]), user([{"type": "nope"}])),
        *(user([{"type": "text", "text": 5}]), user([IMAGE]), user([{"type": "image_url"}])),
        user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]),
        user([{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}]),
        user([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}]),
        *(user("a " * 9000), [USER] * 5000),
        *([{"role": "assistant", "tool_calls": value}] for value in (5, [5], [{}], "x", [None])),
        *(
            arguments(value)
            for value in ("{", "[" * 20_000, 5, None, {"a": 1}, '{"a": ' + "9" * 5000)
        ),
        *(call(function=value) for value in ({}, 5, None, {"name": "f"}, {"name": 5})),
        *(call(id=5), call(type="x")),
    ],
    "max_completion_tokens": [0, -1, HUGE, "5", 1.5],
    "logprobs": ["x", [], 2],
    "top_logprobs": [1, 10**9, -2, "x", HUGE, []],
    "tools": [
        *([], "x", 5, {}, [5], ["x"], [None], [{}], [{"type": "function"}], [{"function": "f"}]),
        *(
            [{"type": "function", "function": {"name": 5}}],
            [{"type": "x", "function": {"name": 1}}],
        ),
        [{"type": "function", "function": {"name": "f", "parameters": 5}}],
    ],
    "tool_choice": ["x", 5, [], {}, True, 1.5, "required", "auto", {"type": "function"}],
    "chat_template_kwargs": [5, "x", [], {"messages": []}, {"chat_template": "x"}],
    "chat_template": ["{{", 5, "x", "{% for %}"],
    "documents": [5, [5], "x", [{"a": 5}]],
    "reasoning_effort": ["x", 5],
    "continue_final_message": ["x"],
    "mm_processor_kwargs": [5, "x"],
    "media_io_kwargs": [5, {"a": 5}],
    "parallel_tool_calls": ["x"],
}
ONLY_COMPLETION: dict[str, list[Any]] = {
    "prompt": [
        *(None, [], "", 5, {}, [[]], [5.5], [-1], [HUGE], [2**31], [49152], [2**63], [49152.0]),
        *(["a", 5], [5, "a"], [["a"]], [[1], ["a"]], [None], [[[1]]], [""], ["a", ""], [[], [1]]),
        *([1, None], ["a"] * 200, [[1]] * 200, "a " * 9000, [1] * 8193, [1] * 500_000, True),
        *([[1], [49152]], "a " * 100),
    ],
    "logprobs": ["x", -1, 21, 10**9, HUGE, 5.5, []],
    "suffix": ["x", 5],
    "best_of": [10**9, "x", 1.5],
    "prompt_embeds": ["x", 5, ["x"], "AAAA", {}],
}
ONLY_RESPONSE: dict[str, list[Any]] = {
    "input": [
        *(None, [], 5, {}, [5], [{}], ["x"], [None], [{"role": "user"}], "a " * 9000),
        *([{"role": "nope", "content": "x"}], [{"role": "user", "content": 5}]),
        *([{"type": value}] for value in ("nope", "message", "reasoning", "mcp_call")),
        *([{"type": value}] for value in ("function_call", "computer_call_output")),
        [{"type": "item_reference", "id": "x"}],
        [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}],
    ],
    "max_output_tokens": [0, -1, HUGE, "5", 1.5, []],
    "previous_response_id": ["x", "resp_x", 5],
    "background": ["x", []],
    "include": [["x"], 5],
    "instructions": [5],
    "metadata": [5, {"a": 5}],
    "prompt": [5, "x"],
    "reasoning": [5, {"effort": "x"}],
    "service_tier": ["x", 5],
    "store": ["x", []],
    "text": [5, {"format": 5}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}],
    "tool_choice": ["x", 5],
    "tools": [5, [5], [{}], [{"type": "x"}], [{"type": "function"}]],
    "top_logprobs": ["x", []],
    "truncation": ["x", 5],
}


def wrong_values() -> Iterator[Case]:
    """A good body with one field that is wrong."""
    tables = [
        (CHAT, {**SHARED, **BOTH, **ONLY_CHAT}),
        (COMPLETION, {**SHARED, **BOTH, **ONLY_COMPLETION}),
        (RESPONSE, {**SHARED, **ONLY_RESPONSE}),
    ]
    for path, table in tables:
        for field, values in table.items():
            for value in values:
                yield case(f"{field} = {short(value)}", path, {**GOOD[path], field: value})
    named = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    for tools in (TOOLS, [{}], [{"type": "function"}], [{"type": "function", "function": {}}]):
        yield case(f"named tool {short(tools)}", CHAT, {**GOOD[CHAT], **named, "tools": tools})
    for choice in ("x", 5, [], {"function": 5}, {"type": "function", "function": {"name": 5}}):
        body = {**GOOD[CHAT], "tools": TOOLS, "tool_choice": choice}
        yield case(f"tool_choice {short(choice)}", CHAT, body)
    for path, good in GOOD.items():
        body = {key: value for key, value in good.items() if key != next(iter(good))}
        yield case(f"no {next(iter(good))}", path, body)
        text = json.dumps(good)
        for wrong in ('"temperature": "x"', '"temperature": -1'):
            yield case(f"twice {wrong}", path, f"{text[:-1]}, {wrong}}}".encode())


def in_streams() -> Iterator[Case]:
    """What only the engine's input processor refuses, when a stream could have begun."""
    fields: list[tuple[str, Any]] = [
        ("logit_bias", {"99999999": 1}),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"json": {"type": "string", "minLength": -1}}),
        ("kv_cache_policy", {"type": "randkv", "budget": 1}),
        ("stop_token_ids", [49152]),
    ]
    for path, good in GOOD.items():
        for field, value in fields[: 4 if path == RESPONSE else 5]:
            body = {**good, "stream": True, field: value}
            yield case(f"stream, {field} = {short(value)}", path, body)


CASES = [
    *not_an_object(),
    *cut_or_damaged(),
    *other_encodings(),
    *too_large(),
    *wrong_values(),
    *in_streams(),
]


class Client:
    """One connection, opened again where the server closes it."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

    def send(self, one: Case) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in one.headers.items() if value is not None}
        self._connection.request("POST", one.path, one.body, headers)
        answer = self._connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, named, answer.read()


def problem(status: int, headers: dict[str, str], body: bytes) -> str | None:
    """What is wrong with an answer that should be a refusal."""
    if not 400 <= status < 500:
        return f"{status}: {body[:200]!r}"
    if headers.get("content-type") != "application/json" or "x-request-id" not in headers:
        return f"headers {headers}"
    error = json.loads(body).get("error", {})
    if error.keys() != {"message", "type", "param", "code"}:
        return f"keys {list(error)}"
    if not isinstance(error["message"], str) or not 0 < len(error["message"]) <= 2100:
        return f"message {error['message']!r:.200}"
    if error["code"] != status or not isinstance(error["type"], str):
        return f"{status}: code {error['code']!r}, type {error['type']!r}"
    if not isinstance(error["param"], str | None):
        return f"param {error['param']!r}"
    return None


def test_there_are_enough_malformed_bodies_and_no_two_are_the_same() -> None:
    assert len(CASES) > 500
    assert len({(one.path, one.body, str(one.headers)) for one in CASES}) == len(CASES)


@pytest.mark.parametrize("first", range(0, len(CASES), BATCH))
def test_every_malformed_body_is_refused_and_the_engine_lives(server: Server, first: int) -> None:
    client = Client(server)
    found = {}
    for one in CASES[first : first + BATCH]:
        if (wrong := problem(*client.send(one))) is not None:
            found[one.path, one.name] = wrong
    assert not found
    assert server.chat(max_tokens=2).status == 200
    assert server.running() == 0


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["randkv", "dense"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ALMOST_RIGHT = st.fixed_dictionaries(
    {"type": st.sampled_from(["randkv", "dense"]) | JSON_VALUES},
    optional={
        "budget": st.integers(0, 2**31) | JSON_VALUES,
        "buffer_size": st.integers(0, 2**31) | JSON_VALUES,
        "seed": st.integers(0, 2**64) | JSON_VALUES,
        "request_key": st.text() | JSON_VALUES,
    },
)


@given(value=JSON_VALUES | ALMOST_RIGHT)
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_override_is_taken_or_refused_by_name(server: Server, value: Any) -> None:
    reply = server.chat(kv_cache_policy=value, max_tokens=1)
    assert reply.status in (200, 400), reply.body
    if reply.status == 400:
        assert reply.error["param"].startswith("kv_cache_policy")
    elif value is not None:
        assert reply.json["kv_cache"]["policy"] in ("randkv", "dense")


def test_the_projects_own_routes_withstand_their_schema(server: Server) -> None:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json)
    schema.config.update(base_url=server.url)
    paths = {"/live", "/ready", "/v1/kv_cache/policy", "/v1/kv_cache/retention"}
    tested = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path not in paths:
            continue
        tested.add(operation.path)

        @given(one=operation.as_strategy())
        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def run(one: schemathesis.Case) -> None:
            one.call_and_validate(checks=[not_a_server_error])

        run()
    assert tested == paths
