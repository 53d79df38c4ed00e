"""Checkpoints on a tiny random model in float32."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import group, same, step, trajectory, weights

from art_core.config import GuardrailConfig, LoRAConfig, RetentionConfig, TrainConfig
from art_core.errors import CheckpointError
from art_core.training import checkpoints, written_whole
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.types import TrajectoryGroup

CONFIG = TrainConfig(
    learning_rate=1e-2,
    groups_per_update=1,
    warmup_updates=3,
    total_updates=9,
    weight_decay=0.1,
    guardrails=GuardrailConfig(max_kl=None),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def new_trainer(model: Path, *, seed: int = 0, rank: int = 4) -> Trainer:
    policy = PeftPolicy.load(str(model), LoRAConfig(rank=rank, alpha=8), dtype="float32", seed=seed)
    return Trainer(policy, CONFIG, seed=seed)


def groups(dice: random.Random) -> list[TrajectoryGroup]:
    """Two groups that depend on a random generator, as a real run's would."""
    return [
        group(
            *(
                trajectory(f"{g}-{i}", dice.random(), step(f"{g}-{i}", [5, 6 + g], [dice.randint(8, 40), 2]))
                for i in range(4)
            ),
            scenario=f"s{g}",
        )
        for g in range(2)
    ]


def steps(trainer: Trainer, count: int) -> None:
    """Training steps that draw from every random generator that a run may use."""
    for _ in range(count):
        batch = groups(random.Random(random.random() + float(np.random.rand()) + float(torch.rand(()))))
        trainer.train(batch)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(model: Path, tmp_path: Path):
    """C50"""
    seed_everything(1)
    straight = new_trainer(model)
    straight.sft([[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]], steps=2)
    steps(straight, 2)
    written = checkpoints.save(tmp_path, straight, version=2, state={"next": 7})
    steps(straight, 2)

    seed_everything(99)
    resumed = new_trainer(model, seed=5)
    found = checkpoints.latest(tmp_path)
    assert found == written.directory
    loaded = checkpoints.load(found, resumed)
    assert loaded == written
    assert loaded.state == {"next": 7}
    assert resumed.optimizer.updates == 4
    steps(resumed, 2)
    assert same(weights(straight.policy), weights(resumed.policy))
    mine, theirs = straight.state_dict(), resumed.state_dict()
    for kind in ("optimizer", "sft_optimizer"):
        assert mine[kind]["updates"] == theirs[kind]["updates"]
        for a, b in zip(
            mine[kind]["adamw"]["state"].values(), theirs[kind]["adamw"]["state"].values(), strict=True
        ):
            assert same(list(a.values()), list(b.values()))


def test_killed_while_writing_the_earlier_checkpoint_is_the_latest_and_the_next_one_cleans_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """C50"""
    trainer = new_trainer(model)
    first = checkpoints.save(tmp_path, trainer, version=1)
    killed = os.fork()
    if killed == 0:  # the child dies as ``kill -9`` would have it, with files written and nothing renamed

        def die(path: Path) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            monkeypatch.setattr(written_whole, "sync", die)
            checkpoints.save(tmp_path, trainer, version=2)
        finally:
            os._exit(1)
    _, status = os.waitpid(killed, 0)
    assert os.WIFSIGNALED(status)
    leftovers = list(tmp_path.glob(".writing-*"))
    assert len(leftovers) == 1
    assert (leftovers[0] / checkpoints.TRAINING_STATE).exists()
    assert checkpoints.list_checkpoints(tmp_path) == [first.directory]
    checkpoints.load(first.directory, new_trainer(model))
    second = checkpoints.save(tmp_path, trainer, version=2)
    assert checkpoints.latest(tmp_path) == second.directory
    assert not list(tmp_path.glob(".writing-*"))


def test_a_run_that_is_killed_at_twenty_points_ends_with_the_weights_of_one_that_was_not(
    model: Path, tmp_path: Path
):
    """C50"""
    script = Path(__file__).parents[1] / "helpers" / "killable_run.py"
    paths = os.pathsep.join([str(script.parents[1]), str(script.parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name, kills in (("straight", 0), ("killed", 20)):
        ran = subprocess.run(
            [sys.executable, script, model, tmp_path / name, str(kills)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert ran.returncode == 0, ran.stderr
        assert len(ran.stdout.split()) == kills
    straight, killed = (checkpoints.latest(tmp_path / name) for name in ("straight", "killed"))
    assert straight is not None
    assert killed is not None
    assert straight.name == killed.name
    one, other = new_trainer(model), new_trainer(model)
    checkpoints.load(straight, one)
    checkpoints.load(killed, other)
    assert same(weights(one.policy), weights(other.policy))
    assert one.guardrails.state_dict() == other.guardrails.state_dict()
    assert not list((tmp_path / "killed").glob(".writing-*"))


def test_a_full_disk_is_said_and_costs_nothing_that_was_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = new_trainer(model)
    first = checkpoints.save(tmp_path, trainer, version=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(trainer.policy, "save_weights", full)
        with pytest.raises(CheckpointError, match=r"checkpoint-00000002: .*No space left"):
            checkpoints.save(tmp_path, trainer, version=2)
    assert [p.name for p in tmp_path.iterdir()] == [first.directory.name]
    checkpoints.save(tmp_path, trainer, version=2)


@pytest.mark.parametrize("most", [500, 20_000], ids=["for the adapter", "for the optimizer's state"])
def test_a_disk_that_takes_no_more_is_said_whichever_library_finds_it(model: Path, tmp_path: Path, most: int):
    trainer = new_trainer(model)
    steps(trainer, 1)
    first = checkpoints.save(tmp_path / "run", trainer, version=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))  # refused in the middle of a file
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-00000002: .*Earlier checkpoints"):
            checkpoints.save(tmp_path / "run", trainer, version=2)
        with pytest.raises(CheckpointError, match="cannot copy"):
            checkpoints.fork(first.directory, tmp_path / "fork")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "run").iterdir()] == [first.directory.name]
    assert not list((tmp_path / "fork").iterdir())
    checkpoints.save(tmp_path / "run", trainer, version=2)


@pytest.mark.parametrize("name", ["checkpoint.json", "training.pt", "adapter/adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "flipped bit"])
def test_damage_is_found_and_named_before_anything_is_loaded(
    model: Path, tmp_path: Path, name: str, damage: str
):
    trainer = new_trainer(model)
    directory = checkpoints.save(tmp_path, trainer, version=1).directory
    file = directory / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[0] ^= 1
        file.write_bytes(content)
    other = new_trainer(model, seed=3)
    before = weights(other.policy)
    with pytest.raises(CheckpointError, match=Path(name).name):
        checkpoints.load(directory, other)
    assert same(weights(other.policy), before)


def test_another_base_model_is_refused(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path / "run", new_trainer(model), version=1).directory
    other = tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="whose weights are not those of"):
        checkpoints.load(directory, new_trainer(other))


def test_a_base_model_that_was_moved_is_the_same_model(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path / "run", new_trainer(model), version=1).directory
    moved = shutil.copytree(model, tmp_path / "moved")
    checkpoints.load(directory, new_trainer(moved))


def test_another_lora_shape_is_refused_by_its_setting(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path, new_trainer(model), version=1).directory
    with pytest.raises(CheckpointError, match="rank is 4 there, 8 here"):
        checkpoints.load(directory, new_trainer(model, rank=8))


def test_a_newer_format_is_refused(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path, new_trainer(model), version=1).directory
    manifest = json.loads((directory / "checkpoint.json").read_text())
    (directory / "checkpoint.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 2"):
        checkpoints.load(directory, new_trainer(model))


def test_a_manifest_that_is_not_what_was_written_is_refused(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path, new_trainer(model), version=1).directory
    manifest = json.loads((directory / "checkpoint.json").read_text())
    (directory / "checkpoint.json").write_text(json.dumps({**manifest, "version": 3}))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        checkpoints.load(directory, new_trainer(model))


def test_a_file_of_another_size_is_refused_by_its_size(model: Path, tmp_path: Path):
    directory = checkpoints.save(tmp_path, new_trainer(model), version=1).directory
    with (directory / "training.pt").open("ab") as out:
        out.write(b"x")
    with pytest.raises(CheckpointError, match=r"training\.pt is damaged: it has \d+ bytes"):
        checkpoints.load(directory, new_trainer(model))


def test_a_fork_is_a_run_of_its_own_that_goes_on_from_the_same_place(model: Path, tmp_path: Path):
    seed_everything(1)
    trainer = new_trainer(model)
    steps(trainer, 1)
    saved = checkpoints.save(tmp_path / "a", trainer, version=1, state={"next": 7})
    copy = checkpoints.fork(saved.directory, tmp_path / "b")
    steps(trainer, 1)
    other = new_trainer(model, seed=5)
    loaded = checkpoints.load(copy, other)
    assert (loaded.version, loaded.state) == (1, {"next": 7})
    steps(other, 1)
    assert same(weights(other.policy), weights(trainer.policy))
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        checkpoints.fork(saved.directory, tmp_path / "b")
    (saved.directory / "training.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.fork(saved.directory, tmp_path / "c")
    assert checkpoints.list_checkpoints(tmp_path / "c") == []


def test_a_version_is_written_once_and_its_state_must_be_json(model: Path, tmp_path: Path):
    trainer = new_trainer(model)
    checkpoints.save(tmp_path, trainer, version=1)
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save(tmp_path, trainer, version=1)
    with pytest.raises(CheckpointError, match="not JSON"):
        checkpoints.save(tmp_path, trainer, version=2, state={"what": object()})


def test_checkpoints_are_listed_by_number_and_strangers_are_ignored(model: Path, tmp_path: Path):
    trainer = new_trainer(model)
    assert checkpoints.latest(tmp_path / "nowhere") is None
    for version in (2, 10, 1):
        checkpoints.save(tmp_path, trainer, version=version)
    (tmp_path / "checkpoint-notes").mkdir()
    listed = [p.name for p in checkpoints.list_checkpoints(tmp_path)]
    assert listed == ["checkpoint-00000001", "checkpoint-00000002", "checkpoint-00000010"]


def test_the_adapter_is_an_ordinary_peft_directory(model: Path, tmp_path: Path):
    trainer = new_trainer(model)
    steps(trainer, 1)
    kept = checkpoints.save(tmp_path, trainer, version=1)
    other = new_trainer(model, seed=4)
    other.policy.load_weights(kept.weights_dir)
    assert same(weights(other.policy), weights(trainer.policy))


def test_a_checkpoint_that_cannot_be_deleted_is_said_and_costs_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    trainer = new_trainer(model)
    first, second, *kept = [checkpoints.save(tmp_path, trainer, version=n).directory for n in range(1, 5)]
    delete = shutil.rmtree

    def refuse(path: Path, **how: object) -> None:
        if path.name.endswith(first.name):
            raise OSError(16, "Device or resource busy")
        delete(path, **how)

    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", refuse)
        assert checkpoints.prune(tmp_path, RetentionConfig(last=2)) == [first, second]
    assert "cannot be deleted: [Errno 16]" in caplog.text
    assert checkpoints.list_checkpoints(tmp_path) == kept
