"""One scenario over time: what the policy did in it, version by version."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from art_core.errors import ConfigError
from art_core.observe.dashboard.comparison import Run, marked
from art_core.observe.dashboard.filters import run_choices
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.texts import Piece, pieces
from art_core.observe.dashboard.trajectory_view import last_words
from art_core.store.browse import TrajectoryRow, trajectory_row
from art_core.store.over_time import VersionRow, middle_rollouts, scenario_versions

router = APIRouter()

VERSIONS = 30
"""Policy versions that are shown; of more, the first, the last and some between."""

_SHOWN = 1200  # characters of what a rollout said


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one policy version did in the scenario.

    Attributes:
        row: its figures.
        chosen: the rollout that is shown.
        words: what that one ended with, compared with that of the version before.
    """

    row: VersionRow
    chosen: TrajectoryRow
    words: tuple[tuple[Run, tuple[Piece, ...]], ...]


@router.get("/scenarios")
def scenario(request: Request, scenario_id: str = "", run_id: str = "") -> HTMLResponse:
    """How the policy's behaviour in a scenario changed."""
    if not scenario_id:
        raise ConfigError("scenario_id is missing: which scenario is this about?")
    store = site_of(request).store
    rows = scenario_versions(store, scenario_id, run_id or None)
    middle = middle_rollouts(store, scenario_id, run_id or None)
    found: list[Version] = []
    before = ""
    for row in _some(rows, VERSIONS):
        chosen = trajectory_row(store, middle[row.number])
        words = last_words(store.trajectory(chosen.id))[:_SHOWN]
        runs = marked(words, before) if before else [Run(words, False)] if words else []
        before = words
        shown = tuple((run, tuple(pieces(run.text))) for run in runs)
        found.append(Version(row=row, chosen=chosen, words=shown))
    return render(
        request,
        "scenario.html",
        scenario_id=scenario_id,
        run_id=run_id or None,
        runs=run_choices(store),
        versions=found,
        left_out=len(rows) - len(found),
        total=sum(row.size for row in rows),
    )


def _some(rows: Sequence[VersionRow], most: int) -> Sequence[VersionRow]:
    """All, or evenly spaced ones with both ends."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
