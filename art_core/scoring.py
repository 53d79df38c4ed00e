"""What a rollout was worth: calling a user's reward function and checking what it says.

Invariant: a reward function that raises, hangs or returns something that is no finite number fails the
rollout; it never becomes a 0.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from art_core.errors import RewardError
from art_core.threads import ElasticThreads, call
from art_core.types import Trajectory, check_reward


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with its parts.

    Attributes:
        total: what the whole rollout was worth.
        components: named parts, to be read and plotted; they need not sum to ``total``.
        by_node: what single nodes were worth, by name.
        by_step: what single steps were worth, by step id.
        metrics: numbers that are not rewards (``won``, ``moves``, ...).
        metadata: what is kept in the trajectory's metadata, as JSON can hold it; of a component in a sum,
            nothing is.
    """

    total: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    by_node: Mapping[str, float] = field(default_factory=dict[str, float])
    by_step: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


Score: TypeAlias = float | Mapping[str, float] | Reward
RewardFunction: TypeAlias = Callable[..., Score | Awaitable[Score]]
"""``(trajectory)`` or ``(trajectory, output)``, sync or async; returns a number, named parts whose sum
is the reward, or a `Reward`."""


def wants_output(reward: RewardFunction) -> bool:
    """Whether a reward function takes the agent's output as its second argument.

    Raises:
        RewardError: it is no function, or can be called with neither one nor two positional arguments.
    """
    if isinstance(reward, type):
        raise RewardError(f"reward {reward.__name__} is a class; make one: {reward.__name__}(...)")
    if not callable(cast(object, reward)):
        raise RewardError(f"the reward is {type(reward).__name__}, expected a function or a component")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a builtin without a signature
        return False
    # An optional second argument is the function's own business, unless it is called what we would give.
    for arguments in ((None,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2 or "output" in signature.parameters
    raise RewardError(
        f"reward function {_name(reward)}{signature} must take (trajectory) or (trajectory, output)"
    )


async def score(
    reward: RewardFunction, trajectory: Trajectory, output: object, executor: ElasticThreads
) -> Reward:
    """Call a reward function, in a thread when it is sync.

    Raises:
        RewardError: it returned something that is not a finite number (or parts that are), or left by
            ``sys.exit``, as test runners and command lines do: the training run is not its to end.
    """
    arguments: tuple[object, ...] = (trajectory, output) if wants_output(reward) else (trajectory,)
    what = f"reward function {_name(reward)} on trajectory {trajectory.id}"
    try:
        value = await call(executor, reward, *arguments)
    except SystemExit as left:
        raise RewardError(f"{what}: it called sys.exit({left.code!r}); return a number") from left
    return checked(value, what)


def checked(value: Any, what: str) -> Reward:
    """Turn what a reward function returned into a `Reward` of finite numbers.

    Raises:
        RewardError: it is none; the message names ``what``.
    """
    if isinstance(value, Reward):
        return Reward(
            check_reward(value.total, what),
            _finite(value.components, f"{what}, component"),
            _finite(value.by_node, f"{what}, node"),
            _finite(value.by_step, f"{what}, step"),
            _finite(value.metrics, f"{what}, metric"),
            value.metadata,
        )
    if isinstance(value, Mapping):
        parts = _finite(value, f"{what}, component")
        if not parts:
            raise RewardError(f"{what}: returned no components; return at least one, or a number")
        return Reward(check_reward(sum(parts.values()), what), parts)
    if isinstance(value, bool):
        raise RewardError(f"{what}: a reward is a number, got bool {value}; return float({value})")
    if isinstance(value, Trajectory) or callable(value):  # whose whole content nobody wants to read
        raise RewardError(f"{what}: a reward is a number, got {type(value).__name__}")
    # NumPy and torch scalars are numbers to everybody but isinstance.
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):
        value = value.item()
    return Reward(check_reward(value, what))


def _finite(parts: Mapping[Any, Any], what: str) -> dict[str, float]:
    return {str(name): check_reward(value, f"{what} {name!r}") for name, value in parts.items()}


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
