# SPDX-License-Identifier: Apache-2.0
"""What a run writes down: its settings, and one record per (arm, item). Pure.

``schema.json`` beside this file is the JSON schema of both; ``python -m benchmarks.quality.record``
writes it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import models_json_schema

from benchmarks.quality.arm import Arm
from benchmarks.quality.item import Task

SCHEMA = Path(__file__).with_name("schema.json")
_STRICT = ConfigDict(frozen=True, extra="forbid")


class Record(BaseModel):
    """One item under one arm. Evictions that differ from what the arm demands are refused."""

    model_config = _STRICT

    version: Literal[1] = 1
    task: Task
    name: str = Field(description="text or key; pairs the same item over arms")
    distance: int = Field(ge=0, description="filler tokens between fact and question, else 0")
    arm: Arm
    prompt_len: int = Field(ge=1, description="tokens")
    output_len: int = Field(ge=1, description="tokens, forced ones included")
    rounds: int = Field(ge=0, description="as the engine reported")
    evicted_tokens: int = Field(ge=0, description="per KV head, as the engine reported")
    preemptions: int = Field(ge=0)
    first_scored: int = Field(ge=0, description="output index of the first token below")
    tokens: list[int] = Field(description="output tokens from first_scored on")
    logprobs: list[float] = Field(description="natural log, the model's own; none for free")
    top_tokens: list[int] = Field(description="argmax at the same places; none for free")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        scored = self.output_len - self.first_scored
        measured = 0 if self.task == "free" else scored
        lengths = (len(self.tokens), len(self.logprobs), len(self.top_tokens))
        if lengths != (scored, measured, measured):
            raise ValueError(
                f"{lengths} tokens, logprobs and top_tokens: expected {scored}, {measured} "
                f"and {measured} after {self.first_scored} of {self.output_len} output tokens"
            )
        return self

    @model_validator(mode="after")
    def _did_evict(self) -> Self:
        expected = self.arm.evictions(self.prompt_len, self.output_len)
        found = (self.rounds, self.evicted_tokens)
        if found != expected:
            raise ValueError(
                f"{self.arm.name} on {self.key}: the engine reports {found[0]} rounds and "
                f"{found[1]} evicted tokens, expected {expected.rounds} and "
                f"{expected.evicted_tokens} for {self.prompt_len} prompt and {self.output_len} "
                "output tokens. The policy did not run as asked; this is no result."
            )
        return self

    @property
    def key(self) -> str:
        """`Item.key` of what was run."""
        return f"{self.task}/{self.name}/{self.distance}"


class Settings(BaseModel):
    """Everything that results depend on. A run goes on only where it was begun with the same."""

    model_config = _STRICT

    version: Literal[1] = 1
    model: str = Field(description="name of the model's folder")
    model_sha256: str = Field(description="of its weights and tokenizer")
    text: str = Field(description="what the text is")
    text_sha256: str
    engine: str = Field(description="name and version")
    patch: str | None = Field(None, description="its digest; null: not recorded")
    budgets: tuple[int, ...] = Field(description="K, tokens")
    buffers: tuple[int, ...] = Field(description="r, tokens")
    window: bool = Field(description="whether the window arm runs")
    num_texts: int
    prompt_len: int = Field(description="tokens of a text that are the prompt")
    text_len: int = Field(description="tokens of a text, prompt included")
    num_keys: int
    distances: tuple[int, ...] = Field(description="filler tokens between fact and question")
    num_free: int = Field(description="texts that are continued freely")
    free_len: int = Field(description="output tokens of a free continuation")
    temperature: float
    seed: int
    concurrency: int | None = Field(None, description="requests at once; null: not recorded")
    num_records: int = Field(description="of the complete run")


def schema() -> dict[str, Any]:
    """JSON schema (2020-12) with both under ``$defs``."""
    _, definitions = models_json_schema(
        [(Record, "validation"), (Settings, "validation")], title="benchmarks.quality, version 1"
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **definitions}


def schema_text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
