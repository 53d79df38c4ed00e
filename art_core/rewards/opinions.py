"""Rewards that are somebody's opinion: a judge's of how a dialogue hangs together, and what people said.

Invariant: an opinion that nobody gave is an error, which leaves the trajectory unscored; it is never a zero.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import cast

from art_core.errors import ConfigError, RewardError
from art_core.rewards.cache import VerdictCache
from art_core.rewards.compose import Component, Measure
from art_core.rewards.judge import Judge
from art_core.rewards.labels import Labels
from art_core.rewards.ruler import Ruler
from art_core.rewards.shape import Price
from art_core.scoring import Reward
from art_core.types import Trajectory, check_reward

RELEVANCE_RUBRIC = """\
- Only this counts: does what the agent says to the user belong to the dialogue? Each of its messages should
  take up what was asked or said just before it, and agree with what was settled earlier.
- 1: every message is to the point. 0.5: about half of them are, or much is said that nobody asked for.
  0: the agent talks past the user.
- A question back, or a refusal, is to the point where it meets what was asked.
- Whether answers are true, complete or well written does not count. Nor do tool calls, and what parts of the
  agent say to each other.
"""
"""What `Relevance` asks of a judge."""


@dataclass(frozen=True, slots=True)
class Relevance(Component):
    """How far the agent's side of a dialogue stays with what was asked and said, by a judge: 0 to 1.

    Each trajectory is judged by itself, so that scores of different scenarios compare as well as a judge's
    can; it is asked once for each trajectory and vote (`Ruler.ascore_one`).

    Attributes:
        judge: which model judges.
        votes: how often it is asked; the median counts.
        timeout: seconds for one call of the judge.
        cache: verdicts given before; None: a new one in memory.
        price: of the judge's tokens, so that its cost is known.
        ruler: who asks the judge; ``ruler.usage`` is what that took so far.

    Raises:
        ConfigError: an argument is out of range.
    """

    judge: Judge
    _: KW_ONLY
    votes: int = 1
    timeout: float = 120.0
    cache: VerdictCache | None = None
    price: Price | None = None
    name: str = "relevance"
    ruler: Ruler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ruler = Ruler(
            self.judge,
            rubric=RELEVANCE_RUBRIC,
            votes=self.votes,
            timeout=self.timeout,
            cache=self.cache,
            price=self.price,
        )
        object.__setattr__(self, "ruler", ruler)

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The judge's score.

        Raises:
            JudgeError: it gave no usable verdict, or the trajectory cannot be judged.
        """
        found = await self.ruler.ascore_one(trajectory)
        return replace(found, components={self.name: found.total})


@dataclass(frozen=True, slots=True)
class UserFeedback(Measure):
    """What people said of a trajectory, 0 to 1: the mean of each one's latest score or thumb.

    People speak after a run has ended, so this scores what is in the store (`ascore_trajectories`).

    Attributes:
        labels: what people said (`art_core.rewards.labels.labels_of`), or scores by trajectory id.
        otherwise: the value where nobody said anything; None: such a trajectory has no reward.
    """

    labels: Labels | Mapping[str, float]
    _: KW_ONLY
    otherwise: float | None = None
    name: str = "user_feedback"

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.labels), Labels | Mapping):
            raise ConfigError(
                f"reward {self.name!r}: labels are {type(self.labels).__name__}, expected "
                "labels_of(store.feedback()), or scores by trajectory id"
            )
        if self.otherwise is not None:
            check_reward(self.otherwise, f"reward {self.name!r}: otherwise")

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The mean."""
        scores = self.labels.scores if isinstance(self.labels, Labels) else self.labels
        found = scores.get(trajectory.id, self.otherwise)
        if found is None:
            raise RewardError(
                f"reward {self.name!r}: nobody scored trajectory {trajectory.id}; leave it out, or say "
                "what it is worth (otherwise=...)"
            )
        return found
