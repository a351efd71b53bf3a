# SPDX-License-Identifier: Apache-2.0
"""Stock clients override the policy and read the report, without knowing this project."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.process import PROMPT, Server

POLICY = {"type": "randkv", "budget": 64, "buffer_size": 16}
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def client(default_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="none")


def check(report: Any) -> None:
    assert (report["policy"], report["budget"]) == ("randkv", 64)
    assert report["rounds"] > 0
    assert report["physical_tokens"] < 64 + 2 * 16


def test_openai(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=90,
        temperature=0,
        extra_body={"kv_cache_policy": POLICY, "ignore_eos": True},
    )
    check(answer.kv_cache)  # type: ignore[attr-defined]
    assert answer.usage
    assert answer.usage.completion_tokens == 90


def test_openai_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=90,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv_cache_policy": POLICY, "ignore_eos": True},
        )
    )
    check(chunks[-1].kv_cache)  # type: ignore[attr-defined]
    assert chunks[-1].choices == []
    assert len("".join(c.choices[0].delta.content or "" for c in chunks[:-1])) > 20


def test_openai_completions_and_responses(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=100,
        extra_body={"kv_cache_policy": POLICY, "ignore_eos": True},
    )
    check(completion.kv_cache)  # type: ignore[attr-defined]
    response = client.responses.create(
        model=MODEL, input=PROMPT, max_output_tokens=20, extra_body={"kv_cache_policy": "dense"}
    )
    assert response.kv_cache["policy"] == "dense"  # type: ignore[attr-defined]
    assert response.output_text


def test_openai_header(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        extra_headers={"X-KV-Cache-Policy": "dense", "X-Request-Id": "from-openai"},
    )
    assert answer.kv_cache["policy"] == "dense"  # type: ignore[attr-defined]
    assert answer.id == "chatcmpl-from-openai"
    assert answer._request_id == "from-openai"


def test_openai_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_body={"kv_cache_policy": {"type": "randkv", "budgets": 64}},
        )
    assert error.value.param == "kv_cache_policy.budgets"
    assert "expected one of the keys" in error.value.message


def test_openai_async(default_server: Server) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{default_server.url}/v1", api_key="none"
        ) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=MODEL,
                        messages=MESSAGES,
                        max_tokens=90,
                        seed=seed,
                        extra_body={"kv_cache_policy": POLICY, "ignore_eos": True},
                    )
                    for seed in range(3)
                )
            )

    for seed, answer in enumerate(asyncio.run(ask())):
        check(answer.kv_cache)
        assert answer.kv_cache["request_key"] == f"seed:{seed}"


def test_langchain(default_server: Server) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{default_server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_tokens=90,  # type: ignore[call-arg]
        extra_body={"kv_cache_policy": POLICY, "ignore_eos": True},
        default_headers={"X-Request-Id": "from-langchain"},
    )
    answer = model.invoke(PROMPT)
    assert len(str(answer.content)) > 20
    line = default_server.logged("from-langchain")
    assert (line["policy"], line["budget"]) == ("randkv", 64)
    assert line["rounds"] > 0
    text = "".join(str(chunk.content) for chunk in model.stream(PROMPT))
    assert text == answer.content


def test_litellm(default_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{default_server.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "seed": 1,
        "max_tokens": 90,
        "extra_body": {"kv_cache_policy": POLICY, "ignore_eos": True},
    }
    answer = litellm.completion(**options)
    check(answer.kv_cache)
    chunks = litellm.completion(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
