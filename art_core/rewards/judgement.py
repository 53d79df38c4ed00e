"""What a judge made of one group.

Invariant: either every judged member has a score, or none has and ``unscored`` says why. A member that was
not judged (it failed, or never ended) is in ``left_out`` with the reason, and keeps having no reward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from art_core.errors import RewardError
from art_core.rewards.judge import Usage
from art_core.scoring import Reward
from art_core.types import Trajectory, TrajectoryGroup

COMPONENT = "ruler"
"""The name of the score among a reward's components, and of the entry in a trajectory's metadata."""

Combine = Callable[[Trajectory, float], float]
"""The reward of a trajectory from what it has so far and the judge's score."""


class Scores(Protocol):
    """Where rewards have a history: a `Store`."""

    def score(
        self,
        trajectory_id: str,
        reward: float,
        *,
        components: Mapping[str, float] | None = None,
        author: str,
        explanation: str = "",
    ) -> None:
        """Give a trajectory a reward."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """One trajectory's score.

    Attributes:
        score: from 0 to 1, relative to its group; the median of ``votes``.
        votes: what it was given each time.
        explanation: the judge's reason, from the vote nearest to the score.
    """

    score: float
    votes: tuple[float, ...]
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The scores of one group, or why it has none.

    Attributes:
        author: ``ruler:<judge's name>``.
        scores: by trajectory id; empty when the group is unscored.
        unscored: why there are no scores.
        left_out: members that were not judged, with the reason.
        usage: what the judge's calls took; cached verdicts take nothing.
        problems: every call that gave nothing usable, although later ones may have.
        started_at: Unix time, seconds; None where nobody was asked.
        seconds: how long judging took.
        cost: of the counted tokens, where the judge's price is known.
    """

    author: str
    scores: Mapping[str, Scored] = field(default_factory=dict[str, Scored])
    unscored: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    usage: Usage = field(default_factory=Usage)
    problems: tuple[str, ...] = ()
    started_at: float | None = None
    seconds: float = 0.0
    cost: float | None = None

    def reward(self, trajectory_id: str) -> Reward:
        """One trajectory's score as a `Reward`.

        Raises:
            RewardError: it has none; the message says why.
        """
        found = self.scores.get(trajectory_id)
        if found is None:
            why = self.left_out.get(trajectory_id) or self.unscored or "it was not in the group"
            raise RewardError(f"trajectory {trajectory_id} has no score of {self.author}: {why}")
        spread = max(found.votes) - min(found.votes)
        return Reward(found.score, {COMPONENT: found.score}, metrics={f"{COMPONENT}_spread": spread})

    def apply(self, group: TrajectoryGroup, combine: Combine | None = None) -> TrajectoryGroup:
        """The group with the scores as rewards; members without a score have no reward.

        Score, votes and explanation, or why there is none, are in each one's ``metadata["ruler"]``; what
        judging the whole group took is in its ``judging``.

        Args:
            group: the group that was judged.
            combine: makes the reward of what a trajectory has so far and its score; None: the score.

        Raises:
            RewardError: the group has members that the judgement knows nothing of, or ``combine`` gave no
                finite number.
        """
        return group.with_trajectories([self._applied(member, combine) for member in group])

    def save(self, store: Scores, group: TrajectoryGroup, combine: Combine | None = None) -> TrajectoryGroup:
        """`apply`, and give each new reward to the store's history, with author and explanation."""
        applied = self.apply(group, combine)
        for member in applied:
            if member.reward is not None and member.id in self.scores:
                store.score(
                    member.id,
                    member.reward,
                    components=member.components,
                    author=self.author,
                    explanation=self.scores[member.id].explanation,
                )
        return applied

    def _applied(self, member: Trajectory, combine: Combine | None) -> Trajectory:
        found = self.scores.get(member.id)
        if found is None:
            why = self.left_out.get(member.id) or self.unscored
            if why is None:
                raise RewardError(f"trajectory {member.id} is not of the group that {self.author} judged")
            told = {"unscored": why, **self._judging()}
            return replace(member, reward=None, metadata={**member.metadata, COMPONENT: told})
        total = found.score if combine is None else combine(member, found.score)
        told = {
            "score": found.score,
            "votes": list(found.votes),
            "explanation": found.explanation,
            **self._judging(),
        }
        return replace(
            member.with_reward(total, components={**member.components, COMPONENT: found.score}),
            metadata={**member.metadata, COMPONENT: told},
        )

    def _judging(self) -> dict[str, Any]:
        return {"judging": self.took} if self.took else {}

    @property
    def took(self) -> dict[str, Any]:
        """What judging took, as JSON can hold it; empty where nobody was asked."""
        if self.started_at is None:
            return {}
        took: dict[str, Any] = {
            "judge": self.author,
            "started_at": self.started_at,
            "seconds": self.seconds,
            "calls": self.usage.calls,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
        }
        return took if self.cost is None else {**took, "cost": self.cost}
