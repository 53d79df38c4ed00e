import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from art_core.errors import EngineError
from art_core.training.samples import trained_temperature
from art_core.types import PolicyVersion

BASE, V1, V2 = (PolicyVersion("agent", n) for n in range(3))
QUESTION = [{"role": "user", "content": "Name three animals and say one thing about each."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass(frozen=True)
class Answer:
    """A completion, read from a body or put together from a stream."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    content: str
    tool_calls: list[dict[str, str]]
    finish_reason: str
    usage: dict[str, Any]
    model: str


def request(version: PolicyVersion, messages: Sequence[Any] = QUESTION, **more: Any) -> dict[str, Any]:
    defaults = {"max_tokens": 24, "logprobs": True, "return_token_ids": True}
    return {"model": version.name, "messages": list(messages), **defaults, **more}


def ask(base_url: str, body: dict[str, Any], *, stream: bool = False) -> Answer:
    with httpx.Client(timeout=300) as client:
        if not stream:
            response = client.post(f"{base_url}/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return read_body(response.json())
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", f"{base_url}/chat/completions", json=body) as response:
            assert response.status_code == 200
            events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return read_chunks([json.loads(event) for event in events[:-1]])


def read_body(body: dict[str, Any], index: int = 0) -> Answer:
    choice = body["choices"][index]
    return Answer(
        prompt=body["prompt_token_ids"],
        token_ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        content=choice["message"]["content"] or "",
        tool_calls=[call["function"] for call in choice["message"].get("tool_calls") or []],
        finish_reason=choice["finish_reason"],
        usage=body["usage"],
        model=body["model"],
    )


def read_chunks(chunks: list[dict[str, Any]]) -> Answer:
    prompt = next(c["prompt_token_ids"] for c in chunks if c.get("prompt_token_ids"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls: dict[int, dict[str, str]] = {}
    for choice in choices:
        for part in choice["delta"].get("tool_calls") or []:
            call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            for key in call:
                call[key] += part["function"].get(key) or ""
    return Answer(
        prompt=prompt,
        token_ids=[i for choice in choices for i in choice.get("token_ids") or []],
        logprobs=[
            entry["logprob"]
            for choice in choices
            for entry in (choice.get("logprobs") or {}).get("content") or []
        ],
        content="".join(choice["delta"].get("content") or "" for choice in choices),
        tool_calls=[calls[i] for i in sorted(calls)],
        finish_reason=next(c["finish_reason"] for c in choices if c.get("finish_reason")),
        usage=next(chunk["usage"] for chunk in chunks if chunk.get("usage")),
        model=chunks[0]["model"],
    )


@torch.no_grad()
def trainer_logprobs(
    trainer: Any, version: PolicyVersion, answer: Answer, temperature: float = 1.0
) -> torch.Tensor:
    """The trainer's own view of sampled tokens  [completion_tokens]."""
    ids = torch.tensor([answer.prompt + answer.token_ids])
    with trainer.using(None if version.number == 0 else version.name):
        hidden = trainer.hidden_states(input_ids=ids).last_hidden_state[0]
        logits = trainer.head(hidden[len(answer.prompt) - 1 : -1]).float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(answer.prompt) :, None])[:, 0]


def mean_difference(trainer: Any, version: PolicyVersion, answer: Answer) -> float:
    """Mean absolute difference of an answer's logprobs to a version's, in nats."""
    expected = trainer_logprobs(trainer, version, answer)
    return float((torch.tensor(answer.logprobs) - expected).abs().mean())


def assert_exact(answer: Answer) -> None:
    assert answer.prompt
    assert answer.token_ids
    assert len(answer.token_ids) == len(answer.logprobs) == answer.usage["completion_tokens"]
    assert len(answer.prompt) == answer.usage["prompt_tokens"]


@pytest.mark.parametrize("version", [BASE, V1], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_have_exact_tokens_and_logprobs(served, version: PolicyVersion, stream: bool):
    answer = ask(served.engine.base_url, request(version, seed=1), stream=stream)
    assert_exact(answer)
    assert answer.model == version.name
    tokenizer = served.trainer.tokenizer
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    assert answer.prompt == list(prompt["input_ids"])
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == answer.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tokens_of_a_tool_call_are_all_there(served, stream: bool):
    """C03: with a tool parser, which swallows the text of the call."""
    # A model this small calls no tools by itself, so it is made to say the call.
    body = request(BASE, max_tokens=60, tools=[WEATHER], structured_outputs={"choice": [HERMES_CALL]})
    answer = ask(served.engine.base_url, body, stream=stream)
    assert_exact(answer)
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    assert json.loads(answer.tool_calls[0]["arguments"]) == {"city": "Paris"}
    assert answer.finish_reason == "tool_calls"
    assert served.trainer.tokenizer.decode(answer.token_ids, skip_special_tokens=True) == HERMES_CALL


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_the_tokens_of_a_forced_tool_call_are_all_there(served, stream: bool, choice: Any):
    """C03."""
    body = request(BASE, max_tokens=120, temperature=0, tools=[WEATHER], tool_choice=choice)
    answer = ask(served.engine.base_url, body, stream=stream)
    assert_exact(answer)
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]


def test_several_choices_have_tokens_each(served):
    body = httpx.post(
        f"{served.engine.base_url}/chat/completions", json=request(V1, n=3, seed=5), timeout=300
    ).json()
    answers = [read_body(body, i) for i in range(3)]
    assert len({tuple(a.token_ids) for a in answers}) == 3
    assert all(len(a.token_ids) == len(a.logprobs) for a in answers)


TOPICS = ("the sea", "a fox", "bread", "winter", "numbers", "a long road", "music", "trees", "ships", "tea")
"""Different prompts, since differences within one context go together."""


def about(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about {topic}."}]


@pytest.mark.parametrize("temperature", [0, 0.7, 1, 1.5])
@pytest.mark.parametrize("version", [BASE, V1], ids=str)
def test_sampled_logprobs_agree_with_the_trainers(served, version: PolicyVersion, temperature: float):
    """The serving side's bfloat16 kernels are not the trainer's: equal in distribution, not bit by bit.

    Stated: at the temperature that was sampled at (1 for greedy answers) the difference has a mean below
    0.02, a mean absolute value below 0.1 and a 99th percentile below 0.5 nats, so that an
    importance ratio is 1 but for a few percent.
    """
    bodies = [
        request(version, about(topic), seed=1, max_tokens=48, temperature=temperature, ignore_eos=True)
        for topic in TOPICS
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(served.engine.base_url, body), bodies))
    differences = torch.cat(
        [
            torch.tensor(answer.logprobs)
            - trainer_logprobs(served.trainer, version, answer, trained_temperature(body))
            for body, answer in zip(bodies, answers, strict=True)
        ]
    )
    size = differences.abs()
    print(
        f"{version} at {temperature}: {len(size)} tokens, mean {differences.mean():+.4f}, "
        f"mean size {size.mean():.4f}, p99 {size.quantile(0.99):.4f}, largest {size.max():.4f}"
    )
    assert len(size) == len(TOPICS) * 48
    assert differences.mean().abs() < 0.02
    assert size.mean() < 0.1
    assert size.quantile(0.99) < 0.5


def test_the_same_prompt_on_two_versions_never_shares_a_cached_prefix(served):
    """C41."""
    # Long enough for several blocks of the cache, and asked twice per version, in turns.
    tale = "The fox saw the moon and sang to it. " * 20
    messages = [{"role": "user", "content": tale + "What then?"}]
    answers = {
        (version, turn): ask(served.engine.base_url, request(version, messages, seed=1, max_tokens=16))
        for turn in (1, 2)
        for version in (V1, V2, BASE)
    }
    for version in (V1, V2, BASE):
        first, second = answers[version, 1], answers[version, 2]
        assert (first.usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) == 0
        assert second.usage["prompt_tokens_details"]["cached_tokens"] > 0
        # Whose weights computed an answer shows in its logprobs: they fit one version, and no other.
        others = [v for v in (V1, V2, BASE) if v != version]
        for answer in (first, second):
            mine = mean_difference(served.trainer, version, answer)
            assert mine < 0.15
            assert all(mine < 0.5 * mean_difference(served.trainer, other, answer) for other in others)


async def test_a_request_in_flight_ends_on_a_version_that_is_retired_meanwhile(served):
    """C40, for one version."""
    version = PolicyVersion("agent", 3)
    await served.engine.publish(version, served.adapters[V1])
    body = request(version, max_tokens=60, ignore_eos=True, temperature=0)
    async with httpx.AsyncClient(timeout=300) as client:
        url = f"{served.engine.base_url}/chat/completions"
        async with client.stream("POST", url, json={**body, "stream": True}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await served.engine.retire(version)
            events = [line[6:] async for line in lines if line.startswith("data: {")]
        gone = await client.post(url, json=body)
    tokens = [t for e in events for c in json.loads(e)["choices"] for t in c.get("token_ids") or []]
    assert len(tokens) == 60
    assert gone.status_code == 404
    assert version not in served.engine.versions()


async def test_a_pause_lets_requests_end_holds_new_ones_and_allows_publishing(served):
    engine = served.engine
    version = PolicyVersion("agent", 4)
    async with httpx.AsyncClient(timeout=300) as client:

        async def post(**more: Any) -> tuple[float, httpx.Response]:
            response = await client.post(f"{engine.base_url}/chat/completions", json=request(V1, **more))
            return time.monotonic(), response

        url = f"{engine.base_url}/chat/completions"
        body = request(BASE, max_tokens=40, ignore_eos=True, stream=True)
        async with client.stream("POST", url, json=body) as running:
            lines = running.aiter_lines()
            await anext(lines)
            pausing = asyncio.create_task(engine.pause())
            events = [line async for line in lines if line.startswith("data: {")]
            await pausing
        tokens = [t for e in events for c in json.loads(e[6:])["choices"] for t in c.get("token_ids") or []]
        assert len(tokens) == 40
        held = asyncio.create_task(post(max_tokens=1))
        await engine.publish(version, served.adapters[V2])
        assert not held.done()
        resumed = time.monotonic()
        await engine.resume()
        ended, response = await held
    assert response.status_code == 200
    assert ended > resumed
    await engine.retire(version)


async def test_what_vllm_refuses_is_told_in_its_words(served, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "peft_type": "LORA"}')
    with pytest.raises(EngineError, match="did not load adapter"):
        await served.engine.publish(PolicyVersion("agent", 9), tmp_path)
    assert (await served.engine.health()).ok
