"""Which steps are trained, and what each of them earned: the user's choice, as an expression.

Invariant: a step that cannot be trained is never chosen, and every step that is left out is counted
under its reason.

``Nodes("planner", "writer") & ~Tags("draft")`` reads as it works. Without a choice, every trainable
step of the policy in training is trained, except those that a later attempt superseded.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from art_core.capture import superseded
from art_core.errors import ConfigError
from art_core.types import Step, Trajectory, TrajectoryGroup

SUPERSEDED = "superseded by a later attempt"
NOT_SELECTED = "not selected for training"
OTHER_POLICY = "of another policy than the one in training"


class Selection(ABC):
    """A choice of steps; combine with ``&``, ``|`` and ``~``."""

    @abstractmethod
    def __call__(self, step: Step) -> bool:
        """Whether the step is chosen."""

    def __and__(self, other: "Selection | Predicate") -> "Selection":
        return _All(self, as_selection(other))

    def __or__(self, other: "Selection | Predicate") -> "Selection":
        return _Any(self, as_selection(other))

    def __rand__(self, other: "Predicate") -> "Selection":
        return _All(as_selection(other), self)

    def __ror__(self, other: "Predicate") -> "Selection":
        return _Any(as_selection(other), self)

    def __invert__(self) -> "Selection":
        return _Not(self)


Predicate: TypeAlias = Callable[[Step], bool]
Train: TypeAlias = Selection | Predicate | str | None
"""What a user may give: a selection, a predicate, one node's name, or nothing."""


@dataclass(frozen=True)
class Where(Selection):
    """Steps for which a predicate of the user's is true."""

    predicate: Predicate

    def __call__(self, step: Step) -> bool:
        """What the predicate says."""
        return bool(self.predicate(step))

    def __repr__(self) -> str:
        return f"Where({getattr(self.predicate, '__qualname__', self.predicate)})"


@dataclass(frozen=True)
class _All(Selection):
    left: Selection
    right: Selection

    def __call__(self, step: Step) -> bool:
        return self.left(step) and self.right(step)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class _Any(Selection):
    left: Selection
    right: Selection

    def __call__(self, step: Step) -> bool:
        return self.left(step) or self.right(step)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True)
class _Not(Selection):
    inner: Selection

    def __call__(self, step: Step) -> bool:
        return not self.inner(step)

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclass(frozen=True, init=False)
class _Named(Selection):
    """Steps of which some name matches one of the given ones."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        kind = type(self).__name__
        if not names:
            raise ConfigError(f"{kind}() names nothing; give at least one, as in {kind}('planner')")
        for name in names:
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users' input
                raise ConfigError(f"{kind}({name!r}): expected strings, as in {kind}('a', 'b')")
        object.__setattr__(self, "names", names)

    def __call__(self, step: Step) -> bool:
        """Whether one of the step's names matches one of the given ones."""
        candidates = self._names_of(step)
        return any(fnmatchcase(candidate, name) for candidate in candidates for name in self.names)

    @abstractmethod
    def _names_of(self, step: Step) -> Iterable[str]: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class Nodes(_Named):
    """Steps made in LangGraph nodes of these names, in whatever subgraph. ``*`` and ``?`` are wildcards."""

    def _names_of(self, step: Step) -> Iterable[str]:
        return () if step.identity.node is None else (step.identity.node,)


class Namespaces(_Named):
    """Steps whose branch matches a pattern.

    A pattern is held against the full namespace (``work:<uuid>|inner:<uuid>``) and against its path of
    node names (``work|inner``); ``*`` also crosses ``|``. So ``"work:*"`` is everything in and under
    ``work``, ``"work"`` what ``work`` itself called, ``"work|*"`` what its subgraphs called.
    """

    def _names_of(self, step: Step) -> Iterable[str]:
        return step.identity.namespace, node_path(step.identity.namespace)


class Tags(_Named):
    """Steps that carry at least one of these LangChain tags; ``Tags("a") & Tags("b")`` asks for both."""

    def _names_of(self, step: Step) -> Iterable[str]:
        return step.identity.tags


class Models(_Named):
    """Steps of these models: a policy's name, with or without version, or the name that was asked for."""

    def _names_of(self, step: Step) -> Iterable[str]:
        return (step.model, *((step.policy.model, step.policy.name) if step.policy else ()))


def node_path(namespace: str) -> str:
    """A namespace as node names: ``work:<uuid>|inner:<uuid>`` is ``work|inner``."""
    return "|".join(segment.partition(":")[0] for segment in namespace.split("|"))


def as_selection(train: Train) -> Selection:
    """What a user gave, as a selection; None chooses everything.

    Raises:
        ConfigError: it is neither a selection nor callable.
    """
    if isinstance(train, Selection):
        return train
    if isinstance(train, str):
        return Nodes(train)
    if train is None:
        return Where(_everything)
    if callable(train):
        return Where(train)
    raise ConfigError(
        f"train={train!r}: expected a selection such as Nodes('planner'), or a function of the step"
    )


def _everything(step: Step) -> bool:
    return True


def why_not(step: Step) -> str | None:
    """Why a step cannot be trained on, whoever chooses it; None when it can."""
    if step.untrainable is not None:
        return step.untrainable
    if step.tokens is None:
        return "the server gave no token ids" if step.error is None else "the call failed"
    if step.policy is None:
        return "answered by a model that is not trained here"
    if not step.tokens.completion:
        return "no token was sampled"
    return None


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is trained of a trajectory.

    Attributes:
        steps: in the order in which they started.
        left_out: how many steps were not chosen, by reason.
    """

    steps: tuple[Step, ...]
    left_out: Mapping[str, int]


def choose(trajectory: Trajectory, train: Train = None, *, include_superseded: bool = False) -> Chosen:
    """The steps of a trajectory that are trained.

    Args:
        trajectory: a rollout.
        train: the user's choice among its steps; None chooses every one that can be trained.
        include_superseded: also train attempts that a later one replaced.
    """
    selection = as_selection(train)
    replaced = frozenset[str]() if include_superseded else superseded(trajectory.steps)
    chosen: list[Step] = []
    left_out: Counter[str] = Counter()
    for step in trajectory.steps:
        reason = (
            SUPERSEDED
            if step.id in replaced
            else why_not(step) or (None if selection(step) else NOT_SELECTED)
        )
        if reason is None:
            chosen.append(step)
        else:
            left_out[reason] += 1
    return Chosen(tuple(chosen), left_out)


def own_steps(groups: Sequence[TrajectoryGroup], policy: str) -> list[TrajectoryGroup]:
    """Groups as one policy is trained on them.

    Where it was called anywhere in them, steps of other policies cannot be trained: they were sampled by
    other weights. Groups in which it was never called stay as they are: those of the policy that it was
    forked from, say.

    Args:
        groups: as they were collected, all that belong together.
        policy: the name, without a version.
    """
    models = {s.policy.model for group in groups for t in group for s in t.steps if s.policy is not None}
    if policy not in models or len(models) == 1:
        return list(groups)
    return [group.with_trajectories([_own_steps(t, policy) for t in group]) for group in groups]


def _own_steps(trajectory: Trajectory, policy: str) -> Trajectory:
    steps = tuple(
        step
        if step.policy is None or step.policy.model == policy or step.untrainable is not None
        else replace(step, untrainable=OTHER_POLICY)
        for step in trajectory.steps
    )
    return replace(trajectory, steps=steps)


def staleness(trajectory: Trajectory, version: int, train: Train = None) -> int | None:
    """How many versions the oldest step that is to be trained is behind; None without such a step.

    Args:
        trajectory: a rollout.
        version: number of the policy version in training.
        train: the user's choice among the steps: a judge that stays at an old version makes nothing stale.
    """
    chosen = as_selection(train)
    sampled = [
        s.policy.number for s in trajectory.steps if s.trainable and s.policy is not None and chosen(s)
    ]
    return version - min(sampled) if sampled else None


def step_reward(trajectory: Trajectory, step: Step) -> float | None:
    """What a step earned: the most specific reward that was given, step before node before trajectory.

    None when none was given, and always when the rollout failed.
    """
    if trajectory.failed:
        return None
    if step.id in trajectory.step_rewards:
        return trajectory.step_rewards[step.id]
    if step.identity.node is not None and step.identity.node in trajectory.node_rewards:
        return trajectory.node_rewards[step.identity.node]
    return trajectory.reward


def returns(trajectory: Trajectory, gamma: float | None = None) -> dict[str, float]:
    """What each step is credited with, by step id; steps without any reward are not in it.

    Without ``gamma``, that is its `step_reward`. With ``gamma``, rewards are events in time and a step is
    credited with what it earned and with what came after it, ``G_t = r_t + gamma * G_(t+1)`` (Sutton and
    Barto 2018, equation 3.9): a step's own reward falls due at that step, a node's at the node's last
    step, the trajectory's at the last step of all. Steps superseded by a later attempt take no part.

    Args:
        trajectory: a rollout.
        gamma: discount for each further step, 0 to 1.

    Raises:
        ConfigError: ``gamma`` is out of range.
    """
    if gamma is None:
        given = {step.id: step_reward(trajectory, step) for step in trajectory.steps}
        return {step: reward for step, reward in given.items() if reward is not None}
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma={gamma}: expected 0 to 1")
    nothing_given = trajectory.reward is None and not trajectory.step_rewards and not trajectory.node_rewards
    if trajectory.failed or nothing_given:
        return {}
    replaced = superseded(trajectory.steps)
    steps = [step for step in trajectory.steps if step.id not in replaced]
    due_at_node_end = dict(trajectory.node_rewards)
    ahead = 0.0
    credited: dict[str, float] = {}
    for place, step in enumerate(reversed(steps)):
        earned = trajectory.step_rewards.get(step.id, 0.0)
        if step.identity.node is not None:
            earned += due_at_node_end.pop(step.identity.node, 0.0)
        if place == 0:
            earned += trajectory.reward or 0.0
        ahead = earned + gamma * ahead
        credited[step.id] = ahead
    return dict(reversed(credited.items()))
