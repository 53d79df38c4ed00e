"""What changes while a run goes on: knobs, replay, staleness, guardrails, forks; with a tiny model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.registered import ASK, TRAIN, collect, registered
from helpers.training import same, weights

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig, RetentionConfig
from art_core.errors import (
    CheckpointError,
    ConfigError,
    NothingToTrainError,
    TrainingStoppedError,
)
from art_core.rewards import component, score_trajectories
from art_core.store import Event
from art_core.training.report import TrainReport
from art_core.types import Trajectory, TrajectoryGroup
from art_langgraph import ChatART


@pytest.fixture
def model(base_model: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with registered(base_model, tmp_path) as model:
        yield model


def events(model: TrainableModel, kind: str) -> list[Event]:
    return model._registration.store.events(kind=kind)  # type: ignore[union-attr]


def test_a_turned_learning_rate_holds_from_the_next_call_and_is_an_event(model: TrainableModel):
    collect(model)
    assert model.train().metrics["learning_rate"] == 1e-2
    model.turn(learning_rate=5e-3)
    collect(model)
    assert model.train().metrics["learning_rate"] == 5e-3
    (event,) = events(model, "knob_turned")
    assert (event.data["name"], event.data["before"], event.data["after"]) == ("learning_rate", None, 5e-3)
    assert model.knobs.learning_rate == 5e-3


def test_an_edited_file_turns_knobs_and_one_that_cannot_be_used_is_an_event(
    model: TrainableModel, tmp_path: Path
):
    file = tmp_path / "p" / "agent" / "knobs.json"
    file.write_text(json.dumps({"learning_rate": 2e-3}))
    collect(model)
    assert model.train().metrics["learning_rate"] == 2e-3
    file.write_text(json.dumps({"learning_rate": "fast"}))
    collect(model)
    assert model.train().metrics["learning_rate"] == 2e-3
    (refused,) = events(model, "knobs_refused")
    assert "learning_rate='fast'" in refused.message
    with pytest.raises(ConfigError, match="lerning_rate"):
        model.turn(lerning_rate=1.0)


async def test_the_temperature_knob_reaches_calls_that_name_none_of_their_own(
    base_model: str, tmp_path: Path
):
    model = TrainableModel(base_model=base_model, project="p", name="agent", lora_rank=4)
    await model.aregister(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256))
    async with model:
        model.turn(temperature=0.0)
        chat, own = ChatART(model, max_tokens=3), ChatART(model, max_tokens=3, temperature=1.5)
        trajectory = model.start_trajectory()
        for _ in range(3):
            await chat.ainvoke("hello")
        await own.ainvoke("hello")
        steps = model.end_trajectory(trajectory, reward=1.0).steps
    assert [s.sampling.get("temperature") for s in steps] == [0.0, 0.0, 0.0, 1.5]
    assert len({s.tokens.completion for s in steps[:3] if s.tokens}) == 1


def test_the_temperature_follows_its_schedule_from_version_to_version(model: TrainableModel):
    model.turn(temperature=1.0, temperature_final=0.5, temperature_until=2)
    chat, asked, told = ChatART(model, max_tokens=2), [], []
    for _ in range(3):
        for reward in (0.0, 1.0):
            trajectory = model.start_trajectory()
            chat.invoke("answer yes or no")
            asked.append(model.end_trajectory(trajectory, reward=reward).steps[0].sampling["temperature"])
        told.append(model.train().metrics["temperature_mean"])
    assert asked == [1.0, 1.0, 0.75, 0.75, 0.5, 0.5]
    assert told == [1.0, 0.75, 0.5]


@component
def quality(trajectory: Trajectory) -> float:
    return trajectory.metadata["quality"]


@component
def cost(trajectory: Trajectory) -> float:
    return trajectory.metadata["cost"]


def weighed(model: TrainableModel, seed: int = 0) -> TrajectoryGroup:
    """Two rollouts, worth 0 and 1 - 0.3: the second one is better and costs more."""
    ended = []
    for i, measured in enumerate(({"quality": 0.0, "cost": 0.0}, {"quality": 1.0, "cost": 3.0})):
        trajectory = model.start_trajectory("weighed", metadata=measured)
        model.chat.completions.create(messages=ASK, max_tokens=2, seed=seed + i)
        ended.append(model.end_trajectory(trajectory, reward=0.0))
    scored = score_trajectories(1.0 * quality - 0.1 * cost, ended)
    return TrajectoryGroup(scored[0].scenario, tuple(scored))


def advantages(report: TrainReport, group: TrajectoryGroup) -> list[float]:
    by_step = {step.step_id: step.advantage for step in report.trained}
    return [by_step[t.steps[0].id] for t in group]


def test_a_turned_weight_turns_advantages_round_also_of_what_is_replayed(model: TrainableModel):
    first, second = weighed(model), weighed(model, seed=10)
    assert advantages(model.train([first]), first) == pytest.approx([-0.35, 0.35])
    model.turn(reward_weights={"cost": -0.5})
    report = model.train([second])
    assert report.metrics["groups_replayed"] == 1
    assert report.metrics["groups_reweighted"] == 2
    assert advantages(report, second) == advantages(report, first) == pytest.approx([0.25, -0.25])
    assert report.metrics["reward_mean"] == pytest.approx(-0.25)
    assert report.metrics["reward_mean_scored"] == pytest.approx(0.35)
    (event,) = events(model, "knob_turned")
    assert (event.data["name"], event.data["before"], event.data["after"]) == (
        "reward_weights/cost",
        None,
        -0.5,
    )
    kept = [model.store.trajectory(t.id).reward for t in (*first, *second)]
    assert kept == pytest.approx([0.0, 0.7] * 2)  # as they were scored
    third = weighed(model, seed=20)
    model.turn(reward_weights={"cost": None})
    assert advantages(model.train([third]), third) == pytest.approx([-0.35, 0.35])


def test_a_weight_that_nothing_was_scored_with_is_an_event_and_the_rest_is_trained(model: TrainableModel):
    model.turn(reward_weights={"speed": 2.0})
    collect(model)
    assert model.train().updated
    (event,) = events(model, "reward_weights_unused")
    assert "'speed' is not used" in event.message
    assert "1 of 1 groups are trained as they were scored" in event.message
    collect(model, seed=10)
    assert model.train().metrics["groups_reweighted"] == 0
    assert len(events(model, "reward_weights_unused")) == 1


def test_a_run_that_is_resumed_after_a_turn_decides_as_one_that_was_not(base_model: str, tmp_path: Path):
    def run(root: Path, *, resumed: bool) -> tuple[list[torch.Tensor], dict[str, object]]:
        model = registered(base_model, root)
        for call in range(4):
            if call == 1:
                model.turn(reward_weights={"cost": -0.5})
            if call == 3 and resumed:
                model.close()
                model = registered(base_model, root)
            model.train([weighed(model, seed=10 * call)])
        trainer = model._registration._trainer  # type: ignore[union-attr]
        found = weights(trainer.policy), trainer.guardrails.state_dict()
        model.close()
        return found

    expected, guardrails = run(tmp_path / "a", resumed=False)
    found, others = run(tmp_path / "b", resumed=True)
    assert same(found, expected)
    assert others == guardrails


def test_an_earlier_group_is_trained_again_also_by_a_run_that_was_resumed(base_model: str, tmp_path: Path):
    def run(root: Path, *, resumed_after: int | None) -> tuple[list[float], dict[str, object]]:
        replayed: list[float] = []
        model = registered(base_model, root)
        for call in range(4):
            if call == resumed_after:
                model.close()
                model = registered(base_model, root)
            collect(model, seed=10 * call)
            replayed.append(model.train().metrics["groups_replayed"])
        found = weights(model._registration._trainer.policy)  # type: ignore[union-attr]
        model.close()
        return replayed, found

    straight, expected = run(tmp_path / "a", resumed_after=None)
    resumed, found = run(tmp_path / "b", resumed_after=2)
    assert straight == resumed == [0.0, 1.0, 1.0, 1.0]
    assert same(found, expected)


def test_rollouts_that_are_too_old_are_not_trained(base_model: str, tmp_path: Path):
    train = TRAIN.replace(max_staleness=1, replay=None)
    with registered(base_model, tmp_path, train=train) as model:
        waiting = []
        for i in range(2):
            waiting.append(model.start_trajectory("waits"))
            model.chat.completions.create(messages=ASK, max_tokens=2, seed=i)
        for _ in range(2):
            collect(model)
            assert model.train().metrics["staleness_max"] == 0
        for i, trajectory in enumerate(waiting):
            model.end_trajectory(trajectory, reward=float(i))
        with pytest.raises(NothingToTrainError, match="max_staleness=1"):
            model.train()


def test_a_stopped_training_stays_stopped_after_a_restart_until_somebody_resumes_it(
    base_model: str, tmp_path: Path
):
    # Every second call is "trouble": the least clipping is too much, and two epochs clip.
    train = TrainConfig(
        learning_rate=5e-2,
        epochs=2,
        clip_low=1e-6,
        clip_high=1e-6,
        guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None, max_clip_fraction=1e-6, patience=1),
    )
    model = registered(base_model, tmp_path, train=train)
    kinds: list[str] = []
    while "training_stopped" not in kinds:
        collect(model)
        kinds += [e.kind for e in model.train().events]
        assert len(kinds) < 10
    assert kinds.count("learning_rate_lowered") == 4
    model.close()
    with registered(base_model, tmp_path, train=train) as model:
        collect(model)
        with pytest.raises(TrainingStoppedError, match="clipped"):
            model.train()
        model.resume_training()
        assert model.train().updated
        assert events(model, "training_stopped")
        assert events(model, "training_resumed")


def test_a_fork_goes_on_from_the_version_that_was_chosen(base_model: str, tmp_path: Path):
    with registered(base_model, tmp_path, keep=RetentionConfig(last=2, every=1)) as model:
        for _ in range(3):
            collect(model)
            model.train()
    backend = LocalBackend(root=tmp_path)
    assert backend.fork("p", "agent", "other", version=1) == 1
    with registered(base_model, tmp_path, "other") as other:
        assert other.current_version().name == "other@1"
        collect(other)
        other.train()
        assert other.current_version().name == "other@2"
    with pytest.raises(CheckpointError, match="no checkpoint of version 9; there are 1, 2, 3"):
        backend.fork("p", "agent", "third", version=9)
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        backend.fork("p", "agent", "other")
    with pytest.raises(CheckpointError, match=r"'nobody' has no checkpoint; there are none in"):
        backend.fork("p", "nobody", "third")
    for wrong in ("../third", "a name", ""):
        with pytest.raises(ConfigError, match=f"cannot be named {wrong!r}"):
            backend.fork("p", "agent", wrong)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["p"]


@pytest.mark.parametrize(("gone", "begins"), [(1, "agent@2"), (3, "agent@0")])
def test_a_model_whose_newest_checkpoints_are_gone_goes_on_and_gives_their_numbers_to_nobody_else(
    base_model: str, tmp_path: Path, gone: int, begins: str
):
    """A damaged checkpoint says to move it away; the record still knows its version."""
    with registered(base_model, tmp_path) as model:
        for _ in range(3):
            collect(model)
            model.train()
    newest_first = sorted((tmp_path / "p" / "agent" / "checkpoints").iterdir(), reverse=True)
    (newest_first[0] / "training.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"training\.pt is damaged: .*move the directory .* away"):
        registered(base_model, tmp_path)
    for directory in newest_first[:gone]:
        shutil.rmtree(directory)
    with registered(base_model, tmp_path) as model:
        assert model.current_version().name == begins
        (event,) = events(model, "checkpoint_missing")
        assert "version 3, the newest on record, is gone" in event.message
        collect(model)
        assert model.train().updated
        assert model.current_version().name == "agent@4"
    with registered(base_model, tmp_path) as model:
        assert model.current_version().name == "agent@4"
        assert len(events(model, "checkpoint_missing")) == 1, "nothing is missing any more"


def test_the_best_checkpoint_by_its_rollouts_stays(base_model: str, tmp_path: Path):
    with registered(base_model, tmp_path, keep=RetentionConfig(last=2, best=1)) as model:
        for high in (0.2, 1.0, 0.3, 0.2, 0.1):  # version 1's rollouts are the best ones
            collect(model, (0.0, high))
            model.train()
    kept = sorted((tmp_path / "p" / "agent" / "checkpoints").glob("checkpoint-*"))
    assert [int(p.name[-2:]) for p in kept] == [1, 4, 5]
