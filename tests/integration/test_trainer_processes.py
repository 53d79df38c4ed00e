"""Trainer processes as processes: how they begin, are asked, fail and end; a tiny random model in float32."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import LORA, set_fault, tiny_policy
from helpers.tiny import tiny_model
from helpers.trainer_processes import CONFIG, SAID, adapter, assert_ended, groups

from art_core.backends.local import LocalBackend
from art_core.config import ParallelConfig
from art_core.errors import (
    ConfigError,
    NothingToTrainError,
    TrainerProcessError,
)
from art_core.inference.process_guard import signal_group
from art_core.model import TrainableModel
from art_core.training import checkpoints, rank_process
from art_core.training.launch import TrainerProcesses
from art_core.training.rank_process import rank_environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_call_that_its_caller_gave_up_is_not_answered_to_the_next_one(model: Path, tmp_path: Path):
    """Whatever error he gave it up with, ours too."""

    def enough(done: int, total: int) -> None:
        raise NothingToTrainError("enough")

    build = tiny_policy(model, tmp_path / "faults")
    alone = TrainerProcesses(build, LORA, CONFIG, ParallelConfig(), log_dir=tmp_path)
    try:
        with pytest.raises(NothingToTrainError, match="enough"):
            alone.train(groups(0), progress=enough)
        assert_ended(alone)
    finally:
        alone.close()


def test_a_process_that_takes_no_message_is_not_waited_for_for_ever(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rank_process, "SEND_TIMEOUT", 1.0)
    build = tiny_policy(model, tmp_path / "faults")
    alone = TrainerProcesses(build, LORA, CONFIG, ParallelConfig(), log_dir=tmp_path)
    try:
        os.kill(alone.pids[0], signal.SIGSTOP)
        awake = threading.Timer(20, os.kill, (alone.pids[0], signal.SIGCONT))
        awake.start()
        with pytest.raises(TrainerProcessError, match=r"rank 0 .* took no message in 1 s"):
            alone.stop("x" * 5_000_000)
        awake.cancel()
        assert_ended(alone)
    finally:
        alone.close()


def test_what_a_process_raised_is_told_though_another_one_dies_after_it(model: Path, tmp_path: Path):
    build = tiny_policy(model, tmp_path / "faults")
    parallel = ParallelConfig(processes=2, timeout=25)
    together = TrainerProcesses(build, LORA, CONFIG, parallel, log_dir=tmp_path)
    try:
        set_fault(tmp_path / "faults", rank=1, message="the cause of it all")
        log = tmp_path / "trainer" / "rank-1.log"

        def kill_the_other() -> None:
            while "the cause of it all" not in log.read_text():
                time.sleep(0.05)
            signal_group(together.pids[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_the_other)
        killer.start()
        with pytest.raises(TrainerProcessError, match=r"rank 0 .*SIGKILL") as failed:
            together.train(groups(0))
        killer.join()
        assert "the cause of it all" in str(failed.value)
    finally:
        together.close()


async def test_a_killed_process_ends_training_and_the_run_goes_on_from_its_checkpoint(
    model: Path, tmp_path: Path
):
    settings = {"base_model": str(model), "project": "p", "name": "m", "train": CONFIG}
    parallel = ParallelConfig(processes=2, timeout=60)
    learner = TrainableModel(**settings)
    await learner.aregister(LocalBackend(root=tmp_path, kind="embedded", dtype="float32", parallel=parallel))
    async with learner:
        assert (await learner.asft(SAID, steps=2)).updated
        assert learner.endpoint.current_version().number == 1
        answer = await learner.chat.completions.acreate(
            model=learner.name, messages=[{"role": "user", "content": "hello"}], max_tokens=2
        )
        assert answer.choices[0].message is not None
        trainer = learner._registered._trainer  # type: ignore[attr-defined]
        signal_group(trainer.pids[1], signal.SIGKILL)
        with pytest.raises(TrainerProcessError, match=r"rank 1 .* was ended by SIGKILL"):
            await learner.asft(SAID, steps=2)
        assert_ended(trainer)
        assert learner.endpoint.current_version().number == 1
    resumed = TrainableModel(**settings)
    await resumed.aregister(LocalBackend(root=tmp_path, kind="embedded", dtype="float32"))
    async with resumed:
        assert resumed.endpoint.current_version().number == 1
        assert (await resumed.asft(SAID, steps=2)).updated


def test_a_model_that_cannot_be_loaded_is_said_as_without_processes(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TrainerProcesses(
            tiny_policy(tmp_path / "nowhere", tmp_path / "faults"),
            LORA,
            CONFIG,
            ParallelConfig(),
            log_dir=tmp_path,
        )


def test_devices_are_counted_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_process.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = rank_environment(ParallelConfig(processes=2, devices=(1, 3)))
    assert found["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert found["NCCL_NVLS_ENABLE"] == "0"
    with pytest.raises(ConfigError, match=r"8 trainer processes need GPUs .* 4 are visible"):
        rank_environment(ParallelConfig(processes=8))
    with pytest.raises(ConfigError, match="as many different devices"):
        ParallelConfig(processes=2, devices=(1,))


def test_a_resumed_process_drops_what_the_uninterrupted_one_does(model: Path, tmp_path: Path):
    """C50: the process's own random generator is in no checkpoint."""
    lora = LORA.model_copy(update={"dropout": 0.5})
    build = tiny_policy(model, tmp_path / "faults", lora=lora)
    found: list[dict[str, torch.Tensor]] = []
    for name in ("straight", "resumed"):
        alone = TrainerProcesses(build, lora, CONFIG, ParallelConfig(), log_dir=tmp_path / name)
        try:
            if name == "straight":
                alone.sft(SAID, steps=2)
                written = checkpoints.save(tmp_path, alone, version=1)
            else:
                checkpoints.load(written.directory, alone)
            alone.sft(SAID, steps=2)
            found.append(adapter(alone, tmp_path / name / "adapter"))
        finally:
            alone.close()
    for key, weight in found[0].items():
        assert torch.equal(weight, found[1][key]), key


def test_processes_find_their_parent_under_a_long_temporary_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A socket's path has 107 characters at the most."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    alone = TrainerProcesses(
        tiny_policy(model, tmp_path / "faults"), LORA, CONFIG, ParallelConfig(), log_dir=tmp_path
    )
    alone.close()
    assert not list(long.iterdir())
