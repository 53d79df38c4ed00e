"""TrainableModel and LocalBackend with a tiny model: the face that users hold, and its errors."""

import asyncio
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import tiny_model
from openai import BadRequestError
from peft import PeftConfig

from art_core import LocalBackend, TrainableModel, TrainableModelConfig, TrainConfig
from art_core.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    NothingToTrainError,
    RewardError,
    RolloutTooLongError,
    StoreError,
    UnknownTrajectoryError,
)
from art_core.store import Store
from art_core.types import Trajectory, TrajectoryGroup

ASK = [{"role": "user", "content": "answer yes or no"}]


def make(base_model: str, **changes: object) -> TrainableModel:
    settings: dict[str, object] = {"project": "p", "name": "agent", "lora_rank": 4, **changes}
    return TrainableModel(base_model=base_model, **settings)


def serve(model: TrainableModel, root: Path, **engine: object) -> TrainableModel:
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=256, **engine))
    return model


@pytest.fixture
def model(base_model: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with serve(make(base_model, learning_rate=1e-2), tmp_path) as model:
        yield model


def collect(model: TrainableModel, rewards: list[float]) -> list[Trajectory]:
    ended = []
    for reward in rewards:
        trajectory = model.start_trajectory()
        model.chat.completions.create(model=model.name, messages=ASK, max_tokens=2)
        ended.append(model.end_trajectory(trajectory, reward=reward))
    return ended


def test_the_face_that_people_know_works_to_the_letter(base_model: str, tmp_path: Path) -> None:
    config = TrainableModelConfig(
        base_model=base_model,
        project="p",
        name="agent",
        lora_rank=16,
        learning_rate=1e-5,
        batch_size=8,
        rollout_length=10,
    )
    model = TrainableModel(config)
    model.register(LocalBackend(root=tmp_path, gpu_memory_utilization=0.5, max_model_len=256))
    with model:
        for reward in (0.0, 1.0):
            trajectory_id = model.start_trajectory()
            answer = model.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "hello"}], max_tokens=3
            )
            assert answer.choices[0].message.role == "assistant"
            model.end_trajectory(trajectory_id, reward=reward)
            assert model.get_trajectory(trajectory_id).reward == reward
        report = model.train()
        assert report.updated
        adapter = model.save_lora_adapter(tmp_path / "adapter")
    assert PeftConfig.from_pretrained(str(adapter)).r == 16


def test_the_learning_rate_on_record_is_the_one_that_is_trained_with_however_it_was_given() -> None:
    for given in (
        {"learning_rate": 1e-3},
        {"train": TrainConfig(learning_rate=1e-3)},
        {"train": {"learning_rate": 1e-3}},
    ):
        config = TrainableModelConfig(base_model="m", **given)
        assert (config.learning_rate, config.train_config.learning_rate) == (1e-3, 1e-3)
        assert TrainableModelConfig(**config.model_dump()) == config
    assert TrainableModelConfig(base_model="m", train=TrainConfig()).learning_rate == 1e-5
    with pytest.raises(ConfigError, match=r"learning_rate=0\.1 contradicts"):
        TrainableModelConfig(base_model="m", learning_rate=0.1, train=TrainConfig(learning_rate=1e-3))


def test_a_step_holds_what_the_server_saw_and_sampled(model: TrainableModel) -> None:
    (trajectory,) = collect(model, [1.0])
    (step,) = trajectory.steps
    assert step.trainable
    assert step.policy == model.current_version()
    assert step.tokens is not None
    assert len(step.tokens.completion) == step.usage["completion_tokens"]
    assert step.messages == tuple(ASK)


def test_streaming_gives_the_same_kind_of_step(model: TrainableModel) -> None:
    trajectory = model.start_trajectory()
    chunks = list(model.chat.completions.create(messages=ASK, max_tokens=4, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    (step,) = model.end_trajectory(trajectory, reward=0.0).steps
    assert step.message() == text
    assert step.tokens is not None
    assert len(step.tokens.completion) <= 4


async def test_the_async_face_keeps_concurrent_trajectories_apart(model: TrainableModel) -> None:
    async def one(number: int) -> Trajectory:
        trajectory = await model.astart_trajectory("s")
        ask = [{"role": "user", "content": f"hello {number}"}]
        for _ in range(2):
            await model.chat.completions.acreate(messages=ask, max_tokens=2)
        return await model.aend_trajectory(trajectory, reward=float(number))

    ended = await asyncio.gather(*(one(number) for number in range(8)))
    for number, trajectory in enumerate(ended):
        assert [s.messages[0]["content"] for s in trajectory.steps] == [f"hello {number}"] * 2


def test_training_publishes_a_version_that_the_next_call_uses(model: TrainableModel) -> None:
    assert model.current_version().number == 0
    collect(model, [0.0, 1.0, 0.0, 1.0])
    assert model.train().metrics["trajectories"] == 4
    assert model.current_version().number == 1
    (trajectory,) = collect(model, [0.0])
    assert trajectory.steps[0].policy == model.current_version()


def test_equal_rewards_move_nothing_and_publish_nothing(model: TrainableModel) -> None:
    """C26."""
    collect(model, [0.7] * 4)
    report = model.train()
    assert report.metrics["groups_without_spread"] == 1
    assert not report.updated
    assert model.current_version().number == 0


def test_eight_trajectories_make_one_optimizer_step(base_model: str, tmp_path: Path) -> None:
    """C27."""
    with serve(make(base_model, batch_size=8), tmp_path) as model:
        collect(model, [0.0, 1.0] * 4)
        assert model.train().metrics["updates"] == 1
        collect(model, [0.0, 1.0] * 8)
        assert model.train().metrics["updates"] == 2


def test_a_plain_client_learns_a_task_whose_best_answer_is_known(tmp_path: Path) -> None:
    """A coin that should always say yes: the sampled share of the rewarded answer rises above 0.9."""
    # A narrow random model cannot be sure of anything: its logits are too close together.
    wide = str(tiny_model(tmp_path / "wide", hidden=256))
    with serve(
        make(wide, train=TrainConfig(learning_rate=3e-3, advantage="std"), batch_size=16), tmp_path
    ) as model:
        both = [[*ASK, {"role": "assistant", "content": answer}] for answer in ("yes", "no")]
        model.sft(both, steps=20, batch_size=2, learning_rate=1e-2)

        seeds = itertools.count()

        def play(games: int) -> float:
            """The share of the right answer."""
            right = 0
            for _ in range(games):
                trajectory = model.start_trajectory("coin")
                answer = model.chat.completions.create(messages=ASK, max_tokens=3, seed=next(seeds))
                reward = float(answer.choices[0].message.content == "yes")
                right += model.end_trajectory(trajectory, reward=reward).reward == 1.0
            return right / games

        assert play(16) < 0.9
        for _ in range(12):
            model.train()
            play(16)
        assert play(64) > 0.9


def test_a_model_that_was_trained_goes_on_from_its_last_checkpoint(base_model: str, tmp_path: Path) -> None:
    def answer(model: TrainableModel) -> tuple[float | None, ...]:
        trajectory = model.start_trajectory()
        model.chat.completions.create(messages=ASK, max_tokens=4, temperature=0)
        (step,) = model.end_trajectory(trajectory, failure="only looking").steps
        assert step.tokens is not None
        return step.tokens.logprobs

    with serve(make(base_model, learning_rate=1e-2), tmp_path) as model:
        untrained = answer(model)
        collect(model, [0.0, 1.0, 0.0, 1.0])
        model.train()
        trained = answer(model)
    with serve(make(base_model, learning_rate=1e-2), tmp_path) as again:
        assert again.current_version().number == 1
        assert answer(again) == pytest.approx(trained, abs=1e-4)
        assert answer(again) != pytest.approx(untrained, abs=1e-4)


def test_what_was_recorded_outlives_the_model(base_model: str, tmp_path: Path) -> None:
    with serve(make(base_model), tmp_path) as model:
        (trajectory,) = collect(model, [1.0])
    with Store.open("p", tmp_path) as store:
        assert store.trajectory(trajectory.id) == trajectory


def test_a_supervised_start_raises_the_likelihood_of_the_given_answers(model: TrainableModel) -> None:
    told = [[*ASK, {"role": "assistant", "content": "yes"}]]
    first = model.sft(told, steps=1, batch_size=1, learning_rate=1e-2).metrics["loss"]
    last = model.sft(told, steps=10, batch_size=1, learning_rate=1e-2).metrics["loss"]
    assert last < first
    assert model.current_version().number == 2


# -- wrong input: named, with the way out, and nothing lost ------------------------------------------


def test_an_unknown_base_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_model='no/such-model'.*neither a directory.*nor a hub name"):
        serve(make("no/such-model"), tmp_path)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1", True])
def test_a_reward_that_is_no_finite_number_leaves_the_trajectory_open(
    model: TrainableModel, reward: float | None
) -> None:
    trajectory = model.start_trajectory()
    model.chat.completions.create(messages=ASK, max_tokens=1)
    with pytest.raises(RewardError, match=trajectory):
        model.end_trajectory(trajectory, reward)
    assert len(model.end_trajectory(trajectory, reward=0.5).steps) == 1


def test_groups_without_rewards_are_refused_by_id(model: TrainableModel) -> None:
    (scored,) = collect(model, [1.0])
    unscored = Trajectory(id="t-unscored", scenario=scored.scenario)
    with pytest.raises(RewardError, match=r"1 trajectories have no reward.*t-unscored.*with_reward"):
        model.train([TrajectoryGroup(scored.scenario, (scored, unscored))])


def test_a_failed_trajectory_has_no_reward_and_is_not_trained(model: TrainableModel) -> None:
    """C33."""
    collect(model, [0.0, 1.0])
    trajectory = model.start_trajectory()
    model.chat.completions.create(messages=ASK, max_tokens=1)
    failed = model.end_trajectory(trajectory, failure="the tool broke")
    assert failed.reward is None
    report = model.train()
    assert report.metrics["trajectories_failed"] == 1
    assert report.metrics["reward_mean"] == 0.5


def test_unknown_and_ended_trajectories_are_told_apart(model: TrainableModel) -> None:
    with pytest.raises(UnknownTrajectoryError, match="started no trajectory 't-nowhere'"):
        model.end_trajectory("t-nowhere", reward=1.0)
    (ended,) = collect(model, [1.0])
    with pytest.raises(UnknownTrajectoryError, match="has ended already"):
        model.end_trajectory(ended.id, reward=1.0)
    with pytest.raises(UnknownTrajectoryError, match="has ended already"):
        model.chat.completions.create(trajectory_id=ended.id, messages=ASK)


def test_training_with_nothing_collected_says_what_to_do(model: TrainableModel) -> None:
    with pytest.raises(NothingToTrainError, match=r"end_trajectory\(id, reward=\.\.\.\)"):
        model.train()


def test_what_was_collected_stays_when_training_fails(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from art_core.training import checkpoints

    collect(model, [0.0, 1.0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            model.train()
    assert model.current_version().number == 0
    assert model.train().metrics["trajectories"] == 2


def test_a_trajectory_longer_than_rollout_length_is_stopped(base_model: str, tmp_path: Path) -> None:
    with serve(make(base_model, rollout_length=2), tmp_path) as model:
        trajectory = model.start_trajectory()
        for _ in range(2):
            model.chat.completions.create(messages=ASK, max_tokens=1)
        with pytest.raises(RolloutTooLongError, match="rollout_length"):
            model.chat.completions.create(messages=ASK, max_tokens=1)
        assert len(model.get_trajectory(trajectory).steps) == 2


def test_a_port_in_use_is_named(base_model: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=str(port)):
            serve(make(base_model), tmp_path, port=port)


def test_the_store_of_another_project_is_refused(base_model: str, tmp_path: Path) -> None:
    with Store.open("other", tmp_path):
        pass
    (tmp_path / "other.db").rename(tmp_path / "p.db")
    with pytest.raises(StoreError, match="other"):
        serve(make(base_model), tmp_path)


def test_messages_that_the_template_refuses_are_a_400_and_a_failed_step(model: TrainableModel) -> None:
    trajectory = model.start_trajectory()
    late_system = [*ASK, {"role": "system", "content": "be brief"}]
    with pytest.raises(BadRequestError, match="a system message must come first"):
        model.chat.completions.create(messages=late_system, max_tokens=1)
    (step,) = model.get_trajectory(trajectory).steps
    assert step.error is not None
    assert not step.trainable


def test_another_lora_shape_than_the_checkpoint_has_is_refused(base_model: str, tmp_path: Path) -> None:
    with serve(make(base_model), tmp_path) as model:
        collect(model, [0.0, 1.0])
        model.train()
    with pytest.raises(CheckpointError, match="rank"):
        serve(make(base_model, lora_rank=8), tmp_path)


def test_settings_are_checked_before_any_work() -> None:
    with pytest.raises(ConfigError, match="lerning_rate: no such setting"):
        TrainableModel(base_model="m", lerning_rate=1e-5)
    with pytest.raises(ConfigError, match="keep_checkpoints=1"):
        LocalBackend(keep_checkpoints=1)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LocalBackend(gpu_memory_utilization=2.0)


def test_a_model_that_is_not_registered_says_so() -> None:
    with pytest.raises(ConfigError, match=r"not registered; call register\(LocalBackend\(\)\)"):
        TrainableModel(base_model="m").start_trajectory()
