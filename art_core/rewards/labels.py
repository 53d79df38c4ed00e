"""Labels: what people said of trajectories, to hold a reward against.

Invariant: a label is a person's word; where several people scored one trajectory, the mean of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_core.store.records import Feedback


@dataclass(frozen=True, slots=True)
class Preference:
    """A pairwise choice.

    Attributes:
        better: the preferred trajectory's id.
        worse: the other's.
        tie: neither was preferred; then their order means nothing.
    """

    better: str
    worse: str
    tie: bool = False


@dataclass(frozen=True, slots=True)
class Labels:
    """What people said.

    Attributes:
        scores: by trajectory id, 0 (bad) to 1 (good); a thumb is 0 or 1.
        preferences: pairwise choices.
    """

    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    preferences: Sequence[Preference] = ()


def labels_of(feedback: "Iterable[Feedback]") -> Labels:
    """The labels that people's feedback makes.

    Of one person's several scores or thumbs on a trajectory, and of several choices between two, the latest
    counts; then people's scores are averaged.

    Args:
        feedback: as `Store.feedback` gives it.
    """
    latest: dict[tuple[str, str], float] = {}
    choices: dict[tuple[str, frozenset[str]], Preference] = {}
    for one in sorted(feedback, key=lambda entry: entry.created_at):
        if one.kind == "choice" and one.over is not None:
            pair = frozenset((one.trajectory_id, one.over))
            choices[one.author, pair] = Preference(one.trajectory_id, one.over, tie=one.value == 0.5)
        else:
            value = (one.value + 1) / 2 if one.kind == "thumb" else one.value
            latest[one.author, one.trajectory_id] = value
    by_trajectory: dict[str, list[float]] = {}
    for (_, trajectory_id), value in latest.items():
        by_trajectory.setdefault(trajectory_id, []).append(value)
    return Labels({name: fmean(values) for name, values in by_trajectory.items()}, tuple(choices.values()))
