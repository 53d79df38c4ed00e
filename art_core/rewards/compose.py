"""Components: named reward functions, and what they make when they are weighted, added and gated.

Invariant: every component that was asked is on the trajectory by its name, with its raw value and its
weight; one that raises, hangs or gives no finite number leaves the trajectory unscored, under its name.

Data flow: trajectory (and the agent's output) -> every component of a sum at the same time -> a `Reward`:
``components[name]`` is the raw value, ``metrics["weight/<name>"]`` its weight, and the total is the sum of
their products.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, overload

from art_core.errors import ConfigError, RewardError, words_of
from art_core.rewards.sums import combined
from art_core.scoring import Reward, RewardFunction, Score, score, wants_output
from art_core.threads import ElasticThreads
from art_core.types import Trajectory

_threads = ElasticThreads("art-reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component(ABC):
    """A reward function with a name, which can be weighted, added and gated.

    ``0.6 * quality + 0.3 * tools - 0.01 * steps`` is a reward function again (`Composed`). A sum may hold
    plain functions, which go by their own name; to weigh one, make it a `component` first.

    Attributes:
        name: what its value is recorded as.
    """

    name: str = ""

    @abstractmethod
    def __call__(self, trajectory: Trajectory, output: object = None) -> Score | Awaitable[Score]:
        """Score a trajectory.

        Raises:
            RewardError: it can't be scored.
        """

    def named(self, name: str) -> "Component":
        """The same under another name; of a sum, one component whose parts are ``<name>/<part>``."""
        return Named(self, name=name)

    def within(self, seconds: float) -> "Component":
        """The same with a time limit; a trajectory that takes longer to judge stays unscored.

        Raises:
            ConfigError: the limit is not above zero.
        """
        return Named(self, name=self.name, timeout=seconds)

    def gated(
        self, gate: "Component | RewardFunction", *, least: float = 1.0, otherwise: float = 0.0
    ) -> "Component":
        """The same, but worth ``otherwise`` when ``gate`` gives less than ``least``; see `Gated`."""
        return Gated(self, as_component(gate), least=least, otherwise=otherwise, name=self.name)

    def __mul__(self, weight: float) -> "Composed":
        return Composed(_weighted(self, weight), _events(self)) if _is_number(weight) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Composed":
        if not _is_number(divisor):
            return NotImplemented
        if divisor == 0:
            raise ConfigError(f"component {self.name!r} divided by zero")
        return self * (1 / divisor)

    def __neg__(self) -> "Composed":
        return self * -1.0

    def __pos__(self) -> "Composed":
        return self * 1.0

    def __add__(self, other: "Component | RewardFunction") -> "Composed":
        if isinstance(other, int | float) and other == 0:  # what sum() starts from
            return self * 1.0
        if not callable(other):
            return NotImplemented
        added = as_component(other)
        return Composed((*_weighted(self), *_weighted(added)), _events(self, added))

    def __radd__(self, other: "Component | RewardFunction | int") -> "Composed":
        if isinstance(other, int | float) and other == 0:
            return self * 1.0
        return as_component(other) + self if callable(other) else NotImplemented

    def __sub__(self, other: "Component | RewardFunction") -> "Composed":
        return self + -as_component(other) if callable(other) else NotImplemented

    def __rsub__(self, other: "Component | RewardFunction") -> "Composed":
        return as_component(other) + -self if callable(other) else NotImplemented


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Component):
    """A component of one number that is computed from the trajectory alone."""

    @abstractmethod
    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The number.

        Raises:
            RewardError: the trajectory lacks what is measured.
        """

    def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The number, under this name."""
        value = self.value(trajectory, output)
        return Reward(value, {self.name: value})


@dataclass(frozen=True, slots=True)
class Named(Component):
    """Any reward function as a component.

    Attributes:
        function: ``(trajectory)`` or ``(trajectory, output)``, sync or async.
        timeout: seconds that it may take; None for no limit.

    Raises:
        ConfigError: it has no name, or the limit is not above zero.
        RewardError: the function takes the wrong arguments.
    """

    function: RewardFunction
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a component needs a name; give one: component(function, name=...)")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"component {self.name!r}: timeout={self.timeout!r}, expected seconds above 0")
        wants_output(self.function)

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """What the function says, under this name."""
        found = await evaluate(self.function, self.name, trajectory, output, self.timeout)
        return under(self.name, found)


@dataclass(frozen=True, slots=True)
class Gated(Component):
    """A component that counts only where another one is satisfied ("no quality if the format is wrong").

    The gate is asked first, and what it guards is asked only when it is open: a judge costs nothing then.
    Both are recorded: ``<name>`` is the value that counted, ``<name>/<gate's name>`` what the gate gave, and
    ``metrics["<name>/gate"]`` 1 where it was open and 0 where it was not.

    Attributes:
        guarded: what counts when the gate is open.
        gate: what decides.
        least: the gate is open at this value and above.
        otherwise: what the component is worth when the gate is closed.
    """

    guarded: Component
    gate: Component
    least: float = 1.0
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a gated sum needs a name: (...).named('quality').gated(...)")
        if self.name == self.gate.name:
            raise ConfigError(
                f"a gate and what it guards are both named {self.name!r}; rename one with named()"
            )
        for what, number in (("least", self.least), ("otherwise", self.otherwise)):
            _finite_weight(number, f"gate of {self.name!r}: {what}")

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The guarded value, or what a closed gate is worth."""
        gate = under(self.gate.name, await evaluate(self.gate, self.gate.name, trajectory, output))
        is_open = gate.total >= self.least
        found = (
            under(self.name, await evaluate(self.guarded, self.name, trajectory, output))
            if is_open
            else Reward(self.otherwise, {self.name: self.otherwise})
        )
        joined = Reward(
            found.total,
            {**gate.components, **found.components},
            found.by_node,
            found.by_step,
            {**gate.metrics, **found.metrics, "gate": float(is_open)},
        )
        return under(self.name, joined)


@dataclass(frozen=True, slots=True)
class Term:
    """One component of a sum, with its weight."""

    component: Component
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Composed(Component):
    """A weighted sum of components, which are asked at the same time.

    Where some components reward single steps or nodes, those are worth the weighted sum as well: of what
    each component gives that step, else its node, else the whole. That is what trains without ``gamma``,
    which credits a step with its most specific reward alone (`art_core.selection.step_reward`).

    Attributes:
        terms: the components and their weights.
        events: rewards of steps and nodes are what was earned there and no more; see `as_events`.

    Raises:
        ConfigError: there are no terms, two have the same name, or a weight is not finite.
    """

    terms: tuple[Term, ...]
    events: bool = False

    def __post_init__(self) -> None:
        names = [term.component.name for term in self.terms]
        if not names:
            raise ConfigError("a sum of no components")
        for name in names:
            if not name:
                raise ConfigError("a component of a sum has no name; give it one with named()")
            if names.count(name) > 1:
                raise ConfigError(f"two components are named {name!r}; rename one with named()")
        for term in self.terms:
            _finite_weight(term.weight, f"weight of component {term.component.name!r}")

    @property
    def weights(self) -> dict[str, float]:
        """Each component's weight, by name."""
        return {term.component.name: term.weight for term in self.terms}

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The weighted sum."""
        parts = await self.parts(trajectory, output)
        return combined(parts, self.weights, trajectory, events=self.events)

    async def parts(self, trajectory: Trajectory, output: object = None) -> dict[str, Reward]:
        """What each component says, by name; all of them run at once, and the first failure ends the rest.

        Raises:
            RewardError: a component gave no number; the message has its name.
        """
        try:
            async with asyncio.TaskGroup() as asked:
                tasks = {
                    term.component.name: asked.create_task(
                        evaluate(term.component, term.component.name, trajectory, output)
                    )
                    for term in self.terms
                }
        except BaseExceptionGroup as broken:
            first = broken.exceptions[0]
            raise first from first.__cause__
        return {name: under(name, task.result()) for name, task in tasks.items()}

    def as_events(self) -> "Composed":
        """For training with ``gamma``, which adds up what is earned along the way.

        A step or node is then rewarded only with what components gave it; the whole is earned at the end.
        """
        return replace(self, events=True)

    def within(self, seconds: float) -> "Composed":
        """The same with a time limit for each component."""
        return replace(
            self,
            terms=tuple(replace(term, component=term.component.within(seconds)) for term in self.terms),
        )


Decorator: TypeAlias = Callable[[RewardFunction], Component]


@overload
def component(
    function: RewardFunction, *, name: str | None = None, timeout: float | None = None
) -> Component: ...
@overload
def component(*, name: str | None = None, timeout: float | None = None) -> Decorator: ...
def component(
    function: RewardFunction | None = None, *, name: str | None = None, timeout: float | None = None
) -> Component | Decorator:
    """Make a plain reward function a component; a decorator, with or without arguments.

    Args:
        function: ``(trajectory)`` or ``(trajectory, output)``, sync or async, to a number, named parts or
            a `Reward`.
        name: what it is recorded as; None: the function's own name.
        timeout: seconds that it may take; None for no limit.

    Raises:
        ConfigError: it has no name (lambdas have none), or the limit is not above zero.
        RewardError: it takes the wrong arguments.
    """

    def made(given: RewardFunction) -> Component:
        own = str(getattr(given, "__name__", ""))
        chosen = name if name is not None else getattr(given, "name", "") or own
        if chosen == "<lambda>":
            raise ConfigError("a lambda has no name; give one: component(lambda t: ..., name='quality')")
        return Named(given, timeout, name=chosen)

    return made if function is None else made(function)


def as_component(function: "Component | RewardFunction") -> Component:
    """A component as it is, and a plain function as one that goes by its own name."""
    return function if isinstance(function, Component) else component(function)


async def evaluate(
    function: RewardFunction,
    name: str,
    trajectory: Trajectory,
    output: object,
    timeout: float | None = None,
) -> Reward:
    """Ask one component; sync ones run in a thread.

    Raises:
        RewardError: it raised, took too long or gave no finite number; the message has its name.
    """
    if timeout is None and isinstance(function, Named) and function.name == name:
        return await function(trajectory, output)  # which does the same, and would say the name twice
    what = (
        f"component {name!r} on trajectory {trajectory.id}"
        if name
        else f"reward of trajectory {trajectory.id}"
    )
    task = asyncio.create_task(score(function, trajectory, output, _threads))
    try:
        # Not asyncio.timeout: work that swallows its cancellation would then be waited for without end.
        await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise RewardError(f"{what} gave no result within {timeout:g} s")
    if task.cancelled():
        raise RewardError(f"{what}: something inside it cancelled it")
    try:
        return task.result()
    except Exception as error:
        raise RewardError(f"{what}: {words_of(error)}") from error


def under(name: str, found: Reward) -> Reward:
    """What a component said, its own parts and metrics named after it."""

    def key(part: str) -> str:
        return part if part == name or part.startswith(f"{name}/") else f"{name}/{part}"

    return replace(
        found,
        components={**{key(k): v for k, v in found.components.items()}, name: found.total},
        metrics={key(k): v for k, v in found.metrics.items()},
        metadata={},
    )


def _weighted(given: Component, weight: float = 1.0) -> tuple[Term, ...]:
    """The terms of a sum, each times the weight; any other component is one term."""
    _finite_weight(weight, f"weight of component {given.name!r}")
    if isinstance(given, Composed) and not given.name:
        return tuple(Term(term.component, term.weight * weight) for term in given.terms)
    return (Term(given, weight),)


def _finite_weight(weight: float, what: str) -> None:
    if not _is_number(weight) or not math.isfinite(weight):
        raise ConfigError(f"{what} is {weight!r}; expected a finite number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _events(*given: Component) -> bool:
    return any(isinstance(one, Composed) and one.events for one in given)
