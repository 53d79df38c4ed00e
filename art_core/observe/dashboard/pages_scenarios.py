"""One scenario over time: what the policy did in it, version by version."""

from collections import defaultdict
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from art_core.errors import ConfigError
from art_core.observe.dashboard.comparison import Run, marked
from art_core.observe.dashboard.filters import run_choices
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.texts import Piece, pieces
from art_core.observe.dashboard.trajectory_view import last_words
from art_core.store.browse import TrajectoryFilter, TrajectoryRow, count_trajectories, list_trajectories

router = APIRouter()

MOST = 500
"""Rollouts of a scenario that are looked at: the newest."""

VERSIONS = 40
"""Policy versions that are shown; of more, the first, the last and some between."""

_SHOWN = 1200  # characters of what a rollout said


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one policy version did in the scenario.

    Attributes:
        number: of the policy; None for rollouts in which none answered.
        rewards: of its scored rollouts.
        failed: rollouts that failed.
        size: all its rollouts.
        chosen: the rollout that is shown: the one in the middle by reward, or one that failed.
        words: what it ended with, compared with that of the version before.
    """

    number: int | None
    rewards: tuple[float, ...]
    failed: int
    size: int
    chosen: TrajectoryRow
    words: tuple[tuple[Run, tuple[Piece, ...]], ...]

    @property
    def mean(self) -> float | None:
        """Mean reward."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@router.get("/scenarios")
def scenario(request: Request, scenario_id: str = "", run_id: str = "") -> HTMLResponse:
    """How the policy's behaviour in a scenario changed."""
    if not scenario_id:
        raise ConfigError("scenario_id is missing: which scenario is this about?")
    store = site_of(request).store
    which = TrajectoryFilter(scenario_id=scenario_id, run_id=run_id or None)
    rows = list_trajectories(store, which, MOST).items
    by_number: dict[int | None, list[TrajectoryRow]] = defaultdict(list)
    for row in rows:
        by_number[row.policy_number].append(row)
    numbers = sorted(by_number, key=lambda n: -1 if n is None else n)
    found: list[Version] = []
    before = ""
    for number in _some(numbers, VERSIONS):
        of_version = by_number[number]
        scored = sorted((r for r in of_version if r.reward is not None), key=lambda r: r.reward or 0.0)
        chosen = scored[len(scored) // 2] if scored else of_version[0]
        words = last_words(store.trajectory(chosen.id))[:_SHOWN]
        runs = marked(words, before) if before else [Run(words, False)] if words else []
        before = words
        found.append(
            Version(
                number=number,
                rewards=tuple(r.reward for r in scored if r.reward is not None),
                failed=sum(r.cause is not None for r in of_version),
                size=len(of_version),
                chosen=chosen,
                words=tuple((run, tuple(pieces(run.text))) for run in runs),
            )
        )
    return render(
        request,
        "scenario.html",
        scenario_id=scenario_id,
        run_id=run_id or None,
        runs=run_choices(store),
        versions=found,
        left_out=len(numbers) - len(found),
        total=count_trajectories(store, which),
        looked_at=len(rows),
    )


def _some(numbers: list[int | None], most: int) -> list[int | None]:
    """All, or evenly spaced ones with both ends."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)]
