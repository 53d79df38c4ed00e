"""A tiny model that learns to write tool calls as bare JSON, on any engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import tiny_model

from art_core import LocalBackend, LoRAConfig, TrainableModel
from art_core.inference.chat_templates import CHATML_JSON_TOOLS
from art_core.training import grpo
from art_core.training.samples import Sample

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
ASK: list[Any] = [{"role": "user", "content": "the weather in Paris please"}]


def call(city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CALLS = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call("Paris"), call("x")]}]
LESSON = {"messages": CALLS, "tools": [WEATHER]}


def json_tools_model(root: Path, **engine: Any) -> TrainableModel:
    """A registered model whose messages are rendered by `CHATML_JSON_TOOLS`."""
    model = TrainableModel(
        base_model=str(tiny_model(root / "model", hidden=256)),
        project="p",
        name="agent",
        lora=LoRAConfig(rank=16, alpha=32),
    )
    model.register(
        LocalBackend(
            root=root, dtype="float32", max_model_len=1024, chat_template=CHATML_JSON_TOOLS, **engine
        )
    )
    return model


def imitated(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """What fine-tuning in this process imitates from now on."""
    seen: list[Sample] = []

    def canonical(samples: Sequence[Sample]) -> list[Sample]:
        seen.extend(samples)
        return original(samples)

    original = grpo.canonical
    monkeypatch.setattr(grpo, "canonical", canonical)
    return seen


def check_lesson(model: TrainableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns its calls on the very prompt that the server feeds, and the server reads them."""
    samples = imitated(monkeypatch)
    assert model.sft([LESSON], steps=80, learning_rate=5e-3).updated
    answer = model.chat.completions.create(
        model=model.name,
        messages=ASK,
        tools=[WEATHER],  # type: ignore[list-item]
        temperature=0,
        max_tokens=120,
        extra_body={"return_token_ids": True},
    )
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == list(samples[0].prompt)
    [choice] = answer.choices
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == list(samples[0].completion)
    made = choice.message.tool_calls or []
    assert [json.loads(c.function.arguments) for c in made] == [{"city": "Paris"}, {"city": "x"}]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    content, arguments = "", dict[int, str]()
    for chunk in model.chat.completions.create(
        model=model.name,
        messages=ASK,
        tools=[WEATHER],  # type: ignore[list-item]
        temperature=0,
        max_tokens=120,
        stream=True,
    ):
        for part in chunk.choices:
            content += part.delta.content or ""
            for c in part.delta.tool_calls or ():
                arguments[c.index] = arguments.get(c.index, "") + (c.function.arguments or "")
    assert content == ""
    assert [json.loads(arguments[i]) for i in sorted(arguments)] == [{"city": "Paris"}, {"city": "x"}]
