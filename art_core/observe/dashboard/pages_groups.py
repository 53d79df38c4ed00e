"""The pages of groups: all of them, with the best and worst of a step, and one, its members side by side."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from art_core.observe.dashboard.blocks import as_text
from art_core.observe.dashboard.comparison import Run, marked, own_items
from art_core.observe.dashboard.filters import filter_from, flatness, run_choices
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.texts import Piece, cut, pieces
from art_core.observe.dashboard.trajectory_view import last_words
from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, TrajectoryRow, choices, list_groups, list_trajectories
from art_core.store.parts import group_without_tokens
from art_core.store.records import Feedback, Score
from art_core.types import Trajectory
from art_core.views.text import tool_calls

router = APIRouter()

EXTREMES = 3
"""How many of the best and of the worst of a step are shown."""

MOST_MEMBERS = 64
"""Members of a group that are shown side by side."""

_SHOWN = 6000  # characters of a member's text that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a group, beside the others.

    Attributes:
        trajectory: the rollout.
        words: what it ended with, in runs that the reference has, and that are its own.
        cut: whether there is more of it than that.
        score: who gave the reward, and why; None without one.
        feedback: what people said.
        tools: names of the tools that its models called, in order, each with how often in a row.
        way: the nodes that called a model, in order, each with how often in a row, and whether the
            reference did not do so there.
        reference: it is what the others are compared with.
    """

    trajectory: Trajectory
    words: tuple[tuple[Run, tuple[Piece, ...]], ...]
    cut: bool
    score: Score | None
    feedback: tuple[Feedback, ...]
    tools: tuple[tuple[str, int], ...]
    way: tuple[tuple[str, int, bool], ...]
    reference: bool


@router.get("/groups")
def groups(request: Request, after: str | None = None) -> HTMLResponse:
    """A list of groups; of one run's step also its best and worst rollouts."""
    store = site_of(request).store
    asked = dict(request.query_params)
    which = filter_from(asked)
    run_id, number = which.run_id, which.policy_number
    page = list_groups(
        store, run_id, after=after, scenario_id=which.scenario_id, member=which, flat=flatness(asked)
    )
    return render(
        request,
        "groups.html",
        page=page,
        asked=asked,
        after=after,
        which=which,
        run_id=run_id,
        number=number,
        runs=run_choices(store),
        choices=choices(store, run_id),
        extremes=_extremes(store, run_id, number) if run_id and number is not None else {},
    )


@router.get("/groups/{group_id:path}")
def group(request: Request, group_id: str, reference: str | None = None) -> HTMLResponse:
    """One group: its members side by side, compared with one of them (without a choice, the best)."""
    store = site_of(request).store
    whole = group_without_tokens(store, group_id)
    rows = list_trajectories(store, TrajectoryFilter(group_id=group_id, order="oldest"), 500).items
    shown = whole.trajectories[:MOST_MEMBERS]
    against = next((t for t in shown if t.id == reference), None) or max(
        shown, key=lambda t: -1e300 if t.reward is None else t.reward, default=None
    )
    members = [_member(store, t, against) for t in shown]
    return render(
        request,
        "group.html",
        group=whole,
        members=members,
        left_out=len(whole.trajectories) - len(shown),
        against=against,
        run_id=rows[0].run_id if rows else None,
        numbers=sorted({row.policy_number for row in rows if row.policy_number is not None}),
        spread=max(whole.rewards) - min(whole.rewards) if whole.rewards else None,
        mean=sum(whole.rewards) / len(whole.rewards) if whole.rewards else None,
        inputs=as_text(dict(whole.scenario.inputs)) if whole.scenario.inputs else "",
        cut=cut,
    )


def _extremes(store: Store, run_id: str, number: int) -> dict[str, tuple[TrajectoryRow, ...]]:
    found: dict[str, Any] = {}
    for order in ("best", "worst"):
        which = TrajectoryFilter(run_id=run_id, policy_number=number, order=order)
        found[order] = list_trajectories(store, which, EXTREMES).items
    return found


def _member(store: Store, trajectory: Trajectory, against: Trajectory | None) -> Member:
    words = last_words(trajectory)
    other = "" if against is None else last_words(against)
    runs = (
        marked(words[:_SHOWN], other[:_SHOWN]) if trajectory is not against else [Run(words[:_SHOWN], False)]
    )
    scores, way = store.scores(trajectory.id), _way(trajectory)
    return Member(
        trajectory=trajectory,
        words=tuple((run, tuple(pieces(run.text))) for run in runs),
        cut=len(words) > _SHOWN,
        score=scores[-1] if scores else None,
        feedback=tuple(store.feedback(trajectory.id)),
        tools=_tools(trajectory),
        way=tuple(
            (*stop, own) for stop, own in zip(way, own_items(way, _way(against or trajectory)), strict=True)
        ),
        reference=trajectory is against,
    )


def _way(trajectory: Trajectory) -> tuple[tuple[str, int], ...]:
    return _in_a_row(step.identity.node or "call" for step in trajectory.steps)


def _tools(trajectory: Trajectory) -> tuple[tuple[str, int], ...]:
    return _in_a_row(name for step in trajectory.steps for name, _ in tool_calls(step.response or {}))


def _in_a_row(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple((name, len(list(same))) for name, same in groupby(names))
