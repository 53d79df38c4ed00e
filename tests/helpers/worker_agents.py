"""Agents for worker processes, without a framework, so that a process starts quickly."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_core.recording import current_rollout, new_id
from art_core.types import PolicyVersion, Scenario, Step, Trajectory


async def say(text: str) -> None:
    """Record a call of the policy; returns once it is stored."""
    rollout = current_rollout()
    assert rollout is not None
    await rollout.arecord(
        Step(
            id=new_id("s"),
            rollout_id=rollout.id,
            messages=({"role": "user", "content": text},),
            response={"role": "assistant", "content": text},
            model="agent@0",
            policy=PolicyVersion("agent", 0),
            started_at=time.time(),
            duration=0.0,
        )
    )


async def act(scenario: Scenario) -> int:
    """What the scenario's id says: ``die``, ``end and die``, ``wait``, ``raise`` ..., or just talk."""
    await say(scenario.id)
    match scenario.id:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "end and die":
            rollout = current_rollout()
            assert rollout is not None
            await rollout.afinish(0.25)
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            await asyncio.Event().wait()
        case "leave a child and die":
            child = subprocess.Popen(["sleep", "60"], close_fds=False)
            Path(scenario.inputs["pid"]).write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang in a thread":
            Path(scenario.inputs["pid"]).write_text(str(os.getpid()))
            await asyncio.to_thread(time.sleep, 3600)
        case "block":
            Path(scenario.inputs["blocks"]).touch()
            while not Path(scenario.inputs["until"]).exists():
                time.sleep(0.01)
        case "raise":
            raise RuntimeError("the tool broke")
        case "object":
            rollout = current_rollout()
            assert rollout is not None
            rollout.metadata["object"] = lambda: None
        case "odd error":
            rollout = current_rollout()
            assert rollout is not None
            rollout.metadata["error"] = OddError("no", status=418)
        case _:
            pass
    return os.getpid()


def make(problem: str = "") -> Callable[[Scenario], Any]:
    """The agent; or the problem, raised."""
    if problem:
        raise ValueError(problem)
    return act


class OddError(Exception):
    """Pickled, and not unpickled, as errors of HTTP clients often are."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def make_once_there(path: Path) -> Callable[[Scenario], Any]:
    """The agent, once a file is there."""
    while not path.exists():
        time.sleep(0.01)
    return act


_built = 0


def make_counted() -> Callable[[Scenario], Any]:
    """An agent that gives its process's id, and how many agents had been made there when it was."""
    global _built
    _built += 1
    number = _built

    async def counted(scenario: Scenario) -> tuple[int, int]:
        return await act(scenario), number

    return counted


def half(trajectory: Trajectory, output: int) -> float:
    return 0.5
