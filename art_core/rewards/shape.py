"""Rewards of how a run went, whatever it said: calls, lengths, time, money.

Invariant: these are quantities in their own units, to be subtracted (``quality - 0.01 * Steps()``) or
turned into 0 to 1 by `Efficiency`; what was not measured is an error, never a quantity of zero.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast, get_args

from art_core.errors import ConfigError, RewardError
from art_core.rewards.compose import Component, Measure, as_component, evaluate, under
from art_core.rewards.reading import answer_text
from art_core.scoring import Reward, RewardFunction
from art_core.types import Step, Trajectory

LengthUnit = Literal["tokens", "characters"]


@dataclass(frozen=True, slots=True)
class Steps(Measure):
    """How many LLM calls were answered.

    Attributes:
        node: whose calls; None: everybody's.
    """

    node: str | None = None
    _: KW_ONLY
    name: str = "steps"

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The number of calls; choices of one call are one."""
        return float(len({s.call_id or s.id for s in _answered(trajectory, self.node)}))


@dataclass(frozen=True, slots=True)
class Length(Measure):
    """How long what the models wrote is.

    Attributes:
        unit: ``tokens``: sampled tokens of all calls; ``characters``: those of the answer alone.
        node: whose; None: everybody's, and the agent's own answer.
    """

    unit: LengthUnit = "tokens"
    node: str | None = None
    _: KW_ONLY
    name: str = "length"

    def __post_init__(self) -> None:
        if self.unit not in get_args(LengthUnit):
            raise ConfigError(f"reward {self.name!r}: unit={self.unit!r}, expected 'tokens' or 'characters'")

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The length, in its unit."""
        if self.unit == "characters":
            return float(len(answer_text(trajectory, output, self.node, self.name)))
        return float(sum(_tokens(s, self.name)[1] for s in _answered(trajectory, self.node)))


@dataclass(frozen=True, slots=True)
class Latency(Measure):
    """Seconds from the start of a run to its end.

    Attributes:
        models_only: the sum of the LLM calls' durations instead, without tools and waiting for a slot.
    """

    models_only: bool = False
    _: KW_ONLY
    name: str = "latency"

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The seconds."""
        if self.models_only:
            return math.fsum(s.duration for s in _answered(trajectory, None))
        if trajectory.duration is not None:
            return trajectory.duration
        # A rollout is scored before it has ended; what it did last has.
        ends = [s.started_at + s.duration for s in (*trajectory.steps, *trajectory.spans)]
        if not ends:
            raise RewardError(f"reward {self.name!r}: nothing of trajectory {trajectory.id} was timed")
        return max(max(ends) - trajectory.started_at, 0.0)


@dataclass(frozen=True, slots=True)
class Price:
    """What a model costs, in any one currency per million tokens.

    Attributes:
        prompt: per million prompt tokens.
        completion: per million sampled tokens.
    """

    prompt: float
    completion: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(p) and p >= 0 for p in (self.prompt, self.completion)):
            raise ConfigError(f"{self}: prices are finite and not negative")


@dataclass(frozen=True, slots=True)
class Cost(Measure):
    """What the LLM calls cost, in the currency of the prices.

    Attributes:
        prices: by model name as in the request (``gpt-5``), or by a policy's model without its version.
    """

    prices: Mapping[str, Price]
    _: KW_ONLY
    name: str = "cost"

    def __post_init__(self) -> None:
        given = cast(object, self.prices)
        prices = cast("Mapping[object, object]", given).values() if isinstance(given, Mapping) else [given]
        for price in prices:
            if not isinstance(price, Price):
                raise ConfigError(
                    f"reward {self.name!r}: the price {price!r}: expected prices as "
                    "{'model': Price(prompt=..., completion=...)}"
                )

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The cost."""
        return math.fsum(self._of(step) for step in _answered(trajectory, None) if step.choice == 0)

    def _of(self, step: Step) -> float:
        price = self.prices.get(step.model) or (self.prices.get(step.policy.model) if step.policy else None)
        if price is None:
            raise RewardError(
                f"reward {self.name!r}: no price for model {step.model!r} (step {step.id}); "
                f"prices are given for {', '.join(map(repr, sorted(self.prices))) or 'nothing'}"
            )
        prompt, completion = _tokens(step, self.name)
        return (prompt * price.prompt + completion * price.completion) / 1e6


@dataclass(frozen=True, slots=True, init=False)
class Efficiency(Component):
    """A quantity as 0 to 1: 1.0 at ``good`` and better, 0.0 at ``bad`` and worse, a line between.

    ``Efficiency(Steps(), good=3, bad=10)``; with ``good`` above ``bad``, more is better.

    Attributes:
        quantity: what is measured; recorded as ``<name>/<its name>``.
        good: where the best is reached.
        bad: where the worst is reached.

    Raises:
        ConfigError: ``good`` equals ``bad``, or one is not finite.
    """

    quantity: Component
    good: float
    bad: float

    def __init__(
        self, quantity: Component | RewardFunction, *, good: float, bad: float, name: str | None = None
    ) -> None:
        measured = as_component(quantity)
        chosen = f"{measured.name}_efficiency" if name is None else name
        for attribute, value in (("quantity", measured), ("good", good), ("bad", bad), ("name", chosen)):
            object.__setattr__(self, attribute, value)
        if good == bad or not math.isfinite(good) or not math.isfinite(bad):
            raise ConfigError(f"reward {chosen!r}: good={good!r}, bad={bad!r}; give two different numbers")

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The share, and the quantity itself."""
        measured = await evaluate(self.quantity, self.quantity.name, trajectory, output)
        share = (measured.total - self.bad) / (self.good - self.bad)
        value = min(max(share, 0.0), 1.0)
        parts = {self.quantity.name: measured.total, **measured.components}
        return under(self.name, Reward(value, parts, metrics=measured.metrics))


def _answered(trajectory: Trajectory, node: str | None) -> list[Step]:
    return [
        step
        for step in trajectory.steps
        if step.response is not None and (node is None or step.identity.node == node)
    ]


def _tokens(step: Step, reward: str) -> tuple[int, int]:
    """Prompt and sampled tokens of a call."""
    if step.tokens is not None:
        return len(step.tokens.prompt), len(step.tokens.completion)
    try:
        return step.usage["prompt_tokens"], step.usage["completion_tokens"]
    except KeyError as missing:
        raise RewardError(
            f"reward {reward!r}: step {step.id} has neither token ids nor {missing} in its usage; "
            "have the server report usage (stream_options.include_usage for streams)"
        ) from None
