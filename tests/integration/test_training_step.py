"""A training step from its pause to its record, when something goes wrong on the way."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.registered import collect, registered

from art_core import TrainableModel
from art_core.backends.run_record import RunRecord
from art_core.errors import EngineError, NothingToTrainError, StoreError
from art_core.training.report import TrainReport


@pytest.fixture
def model(base_model: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with registered(base_model, tmp_path) as model:
        yield model


def test_what_was_trained_is_served_though_the_record_refuses_to_say_what_happened(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
):
    model.turn(reward_weights={"speed": 2.0})  # which is an event of the step
    collect(model)

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(RunRecord, "happened", full)
        with pytest.raises(StoreError, match="the disk is full"):
            model.train()
    assert model.current_version().number == 1
    collect(model, seed=10)
    assert model.train().updated
    assert model.current_version().number == 2


async def test_a_training_step_whose_caller_is_cancelled_is_seen_to_its_end(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
):
    """Its thread goes on anyway: the engine must not be given the machine back, nor another step begin."""
    collect(model)
    registered = model._registered
    trainer, engine = registered._trainer, registered.engine  # type: ignore[attr-defined]
    train, resume = trainer.train, engine.resume
    training, go_on = threading.Event(), threading.Event()
    happened: list[str] = []

    def slowly(*groups: object, **options: object) -> TrainReport:
        training.set()
        assert go_on.wait(60)
        report = train(*groups, **options)
        happened.append("trained")
        return report

    async def resumed() -> None:
        happened.append("resumed")
        await resume()

    monkeypatch.setattr(trainer, "train", slowly)
    monkeypatch.setattr(engine, "resume", resumed)
    step = asyncio.create_task(model.atrain())
    assert await asyncio.to_thread(training.wait, 60)
    step.cancel()
    await asyncio.wait({step}, timeout=0.5)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert happened == ["trained", "resumed"]
    assert model.endpoint.current_version().number == 1
    store = registered.store  # type: ignore[attr-defined]
    assert [m.step for m in store.metrics(store.runs()[0].id, "updates")] == [1]
    with pytest.raises(NothingToTrainError, match="has collected no trajectories"):
        await model.atrain()


async def test_an_engine_that_did_not_pause_is_told_to_go_on(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
):
    """It may have begun to: some of its replicas, or the server that takes its place."""
    collect(model)
    engine = model._registered.engine  # type: ignore[attr-defined]
    resume, resumed = engine.resume, []

    async def refuse() -> None:
        raise EngineError("it cannot pause now")

    async def told_to_resume() -> None:
        resumed.append(True)
        await resume()

    with monkeypatch.context() as broken:
        broken.setattr(engine, "pause", refuse)
        broken.setattr(engine, "resume", told_to_resume)
        with pytest.raises(EngineError, match="cannot pause now"):
            await model.atrain()
    assert resumed
    assert (await model.atrain()).updated
