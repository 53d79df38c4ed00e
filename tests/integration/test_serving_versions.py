"""Several versions of one policy, served side by side and let go."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig
from art_core.errors import CheckpointError, EngineError
from art_core.types import PolicyVersion
from art_langgraph import ChatART

ASK = [{"role": "user", "content": "answer yes or no"}]


@pytest.fixture
def model(base_model: str, tmp_path: Path) -> Iterator[TrainableModel]:
    # So large a rate changes every answer's value; a guardrail could refuse what follows it.
    unguarded = GuardrailConfig(max_kl=None, max_norm_growth=None)
    train = TrainConfig(learning_rate=0.5, guardrails=unguarded)
    model = TrainableModel(
        base_model=base_model, project="p", name="agent", lora_rank=4, batch_size=2, train=train
    )
    model.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256, keep_checkpoints=3))
    with model:
        yield model


def learn(model: TrainableModel, updates: int) -> None:
    for _ in range(updates):
        for reward in (0.0, 1.0):
            trajectory = model.start_trajectory()
            model.chat.completions.create(messages=ASK, max_tokens=2)
            model.end_trajectory(trajectory, reward=reward)
        assert model.train().updated


def served(model: TrainableModel) -> list[int]:
    return sorted(v.number for v in model._registered.engine.versions())  # type: ignore[attr-defined]


def first_logprob(endpoint: object) -> float:
    """Of one fixed token: the greedy choice's value changes with every update."""
    answer = ChatART(endpoint, temperature=0, max_tokens=1, logprobs=True).invoke("answer yes or no")
    return answer.response_metadata["logprobs"]["content"][0]["logprob"]


def test_an_earlier_version_is_served_beside_the_current_one_until_it_is_closed(model: TrainableModel):
    learn(model, 1)
    before = first_logprob(model)
    learn(model, 2)
    assert served(model) == [2, 3]
    now = first_logprob(model)
    with model.serve(1) as first:
        assert first.current_version() == PolicyVersion("agent", 1)
        assert first_logprob(first) == pytest.approx(before, abs=1e-4)
        assert first_logprob(model) == pytest.approx(now, abs=1e-4)
        assert before != pytest.approx(now, abs=1e-3)
        learn(model, 1)
        assert served(model) == [1, 3, 4]
        assert first_logprob(first) == pytest.approx(before, abs=1e-4)
    assert served(model) == [3, 4]


def test_version_0_is_the_base_model_whatever_was_learnt(model: TrainableModel):
    untrained = first_logprob(model)
    learn(model, 2)
    assert served(model) == [1, 2]
    assert first_logprob(model) != pytest.approx(untrained, abs=1e-3)
    with contextlib.closing(model.serve(0)) as base:
        assert first_logprob(base) == pytest.approx(untrained, abs=1e-4)


def test_a_version_whose_checkpoint_is_gone_is_refused_with_what_there_is(model: TrainableModel):
    learn(model, 4)
    with pytest.raises(
        CheckpointError, match=r"agent@1 is not on disk; there are 2, 3, 4 .*keep_checkpoints"
    ):
        model.serve(1)


def test_a_checkpoint_that_is_served_is_not_pruned(model: TrainableModel, tmp_path: Path):
    learn(model, 1)
    with contextlib.closing(model.serve(1)):
        learn(model, 4)
        kept = sorted(p.name[-2:] for p in (tmp_path / "p" / "agent" / "checkpoints").glob("checkpoint-*"))
        assert kept == ["01", "03", "04", "05"]
    learn(model, 1)
    kept = sorted(p.name[-2:] for p in (tmp_path / "p" / "agent" / "checkpoints").glob("checkpoint-*"))
    assert kept == ["04", "05", "06"]


def test_two_who_hold_a_version_let_it_go_one_by_one(model: TrainableModel):
    learn(model, 3)
    first, second = model.serve(1), model.serve(1)
    first.close()
    first.close()
    assert 1 in served(model)
    second.close()
    assert 1 not in served(model)


def test_a_version_that_was_let_go_is_not_leased_any_more(model: TrainableModel):
    learn(model, 3)
    with (
        pytest.raises(EngineError, match=r"agent@1 is not served any more.*aserve\(1\)"),
        model.lease(PolicyVersion("agent", 1)),
    ):
        pass
    with contextlib.closing(model.serve(1)), model.lease(PolicyVersion("agent", 1)) as version:
        assert version.number == 1


def test_a_client_that_a_pause_holds_on_an_old_version_does_not_stop_training(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
):
    """A stock client, of which nobody knows that it holds a version."""
    learn(model, 2)
    client = openai.OpenAI(base_url=model.base_url, api_key="none", max_retries=0, timeout=60)
    engine = model._registered.engine  # type: ignore[attr-defined]
    pause = engine.pause
    with ThreadPoolExecutor() as threads:
        asked = []

        async def ask_in_the_pause() -> None:
            await pause()
            create = client.chat.completions.create
            asked.append(threads.submit(create, model="agent@1", messages=ASK, max_tokens=1))
            while not engine._scheduler._jobs["agent@1"]:
                await asyncio.sleep(0.01)

        monkeypatch.setattr(engine, "pause", ask_in_the_pause)
        learn(model, 1)
        assert asked[0].result(60).model == "agent@1"
    assert served(model) == [2, 3]


async def test_a_rollout_that_holds_a_version_keeps_it_served(model: TrainableModel):
    with model.lease() as version:
        await asyncio.to_thread(learn, model, 4)
        assert served(model) == [version.number, 3, 4]
    await asyncio.to_thread(learn, model, 1)
    assert served(model) == [4, 5]


def test_a_checkpoint_that_was_never_served_does_not_block_the_next_version(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
):
    engine = model._registered.engine  # type: ignore[attr-defined]
    publish = engine.publish

    async def refuse(version: PolicyVersion, adapter_dir: Path | None) -> None:
        raise EngineError("no room")

    monkeypatch.setattr(engine, "publish", refuse)
    with pytest.raises(EngineError, match="no room"):
        learn(model, 1)
    assert model.current_version().number == 0
    monkeypatch.setattr(engine, "publish", publish)
    learn(model, 1)
    assert model.current_version().number == 2
