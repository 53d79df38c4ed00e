"""Where the time between two training steps went.

Invariant: the phases of a step add up to the time since the step before it ended; no second is in two of
them.

Rollouts and judges say when they were at work. What they did while the trainer waited counts; what they did
beside training costs nothing, and is in no phase.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art_core.observe.gathered import judgings, own_judgings
from art_core.store import EndedRollout
from art_core.types import TrajectoryGroup

Interval = tuple[float, float]
"""Begin and end, Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class Training:
    """When a training step did what, as Unix times in seconds.

    Attributes:
        began: the step was given its groups, and nothing else was in training.
        trained_from: the server had made room, where it has to.
        trained_to: the update was made.
        ended: the new version was served.
    """

    began: float
    trained_from: float
    trained_to: float
    ended: float


class Phases:
    """Accounts for the time of one run's training steps.

    Args:
        begun: when the run could begin to work, Unix time in seconds.
    """

    def __init__(self, begun: float | None = None) -> None:
        self._last = time.time() if begun is None else begun

    def metrics(
        self,
        groups: Iterable[TrajectoryGroup],
        step: Training,
        ended: Sequence[EndedRollout] = (),
        *,
        trained_tokens: float | None = None,
    ) -> dict[str, float]:
        """Seconds of each phase since the last step ended, and what was done per second.

        Args:
            groups: what the step was given.
            step: when it did what.
            ended: other rollouts, whose groups had too few members, for example.
            trained_tokens: how many tokens it trained; None where that is not known.
        """
        groups = list(groups)
        since, self._last = self._last, step.ended
        own = {t.id for group in groups for t in group}
        ran = [*_rollouts(groups), *_intervals(rollout for rollout in ended if rollout.id not in own)]
        rollouts = _union(ran, since, step.began)
        busy = _union([*ran, *_judged(groups)], since, step.began)
        train = step.trained_to - step.trained_from
        told = {
            "time/rollout": rollouts,
            "time/judge": busy - rollouts,
            "time/wait": max(0.0, step.began - since) - busy,
            "time/train": train,
            "time/publish": (step.trained_from - step.began) + (step.ended - step.trained_to),
            "time/step": step.ended - since,
        }
        # A clock that was set back makes nonsense; a run without rollouts, as a warm start, has none to tell.
        told = {name: max(0.0, seconds) for name, seconds in told.items()}
        if not ran:
            del told["time/rollout"]
        if not _judged(groups):
            del told["time/judge"]
        sampled = sum(
            len(step.tokens.completion)
            for group in groups
            for t in group
            for step in t.steps
            if step.tokens is not None and step.policy is not None
        )
        working = _union(_rollouts(groups), 0.0, step.ended)  # also beside training
        if sampled and working > 0:
            told["tokens_per_second/rollout"] = sampled / working
        if trained_tokens and train > 0:
            told["tokens_per_second/train"] = trained_tokens / train
        return told


def _rollouts(groups: Sequence[TrajectoryGroup]) -> list[Interval]:
    """When the groups' agents ran: until a judge was asked, where the reward of a single run has one."""
    found: list[Interval] = []
    for t in (t for group in groups for t in group):
        if t.duration is not None:
            asked = [judging["started_at"] for judging in own_judgings(t)]
            found.append((t.started_at, min([t.started_at + t.duration, *asked])))
    return found


def _intervals(rollouts: Iterable[EndedRollout]) -> list[Interval]:
    return [(r.started_at, r.started_at + r.duration) for r in rollouts if r.duration is not None]


def _judged(groups: Sequence[TrajectoryGroup]) -> list[Interval]:
    return [(j["started_at"], j["started_at"] + j["seconds"]) for j in judgings(groups)]


def _union(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds between two times in which at least one interval was under way."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
