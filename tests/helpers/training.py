"""Samples, steps, trajectories and groups for tests of training, in one line each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from art_core.training.memory import TokenBudget
from art_core.training.policy import Policy
from art_core.training.ranks import Alone
from art_core.training.samples import Sample
from art_core.training.update import Passes
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)


def sample(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    advantage: float = 1.0,
    logprobs: Sequence[float | None] | None = None,
    step: str = "s",
    rollout: str = "r",
    temperature: float = 1.0,
) -> Sample:
    """A sample; unknown log-probabilities are -1."""
    given = tuple(logprobs) if logprobs is not None else (-1.0,) * len(completion)
    return Sample(tuple(prompt), tuple(completion), given, advantage, step, rollout, temperature)


def step(
    name: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    logprobs: Sequence[float | None] | None = None,
    node: str | None = None,
    namespace: str = "",
    attempt: int = 1,
    untrainable: str | None = None,
    version: int = 0,
    sampling: Mapping[str, Any] | None = None,
) -> Step:
    """A step of a version of the policy ``m``."""
    given = tuple(logprobs) if logprobs is not None else (-1.0,) * len(completion)
    return Step(
        id=name,
        rollout_id="",
        messages=(),
        model=f"m@{version}",
        started_at=0.0,
        duration=0.0,
        tokens=StepTokens(tuple(prompt), tuple(completion), given),
        policy=PolicyVersion("m", version),
        identity=StepIdentity(node=node, namespace=namespace, attempt=attempt),
        untrainable=untrainable,
        sampling=sampling or {},
    )


def trajectory(name: str, reward: float | None, *steps: Step) -> Trajectory:
    """A finished trajectory."""
    return Trajectory(
        id=name, scenario=Scenario("s"), status=RolloutStatus.FINISHED, reward=reward, steps=steps
    )


def failed(name: str, *steps: Step) -> Trajectory:
    """A trajectory that timed out."""
    return Trajectory(
        id=name,
        scenario=Scenario("s"),
        status=RolloutStatus.FAILED,
        failure=Failure("timeout", "took too long"),
        steps=steps,
    )


def group(*trajectories: Trajectory, scenario: str = "s") -> TrajectoryGroup:
    """A group of them."""
    return TrajectoryGroup(Scenario(scenario), trajectories)


def weights(policy: object) -> list[torch.Tensor]:
    """A copy of what a policy's optimizer updates."""
    return [p.detach().clone() for p in policy.trainable_parameters()]  # type: ignore[attr-defined]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two copies are equal to the last bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def passes(policy: Policy, token_budget: int = 1024) -> Passes:
    """Passes of one process alone."""
    budget = TokenBudget(token_budget, Alone(), policy.trainable_parameters())
    return Passes(policy, budget, Alone(), advance=lambda: None)
