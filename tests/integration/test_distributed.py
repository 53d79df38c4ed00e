"""One update of two trainer processes on gloo is that of one; a tiny random model in float32."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import LORA, set_fault, tiny_policy
from helpers.tiny import tiny_model
from helpers.trainer_processes import CONFIG, SAID, adapter, assert_ended, groups

from art_core.config import LossName, ParallelConfig, Strategy, TrainConfig
from art_core.errors import (
    CheckpointError,
    NothingToTrainError,
    TrainerProcessError,
    TrainingStoppedError,
)
from art_core.training import checkpoints
from art_core.training.forward import Kernels
from art_core.training.grpo import Trainer
from art_core.training.launch import TrainerProcesses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


class Ranks:
    """Processes, and how to make them fail."""

    def __init__(self, model: Path, strategy: Strategy, kernels: Kernels, root: Path) -> None:
        self.strategy = strategy
        self.faults = root / "faults.json"
        self.build = tiny_policy(model, self.faults, kernels)
        parallel = ParallelConfig(processes=2, strategy=strategy, timeout=25)
        self.processes = TrainerProcesses(self.build, LORA, CONFIG, parallel, log_dir=root)
        checkpoints.save(root, self.processes, version=0)
        self.first = root / "checkpoint-00000000"

    def fresh(self, config: TrainConfig = CONFIG) -> TrainerProcesses:
        """The processes as they began, under another configuration."""
        self.faults.unlink(missing_ok=True)
        checkpoints.load(self.first, self.processes)
        self.processes.set_config(config)
        return self.processes


@pytest.fixture(
    scope="module",
    params=[("ddp", "modules"), ("fsdp2", "modules"), ("fsdp2", "fused")],
    ids=["ddp", "fsdp2", "fsdp2 with fused kernels"],
)
def ranks(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Ranks]:
    found = Ranks(model, *request.param, tmp_path_factory.mktemp("ranks"))
    yield found
    found.processes.close()


def assert_equal(ours: Trainer | TrainerProcesses, theirs: Trainer, directory: Path) -> None:
    """Weights, and the optimizer's moments, which are sums of gradients, are the same to 1e-5."""
    mine, reference = adapter(ours, directory / "ours"), adapter(theirs, directory / "theirs")
    assert mine.keys() == reference.keys()
    for name, weight in reference.items():
        torch.testing.assert_close(mine[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    moments = ours.state_dict()["optimizer"]["adamw"]["state"]
    for at, moment in theirs.state_dict()["optimizer"]["adamw"]["state"].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments[at][kind], moment[kind], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_two_processes_make_the_gradients_and_weights_of_one(ranks: Ranks, tmp_path: Path, loss: LossName):
    config = CONFIG.replace(loss=loss, mismatch_level="sequence")
    alone = Trainer(ranks.build("cpu"), config)
    together = ranks.fresh(config)
    done: list[tuple[int, int]] = []
    for seed in range(2):
        expected = alone.train(groups(seed))
        found = together.train(groups(seed), progress=lambda *at: done.append(at))
        assert found.metrics["updates"] == expected.metrics["updates"] == 4
        for name, value in expected.metrics.items():
            if name != "seconds":
                assert found.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert_equal(together, alone, tmp_path)
    assert done[-1][0] == done[-1][1]


@pytest.mark.parametrize("checkpointing", [False, "auto"], ids=["all kept", "auto"])
def test_the_very_first_gradient_is_one_process_s(ranks: Ranks, tmp_path: Path, checkpointing: Any):
    """AdamW's first moment after one step is a tenth of the gradient.

    By default (``auto``) a sharded model keeps the layers' inputs alone.
    """
    config = CONFIG.replace(epochs=1, groups_per_update=None, kl_coef=0.0)
    alone = Trainer(ranks.build("cpu"), config)
    together = ranks.fresh(config.replace(gradient_checkpointing=checkpointing))
    alone.train(groups(7))
    together.train(groups(7))
    theirs = together.state_dict()["optimizer"]["adamw"]["state"]
    largest = 0.0
    for at, moments in alone.state_dict()["optimizer"]["adamw"]["state"].items():
        gradient = 10 * moments["exp_avg"]
        largest = max(largest, float(gradient.abs().max()))
        torch.testing.assert_close(10 * theirs[at]["exp_avg"], gradient, atol=1e-5, rtol=1e-5)
    assert largest > 1e-3


def test_a_sharded_model_lies_half_on_each_process(ranks: Ranks):
    known = ranks.processes.description
    if ranks.strategy == "ddp":
        assert known.held == known.parameters
    else:
        # Embedding, last norm and adapter stay whole; the decoder layers are what is halved.
        assert known.held < 0.75 * known.parameters


def test_a_tree_that_is_one_path_leaves_a_process_with_padding_alone(ranks: Ranks, tmp_path: Path):
    config = CONFIG.replace(epochs=1, groups_per_update=None)
    alone, together = Trainer(ranks.build("cpu"), config), ranks.fresh(config)
    expected = alone.sft(SAID, steps=3, learning_rate=1e-2)
    found = together.sft(SAID, steps=3, learning_rate=1e-2)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    mine, reference = adapter(together, tmp_path / "ours"), adapter(alone, tmp_path / "theirs")
    for name, weight in reference.items():
        torch.testing.assert_close(mine[name], weight, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_of_two_processes_is_one_process_s(ranks: Ranks, tmp_path: Path):
    """C50: written by two, resumed by one, and the other way round."""
    together = ranks.fresh()
    together.train(groups(1))
    written = checkpoints.save(tmp_path / "run", together, version=1, state={"next": 3})
    together.train(groups(2))

    alone = Trainer(ranks.build("cpu"), CONFIG)
    assert checkpoints.load(written.directory, alone).state == {"next": 3}
    alone.train(groups(2))
    assert_equal(together, alone, tmp_path)

    again = checkpoints.save(tmp_path / "other", alone, version=2)
    alone.train(groups(3))
    checkpoints.load(again.directory, together)
    together.train(groups(3))
    assert_equal(together, alone, tmp_path)


def test_a_choice_of_steps_may_be_any_function(ranks: Ranks, tmp_path: Path):
    wanted = "even"
    alone, together = Trainer(ranks.build("cpu"), CONFIG), ranks.fresh()
    expected = alone.train(groups(4), train=lambda s: s.identity.node == wanted)
    found = together.train(groups(4), train=lambda s: s.identity.node == wanted)
    assert found.left_out == expected.left_out
    assert_equal(together, alone, tmp_path)


def test_an_error_that_all_processes_make_is_raised_as_it_is_and_they_go_on(ranks: Ranks):
    together = ranks.fresh()
    with pytest.raises(NothingToTrainError, match="no trajectories were given"):
        together.train([])
    assert together.train(groups(0)).updated


def test_a_full_disk_costs_processes_the_checkpoint_alone(ranks: Ranks, tmp_path: Path):
    together = ranks.fresh()
    together.train(groups(1))
    (tmp_path / "file").touch()
    for write in (together.policy.save_weights, lambda path: together.save_state(path, {})):
        with pytest.raises(CheckpointError, match="file"):
            write(tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="Earlier checkpoints are untouched"):
        checkpoints.save(tmp_path / "file", together, version=1)
    checkpoints.save(tmp_path / "run", together, version=1)
    assert together.train(groups(2)).updated


def test_what_guardrails_are_told_reaches_all_processes(ranks: Ranks):
    together = ranks.fresh()
    together.train(groups(5))
    assert together.state_dict()["guardrails"]["best_reward"] is not None
    together.forget_rewards()
    assert together.state_dict()["guardrails"]["best_reward"] is None
    assert together.stop("somebody said so").kind == "training_stopped"
    with pytest.raises(TrainingStoppedError, match="somebody said so"):
        together.train(groups(5))
    together.resume()
    assert together.train(groups(5)).updated


def test_when_one_process_runs_out_of_memory_all_lower_the_budget_or_all_end(ranks: Ranks, tmp_path: Path):
    together = ranks.fresh()
    set_fault(ranks.faults, rank=1, most_tokens=30)
    if ranks.strategy == "fsdp2":
        # The other process waits in the middle of the same pass: nothing can be repeated.
        with pytest.raises(TrainerProcessError, match=r"token_budget below 48") as failed:
            together.train(groups(5))
        assert "OutOfMemoryError" in str(failed.value)  # with the process's own traceback
        assert_ended(together)
        return
    alone = Trainer(ranks.build("cpu"), CONFIG)
    ranks.faults.unlink()
    alone.train(groups(5))
    set_fault(ranks.faults, rank=1, most_tokens=30)
    report = together.train(groups(5))
    assert [e.kind for e in report.events] == ["token_budget_lowered"]
    assert report.events[0].value == 24
    assert_equal(together, alone, tmp_path)


def test_a_process_that_stands_still_is_not_waited_for_for_ever(ranks: Ranks):
    """Last: it ends them."""
    if ranks.strategy == "fsdp2":
        pytest.skip("they have ended in the test before; waiting is the same for both strategies")
    together = ranks.fresh()
    os.kill(together.pids[1], signal.SIGSTOP)
    with pytest.raises(TrainerProcessError, match=r"1 of 2 trainer processes failed in train"):
        together.train(groups(0))
    assert_ended(together)
