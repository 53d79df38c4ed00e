"""Agents that talk, and a sink that remembers what it was told."""

import asyncio
import time

from art_core.recording import NullSink, current_rollout, new_id
from art_core.types import PolicyVersion, Scenario, Step

POLICY = PolicyVersion("agent", 0)
THREE = [Scenario("a"), Scenario("b"), Scenario("c")]


def say(text: str = "hi", **changes) -> None:
    """Record a call of the policy into the current rollout."""
    rollout = current_rollout()
    assert rollout is not None
    default = {
        "messages": ({"role": "user", "content": text},),
        "response": {"role": "assistant", "content": text},
        "model": "agent@0",
        "policy": POLICY,
        "started_at": time.time(),
        "duration": 0.0,
    }
    rollout.record(Step(id=new_id("s"), rollout_id=rollout.id, **{**default, **changes}))


async def talk(scenario: Scenario) -> str:
    await asyncio.sleep(0)
    say(scenario.id)
    return f"done {scenario.id}"


class Log(NullSink):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: dict[str, tuple[str, str | None]] = {}

    def begin(self, trajectory):
        self.begun.append(trajectory.id)
        return super().begin(trajectory)

    def end(self, trajectory):
        self.ended[trajectory.id] = (trajectory.status, trajectory.failure and trajectory.failure.cause)
        return super().end(trajectory)
