"""A training run that is killed again and again: ``python killable_run.py MODEL DIRECTORY KILLS``.

The run lives in forks of this process, which has the model loaded: each life begins within milliseconds.
It writes a checkpoint after every step, and begins from the newest one. With KILLS > 0 each life
is ended by SIGKILL at a random moment, at the latest after two checkpoints, so that steps are left for all
lives however unevenly the machine runs; the last one runs to the end.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from helpers.training import group, step, trajectory

from art_core.config import GuardrailConfig, LoRAConfig, TrainConfig
from art_core.training import checkpoints
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.types import TrajectoryGroup

STEPS = 60
MOST = 2
"""Checkpoints in a life that is to be killed."""
CONFIG = TrainConfig(
    learning_rate=1e-2,
    groups_per_update=1,
    warmup_updates=3,
    total_updates=2 * STEPS,
    entropy_target=1.0,
    guardrails=GuardrailConfig(max_kl=None),
)


def rollouts(at: int) -> list[TrajectoryGroup]:
    """Two groups that depend on the position in the data alone."""
    dice = random.Random(at)
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


def live(trainer: Trainer, directory: Path) -> None:
    """One life of the run."""
    position = 0
    last = checkpoints.latest(directory)
    if last is not None:
        position = checkpoints.load(last, trainer).state["position"]
    while position < STEPS:
        trainer.train(rollouts(position))
        position += 1
        checkpoints.save(directory, trainer, version=position, state={"position": position})


def in_a_fork(trainer: Trainer, directory: Path, seconds: float | None) -> bool:
    """A life of its own process; whether it was killed, which happens after ``seconds`` or `MOST` steps."""
    before = len(checkpoints.list_checkpoints(directory))
    child = os.fork()
    if child == 0:
        try:
            live(trainer, directory)
        except BaseException as failed:
            print(failed, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(checkpoints.list_checkpoints(directory)) < before + MOST:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a life of the run failed")
    return os.WIFSIGNALED(status)


def main(model: str, directory: Path, kills: int) -> None:
    """Print how often the run was killed, and after how many checkpoints each time."""
    policy = PeftPolicy.load(model, LoRAConfig(rank=4, alpha=8), dtype="float32")
    trainer = Trainer(policy, CONFIG)
    dice = random.Random(0)
    at: list[int] = []
    seconds = 0.2
    while len(at) < kills:
        before = len(checkpoints.list_checkpoints(directory))
        if not in_a_fork(trainer, directory, seconds * dice.uniform(0.2, 1.8)):
            raise SystemExit(f"the run ended after {len(at)} kills")
        at.append(len(checkpoints.list_checkpoints(directory)))
        # About a step and a half a life, however fast this machine is today.
        seconds *= 1.3 if at[-1] == before else 0.8 if at[-1] >= before + MOST else 1.0
    in_a_fork(trainer, directory, None)
    print(*at)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
