"""What the embedded engine decodes: exact logprobs, shared prefixes, versions, determinism."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.embedded import disturb, forward_logprobs, serving, tiny_policy
from helpers.tiny import tiny_model
from openai import AsyncOpenAI, InternalServerError
from openai.types.chat import ChatCompletion

from art_core.config import LoRAConfig
from art_core.training.peft_policy import PeftPolicy
from art_core.types import PolicyVersion


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PeftPolicy:
    return tiny_policy(tmp_path_factory.mktemp("llama"))


async def ask(client: AsyncOpenAI, text: str | list[dict[str, Any]], **options: Any) -> ChatCompletion:
    options = {"model": "tiny", "max_tokens": 12, "logprobs": True, **options}
    extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
    messages: Any = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return await client.chat.completions.create(messages=messages, extra_body=extra, **options)


def tokens(answer: ChatCompletion, choice: int = 0) -> list[int]:
    return answer.choices[choice].token_ids  # type: ignore[attr-defined, no-any-return]


def logprobs(answer: ChatCompletion, choice: int = 0) -> list[float]:
    content = answer.choices[choice].logprobs
    assert content is not None
    assert content.content is not None
    return [entry.logprob for entry in content.content]


def agrees_with_forward(policy: PeftPolicy, answer: ChatCompletion, temperature: float = 1.0) -> None:
    prompt: list[int] = answer.prompt_token_ids  # type: ignore[attr-defined]
    for choice in range(len(answer.choices)):
        ids = tokens(answer, choice)
        expected = forward_logprobs(policy, answer.model, prompt, ids, temperature=temperature)
        assert logprobs(answer, choice) == pytest.approx(expected, abs=1e-3)


class Counter:
    """Counts what goes through the model."""

    def __init__(self, policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self.tokens = 0
        self._forward = policy.hidden_states
        monkeypatch.setattr(policy, "hidden_states", self._count)

    def _count(self, **inputs: Any) -> Any:
        self.passes += 1
        self.tokens += inputs["input_ids"].numel()
        return self._forward(**inputs)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
async def test_sampled_logprobs_are_those_of_the_trainers_forward(tmp_path: Path, arch: Any) -> None:
    policy = tiny_policy(tmp_path, arch)
    async with serving(policy) as (_, client):
        shared = "you are a helpful player " * 3
        texts = [shared + "one", shared + "two three", "hello", shared + "one", "x" * 150]
        answers = await asyncio.gather(
            *(ask(client, text, n=2, temperature=0.7 + i / 10) for i, text in enumerate(texts))
        )
        for i, answer in enumerate(answers):
            assert len(tokens(answer)) == 12
            agrees_with_forward(policy, answer, temperature=0.7 + i / 10)


async def test_an_adapters_dropout_does_not_act_when_it_is_served(tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, dropout=0.5)
    policy = PeftPolicy.load(str(tiny_model(tmp_path)), lora, dtype="float32")
    disturb(policy, seed=1)
    async with serving(policy) as (_, client):
        first, again = [await ask(client, f"hello {text}", seed=1) for text in ("one", "one")]
        assert logprobs(first) == pytest.approx(logprobs(again), abs=1e-5)
        agrees_with_forward(policy, first)


async def test_prompts_longer_than_one_pass_and_batches_larger_than_the_limit_are_exact(
    policy: PeftPolicy,
) -> None:
    async with serving(policy, max_batch=3, prefix_cache_tokens=64) as (_, client):
        texts = ["board " * 300, *(f"play {i} " * (3 * i + 1) for i in range(8))]
        for answer in await asyncio.gather(*(ask(client, text) for text in texts)):
            agrees_with_forward(policy, answer)


async def test_memory_is_bounded_and_who_has_to_wait_for_it_answers_as_ever(policy: PeftPolicy) -> None:
    """Running sequences count: what does not fit is suspended and computed again."""
    settings: dict[str, Any] = {"max_model_len": 200, "prefix_cache_tokens": 300}
    async with serving(policy, **settings) as (engine, client):
        scheduler = engine._scheduler
        texts = [f"{i} " * 40 for i in range(8)]
        answers = await asyncio.gather(*(ask(client, text, max_tokens=40, n=2) for text in texts))
        for answer in answers:
            assert [len(tokens(answer, choice)) for choice in range(2)] == [40, 40]
            agrees_with_forward(policy, answer)
        assert scheduler._suspensions > 0
        assert scheduler._tree.slots <= 300
        assert scheduler._runner._capacity <= 300
        assert not scheduler._suspended


async def test_a_seed_gives_the_same_tokens_to_a_sequence_that_was_suspended(policy: PeftPolicy) -> None:
    settings: dict[str, Any] = {"max_model_len": 200, "deterministic": True}
    texts = [f"{i} " * 40 for i in range(6)]
    async with serving(policy, **settings) as (engine, client):
        alone = [await ask(client, text, seed=i, max_tokens=40) for i, text in enumerate(texts)]
        assert not engine._scheduler._suspensions
    async with serving(policy, **settings, prefix_cache_tokens=0) as (engine, client):
        crowd = await asyncio.gather(
            *(ask(client, text, seed=i, max_tokens=40) for i, text in enumerate(texts))
        )
        assert engine._scheduler._suspensions
        assert engine._scheduler._tree.slots <= 200
    for one, many in zip(alone, crowd, strict=True):
        assert tokens(one) == tokens(many)
        assert logprobs(one) == logprobs(many)


async def test_a_client_that_leaves_while_its_request_is_suspended_frees_its_place(
    policy: PeftPolicy,
) -> None:
    async with serving(policy, max_model_len=1000, prefix_cache_tokens=0) as (engine, client):
        crowd = [asyncio.create_task(ask(client, f"{i} " * 40, max_tokens=850)) for i in range(4)]
        while not engine._scheduler._suspended:
            await asyncio.sleep(0.001)
        for task in crowd:
            task.cancel()
        assert len(tokens(await ask(client, "hello"))) == 12
        while engine._scheduler._jobs["tiny@0"]:
            await asyncio.sleep(0.001)
        assert not engine._scheduler._suspended
        assert not engine._scheduler._running


async def test_memory_that_cannot_be_had_is_an_error_that_names_the_setting(
    policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(policy) as (engine, client):
        with monkeypatch.context() as patch:

            def full(capacity: int) -> None:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

            patch.setattr(engine._scheduler._runner._cache, "grow", full)
            with pytest.raises(InternalServerError, match=r"prefix_cache_tokens=65536.*allocate memory"):
                await ask(client, "hello")
        agrees_with_forward(policy, await ask(client, "hello"))


async def test_what_was_computed_once_is_not_computed_again(
    policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(policy) as (_, client):
        counter = Counter(policy, monkeypatch)
        first = await ask(client, "hello world", max_tokens=1)
        prompt_tokens = counter.tokens
        assert prompt_tokens == len(first.prompt_token_ids)  # type: ignore[attr-defined]
        await ask(client, "hello world", max_tokens=1, n=8)
        assert counter.tokens == prompt_tokens
        longer = await ask(client, "hello world yes", max_tokens=1)
        assert counter.tokens < prompt_tokens + 16
        agrees_with_forward(policy, longer)


async def test_choices_of_one_request_share_its_prompt(
    policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(policy) as (_, client):
        counter = Counter(policy, monkeypatch)
        answer = await ask(client, "the board is empty", n=16, max_tokens=1)
        assert counter.tokens == len(answer.prompt_token_ids)  # type: ignore[attr-defined]


async def test_a_seed_gives_the_same_tokens_and_different_choices(policy: PeftPolicy) -> None:
    async with serving(policy) as (_, client):
        first = await ask(client, "hello", n=2, seed=5)
        again = await ask(client, "hello", n=2, seed=5)
        other = await ask(client, "hello", n=2, seed=6)
    assert [tokens(first, i) for i in range(2)] == [tokens(again, i) for i in range(2)]
    assert tokens(first, 0) != tokens(first, 1)
    assert tokens(first, 0) != tokens(other, 0)


@pytest.mark.parametrize("cache", [0, 100, 65536])
async def test_deterministic_answers_are_equal_to_the_last_bit_whatever_else_runs(
    policy: PeftPolicy, cache: int
) -> None:
    settings: dict[str, Any] = {"deterministic": True, "prefix_cache_tokens": cache}
    texts = ["hello", "hello world", "hello", "board " * 120]
    async with serving(policy, **settings) as (_, client):
        alone = [await ask(client, text, seed=i) for i, text in enumerate(texts)]
    async with serving(policy, **settings) as (_, client):
        noise = [asyncio.create_task(ask(client, f"hello {i}", seed=i, max_tokens=5)) for i in range(8)]
        crowd = await asyncio.gather(*(ask(client, text, seed=i) for i, text in enumerate(texts)))
        await asyncio.gather(*noise)
    for one, many in zip(alone, crowd, strict=True):
        assert tokens(one) == tokens(many)
        assert logprobs(one) == logprobs(many)


async def test_the_plain_name_is_the_newest_version_and_answers_say_which(policy: PeftPolicy) -> None:
    """C06"""
    async with serving(policy, versions=(0, 1)) as (engine, client):
        assert (await ask(client, "hello")).model == "tiny@1"
        assert (await ask(client, "hello", model="tiny@0")).model == "tiny@0"
        assert [v.number for v in engine.versions()] == [0, 1]
        assert [m.id for m in (await client.models.list()).data] == ["tiny@0", "tiny@1", "tiny"]


async def test_a_prompt_on_two_versions_never_shares_the_others_cache(policy: PeftPolicy) -> None:
    """C41"""
    async with serving(policy) as (engine, client):
        before = await ask(client, "the weather in Paris", seed=1)
        disturb(policy, seed=2)
        await engine.publish(PolicyVersion("tiny", 1), None)
        after = await ask(client, "the weather in Paris", seed=1)
        for answer in (before, after, await ask(client, "the weather in Paris", model="tiny@0")):
            agrees_with_forward(policy, answer)
        assert logprobs(before) != logprobs(after)


async def test_a_long_request_ends_on_the_version_it_began_with(policy: PeftPolicy) -> None:
    """C40"""
    async with serving(policy) as (engine, client):
        long = asyncio.create_task(ask(client, "hello", max_tokens=150, seed=3))
        while not engine._scheduler._running:
            await asyncio.sleep(0.001)
        for number in range(1, 6):
            disturb(policy, seed=10 + number)
            await engine.publish(PolicyVersion("tiny", number), None)
            assert (await ask(client, "hello", max_tokens=2)).model == f"tiny@{number}"
            await engine.retire(PolicyVersion("tiny", number))
        answer = await long
        assert answer.model == "tiny@0"
        assert len(tokens(answer)) == 150
        agrees_with_forward(policy, answer)


async def test_publishing_and_retiring_under_load_fails_no_request(policy: PeftPolicy) -> None:
    async with serving(policy) as (engine, client):
        stop = asyncio.Event()

        async def load(i: int) -> int:
            done = 0
            while not stop.is_set():
                await ask(client, f"hello {i}", max_tokens=3)
                done += 1
            return done

        loads = [asyncio.create_task(load(i)) for i in range(6)]
        for number in range(1, 5):
            await engine.publish(PolicyVersion("tiny", number), None)
            await engine.retire(PolicyVersion("tiny", number - 1))
        stop.set()
        assert all(await asyncio.gather(*loads))


async def test_an_adapter_directory_can_be_published(policy: PeftPolicy, tmp_path: Path) -> None:
    policy.save_weights(tmp_path)
    async with serving(policy) as (engine, client):
        same = await ask(client, "hello", seed=1)
        disturb(policy, seed=3)
        await engine.publish(PolicyVersion("tiny", 1), tmp_path)
        assert tokens(await ask(client, "hello", seed=1)) == tokens(same)


async def test_a_paused_engine_holds_requests_until_it_is_resumed(policy: PeftPolicy) -> None:
    async with serving(policy) as (engine, client):
        running = asyncio.create_task(ask(client, "hello", max_tokens=30))
        while not engine._scheduler._running:
            await asyncio.sleep(0.001)
        await engine.pause()
        held = asyncio.create_task(ask(client, "hello", max_tokens=1))
        assert len(tokens(await running)) == 30
        while not engine._scheduler._waiting:
            await asyncio.sleep(0.001)
        assert not held.done()
        await engine.resume()
        await held


async def test_the_trainer_gets_the_model_while_requests_are_decoded(policy: PeftPolicy) -> None:
    async with serving(policy) as (engine, client):
        load = asyncio.create_task(ask(client, "hello", max_tokens=800))
        while not engine._scheduler._running:
            await asyncio.sleep(0.001)
        taken = threading.Event()

        def train() -> None:
            with policy.lock:
                taken.set()

        await asyncio.to_thread(train)
        assert taken.is_set()
        assert not load.done(), "it had to wait for the end of the request"
        await load


async def test_a_fault_fails_the_requests_it_touched_and_the_engine_lives_on(
    policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(policy) as (engine, client):
        with monkeypatch.context() as patch:

            def broken(**_: Any) -> Any:
                raise RuntimeError("out of memory")

            patch.setattr(policy, "hidden_states", broken)
            with pytest.raises(InternalServerError, match="out of memory"):
                await ask(client, "hello", n=3)
        agrees_with_forward(policy, await ask(client, "hello"))
        assert (await engine.health()).ok


async def test_closing_ends_what_runs_with_an_error(policy: PeftPolicy) -> None:
    async with serving(policy) as (engine, client):
        long = asyncio.create_task(ask(client, "hello", max_tokens=900))
        while not engine._scheduler._running:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(engine.close(), timeout=120)
        with pytest.raises(InternalServerError, match="closed"):
            await long
        assert not (await engine.health()).ok
        await engine.close()
