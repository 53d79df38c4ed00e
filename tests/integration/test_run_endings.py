"""What a run's record says of its end, and that a run that ended in any way is gone on from."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig
from art_core.errors import EngineError, TrainingStoppedError
from art_core.observe.sinks.base import MetricWriter, SinkRun
from art_core.store import Run, RunState, Store

ASK = [{"role": "user", "content": "answer yes or no"}]


class Listening:
    """A sink that remembers how it was closed."""

    name = "listening"

    def __init__(self) -> None:
        self.closed: list[RunState | None] = []
        self.last_step = 0

    def open(self, run: SinkRun) -> MetricWriter:
        return self

    def log(self, step: int, values: Any, at: float) -> None:
        pass

    def close(self, state: RunState | None) -> None:
        self.closed.append(state)


def registered(base_model: str, root: Path, *sinks: Listening) -> TrainableModel:
    train = TrainConfig(guardrails=GuardrailConfig(audit_every=3, audit_stops=True))
    model = TrainableModel(base_model=base_model, project="p", name="agent", train=train, lora_rank=4)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=256, sinks=sinks))
    return model


def a_call(model: TrainableModel, *rewards: float):
    for i, reward in enumerate(rewards):
        trajectory = model.start_trajectory()
        model.chat.completions.create(messages=ASK, max_tokens=2, seed=i)
        model.end_trajectory(trajectory, reward=reward)
    return model.train()


def runs(root: Path) -> list[Run]:
    with Store.open("p", root) as store:
        return store.runs()


def test_a_run_whose_block_raised_failed_says_why_and_is_gone_on_from(
    base_model: str, tmp_path: Path
) -> None:
    sink = Listening()

    def run_into_an_error() -> None:
        with registered(base_model, tmp_path, sink) as model:
            assert a_call(model, 0.0, 1.0).updated
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        run_into_an_error()
    [run] = runs(tmp_path)
    assert run.state is RunState.FAILED
    assert run.ended_at
    assert sink.closed == [RunState.FAILED]
    with Store.open("p", tmp_path) as store:
        [event] = store.events(run.id, "run_failed")
    assert event.message == "ZeroDivisionError: division by zero"
    with registered(base_model, tmp_path) as model:
        assert model.current_version().number == 1
    assert [(r.state, r.continues) for r in runs(tmp_path)] == [
        (RunState.FAILED, None),
        (RunState.FINISHED, run.id),
    ]


async def test_an_async_block_hands_over_what_was_raised_too(base_model: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        async with registered(base_model, tmp_path):
            raise KeyboardInterrupt
    [run] = runs(tmp_path)
    assert run.state is RunState.STOPPED, "a person stopped it, nothing failed"


def stop_by_audit(model: TrainableModel) -> None:
    kinds = [event.kind for _ in range(3) for event in a_call(model, 0.5, 0.5).events]
    assert kinds == ["reward_audit", "training_stopped"]


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_run_that_a_guardrail_stopped_is_stopped(base_model: str, tmp_path: Path, swallowed: bool) -> None:
    def stopped() -> None:
        with registered(base_model, tmp_path) as model:
            stop_by_audit(model)
            if not swallowed:
                a_call(model, 0.0, 1.0)

    with nullcontext() if swallowed else pytest.raises(TrainingStoppedError):
        stopped()
    [run] = runs(tmp_path)
    assert run.state is RunState.STOPPED
    with Store.open("p", tmp_path) as store:
        assert not store.events(run.id, "run_failed")


def test_a_run_that_was_resumed_after_a_stop_has_finished(base_model: str, tmp_path: Path) -> None:
    with registered(base_model, tmp_path) as model:
        stop_by_audit(model)
        model.resume_training()
        assert a_call(model, 0.0, 1.0).updated
    [run] = runs(tmp_path)
    assert run.state is RunState.FINISHED


def test_a_run_whose_engine_does_not_close_has_ended_all_the_same(
    base_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Listening()
    model = registered(base_model, tmp_path, sink)
    engine = model._registration.engine  # type: ignore[union-attr]
    close = engine.close

    async def close_and_fail() -> None:
        await close()
        raise EngineError("it did not end")

    monkeypatch.setattr(engine, "close", close_and_fail)
    with pytest.raises(EngineError, match="it did not end"):
        model.close()
    assert sink.closed == [RunState.FINISHED]
    assert [run.state for run in runs(tmp_path)] == [RunState.FINISHED]


async def test_a_closing_that_is_cancelled_ends_the_run_first(
    base_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Listening()
    train = TrainConfig(guardrails=GuardrailConfig())
    model = TrainableModel(base_model=base_model, project="p", name="agent", train=train, lora_rank=4)
    await model.aregister(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256, sinks=[sink]))
    engine = model._registration.engine  # type: ignore[union-attr]
    closing, go_on, close = asyncio.Event(), asyncio.Event(), engine.close

    async def slowly() -> None:
        closing.set()
        await go_on.wait()
        await close()

    monkeypatch.setattr(engine, "close", slowly)
    ending = asyncio.create_task(model.aclose())
    await closing.wait()
    ending.cancel()
    await asyncio.wait({ending}, timeout=0.2)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert sink.closed == [RunState.FINISHED]
