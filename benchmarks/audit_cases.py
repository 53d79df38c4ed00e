"""A case for the audit: made-up runs, scored by a real reward function or judge, and what the audit is given.

Invariant: a case follows from its seed alone.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.rewards import Ruler, component, score_trajectories
from art_core.rewards.audit.answers import answer
from art_core.rewards.labels import Labels
from art_core.rewards.text import plain
from art_core.scoring import RewardFunction
from art_core.types import Trajectory, TrajectoryGroup
from benchmarks.ruler import Erring
from benchmarks.ruler import group as judged_group


@dataclass(frozen=True)
class Case:
    """A reward to audit.

    Attributes:
        groups: scored runs.
        options: what `audit` is given beside them.
    """

    groups: list[TrajectoryGroup]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


Make = Callable[[int, int, int], Case]
"""``(seed, groups, members)``."""


@component
def correct(trajectory: Trajectory) -> float:
    """Whether the guess is right."""
    text = answer(trajectory)
    found = re.search(r"(?:answer:|it is)\s+(\w+)\.?\s*$", text, re.IGNORECASE)
    guess = found.group(1) if found else text
    return float(plain(guess) == plain(trajectory.scenario.metadata["answer"]))


@component
def facts(trajectory: Trajectory) -> float:
    """The share of the wanted facts that are told."""
    return covered(answer(trajectory), trajectory)


def covered(text: str, trajectory: Trajectory) -> float:
    """The share of the wanted facts in a text."""
    wanted = trajectory.scenario.metadata["facts"]
    return sum(fact in text for fact in wanted) / len(wanted)


def scored(reward: RewardFunction, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups, each member scored (or failed) by the function."""
    runs = score_trajectories(reward, [t for group in groups for t in group])
    by_id = {t.id: t for t in runs}
    return [group.with_trajectories([by_id[t.id] for t in group]) for group in groups]


def with_function(reward: RewardFunction, groups: Sequence[TrajectoryGroup], **options: Any) -> Case:
    """A case in which the audit has the function, too."""
    return Case(scored(reward, groups), {"reward": reward, **options})


def people_of(groups: Sequence[TrajectoryGroup], truth: Callable[[Trajectory], float], seed: int) -> Labels:
    """What people who err now and then would say of a third of the runs."""
    rng = random.Random(f"people {seed}")
    runs = [t for group in groups for t in group if rng.random() < 0.33]
    return Labels({t.id: min(max(truth(t) + rng.gauss(0, 0.15), 0.0), 1.0) for t in runs})


def judged_by(seed: int, groups: int, members: int, judge: Erring) -> Case:
    """Runs that RULER scored with this judge, whom the audit may ask, too."""
    rng = random.Random(f"judged {seed}")
    made = [judged_group(number, rng, members)[0] for number in range(groups)]
    ruler = Ruler(judge)
    judgements = ruler.score_groups(made)
    done = [judgement.apply(group) for judgement, group in zip(judgements, made, strict=True)]
    return Case(done, {"ruler": Ruler(judge)})
