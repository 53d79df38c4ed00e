"""Judges for tests: what a scripted judge reads in a question, and how it may answer.

The truth is written into each run (``quality=0.73``), so a test knows what a perfect judge would say.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fakes.vllm_server import Reply
from helpers.trajectories import a_step, a_trajectory

from art_core.rewards.judge import Answer, Usage
from art_core.types import Message, Scenario, Step, Trajectory, TrajectoryGroup

Scores = list[tuple[str, float]]

QUALITIES = (0.1, 0.9, 0.5, 0.3)

RUN = re.compile(r"^<<<run (\S+) (\w+)$\n(.*?)^\2 run \1>>>$", re.MULTILINE | re.DOTALL)


def runs(messages: Sequence[Message]) -> dict[str, str]:
    """The runs of a question by id, in their order, as its first user message has them."""
    asked = next(m["content"] for m in messages if m["role"] == "user")
    return {name: text for name, _, text in RUN.findall(asked)}


def truth(messages: Sequence[Message]) -> Scores:
    """Each run's true quality, by id, in the order of the question."""
    return [(name, float(re.findall(r"quality=([\d.]+)", text)[-1])) for name, text in runs(messages).items()]


def told(scores: Sequence[tuple[Any, Any]]) -> str:
    """The answer that gives these scores."""
    return json.dumps(
        {"scores": [{"id": name, "explanation": f"run {name}", "score": score} for name, score in scores]}
    )


def a_run(name: str, *steps: Step, **changes: Any) -> Trajectory:
    """A finished, unscored run of these steps."""
    return replace(a_trajectory(name, 0, reward=None), steps=steps, **changes)


def quality_run(name: str, quality: float, **changes: Any) -> Trajectory:
    """A finished, unscored run that did something of this quality."""
    step = a_step(
        name,
        messages=({"role": "system", "content": "Do well."}, {"role": "user", "content": "Go."}),
        response={"role": "assistant", "content": f"I did it with quality={quality:.4f}"},
    )
    return a_run(name, step, **changes)


def quality_group(name: str, qualities: Sequence[float]) -> TrajectoryGroup:
    """A group of runs of these qualities."""
    members = tuple(quality_run(f"{name}-{i}", quality) for i, quality in enumerate(qualities))
    return TrajectoryGroup(Scenario("go"), members, name)


@dataclass
class FunctionJudge:
    """A judge in process: a function of the messages to an answer's text."""

    function: Callable[[Sequence[Message]], str]
    name: str = "function"
    calls: int = 0

    async def ask(self, messages: Sequence[Message], schema: Any) -> Answer:
        self.calls += 1
        return Answer(self.function(messages), Usage(1, 100, 10))


def scores(judgement: Any) -> list[float]:
    return [scored.score for scored in judgement.scores.values()]


def perfect(messages: Sequence[Message]) -> str:
    return told(truth(messages))


class Personality:
    """Judges of a scripted server: request -> reply. Counts its requests."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = kind
        self.requests = 0
        self._random = random.Random(seed)

    def __call__(self, request: dict[str, Any]) -> str | Reply:
        self.requests += 1
        scores = truth(request["messages"])
        if self.kind == "shuffling":
            self._random.shuffle(scores)
            return told([(int(name), score) for name, score in scores])
        if self.kind == "verbose":
            return f"Let me see {{first}}.\n```json\n{told(scores)}\n```\nI hope [that] helps!"
        if self.kind == "off-scale":
            return told([(name, score * 10 + 1.5) for name, score in scores])
        if self.kind == "every third fails" and self.requests % 3 == 0:
            raise LookupError("out of order")  # the server answers 500
        if self.kind == "silent":
            return ""
        return told(scores)
