"""The pages of runs: all of them, one, and several side by side.

Invariant: what is on a page when it arrives is all there without its script; the script draws the curves and
follows what is added.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy import Connection, func, select

from art_core.errors import ConfigError
from art_core.observe.dashboard.charts import Chart, charts_of, group_of, hints_of, polyline, still
from art_core.observe.dashboard.happenings import MOST_SHOWN, event_views, knob_view
from art_core.observe.dashboard.knob_control import knob_views, scored_weights
from art_core.observe.dashboard.live import read_signs, run_view, sign_view
from art_core.observe.dashboard.page import plotly_url, query, render, site_of
from art_core.observe.dashboard.series import (
    Series,
    last_step,
    metric_names,
    newest_events,
    position_of,
    read_run,
    read_series,
    sampled_series,
)
from art_core.observe.dashboard.standing import Standing, standing
from art_core.observe.signs import LATELY
from art_core.store.browse import RunSummary, run_summaries
from art_core.store.reading import read_lineage
from art_core.store.schema import metrics, runs, steps, trained_steps, trajectories

router = APIRouter()

MOST_COMPARED = 16
"""Runs on one page; more lines than that cannot be told apart."""

Step = Annotated[int, Query(ge=0, le=2**31 - 1)]

_SPARK_WIDTH, _SPARK_HEIGHT = 120, 28


@router.get("/")
def all_runs(request: Request, q: str = "") -> HTMLResponse:
    """All runs, newest first."""
    store = site_of(request).store
    summaries = run_summaries(store)
    with store.read() as connection:
        stands = [standing(connection, summary.run) for summary in summaries]
    after = {one.run.continues: one.run.id for one in reversed(summaries)}
    rows = [_row(one, now, after.get(one.run.id)) for one, now in zip(summaries, stands, strict=True)]
    return render(request, "runs.html", rows=rows, q=q)


def _row(summary: RunSummary, now: Standing, successor: str | None) -> dict[str, Any]:
    points = polyline(summary.sparkline, _SPARK_WIDTH, _SPARK_HEIGHT - 4)
    ended = now.last_sign if not now.going else None
    return {
        "run": summary.run,
        "now": now,
        "successor": successor,
        "steps": summary.steps,
        "trajectories": summary.trajectories,
        "reward": summary.reward_mean,
        "gain": summary.sparkline[-1] - summary.sparkline[0] if len(summary.sparkline) > 1 else None,
        "points": points,
        "tip": points.rpartition(" ")[2].split(",") if points else None,
        "seconds": None if ended is None else ended - summary.run.started_at,
    }


@router.get("/runs/{run_id}")
def one_run(request: Request, run_id: str) -> HTMLResponse:
    """One run."""
    site = site_of(request)
    with site.store.read() as connection:
        run = read_run(connection, run_id)
        line = read_lineage(connection, run_id)
        charts = charts_of(metric_names(connection, line))
        first = [name for chart in charts if chart.key for name in chart.needed]
        last = last_step(connection, line)
        wanted = list(dict.fromkeys([*first, *(name for _, name in _TILES)]))
        found = sampled_series(connection, line, wanted, last, lately=LATELY)
        position = position_of(connection, run_id)
        now = standing(connection, run)
        made = connection.scalar(select(func.count()).where(trajectories.c.run_id == run_id)) or 0
        signs = read_signs(connection, run_id, now)
        events, event_count = newest_events(connection, line, MOST_SHOWN)
        scored = scored_weights(connection, line)
        successor = connection.scalar(
            select(runs.c.id).where(runs.c.continues == run_id).order_by(runs.c.seq.desc()).limit(1)
        )
    turns = site.store.events(run_id, "knob_turned")
    return render(
        request,
        "run.html",
        run=run,
        successor=successor,
        now=now,
        view=run_view(run, now, made),
        steps=last,
        tiles=_tiles(found),
        key_charts=[_chart(chart, found) for chart in charts if chart.key],
        more_charts=_by_group([chart for chart in charts if not chart.key]),
        more_count=sum(not chart.key for chart in charts),
        events=event_views(events),
        event_count=event_count,
        signs=[sign_view(sign, run_id) for sign in signs],
        knobs=knob_views(run, turns, scored),
        turns=[knob_view(event) for event in reversed(turns[-MOST_SHOWN:])],
        config=_flat(run.config),
        position=str(position),
        plotly=plotly_url(),
    )


def _chart(chart: Chart, found: Mapping[str, Series]) -> dict[str, Any]:
    first = found.get(chart.names[0])
    return {
        "title": chart.title,
        "names": chart.names,
        "spec": {"names": chart.names, "spread": chart.spread, "kind": chart.kind, "wide": chart.wide},
        "wide": chart.wide,
        "last": first.last if first is not None and len(chart.names) == 1 else None,
        "still": still(first) if chart.kind == "lines" else "",
        "hints": hints_of(chart),
    }


def _by_group(charts: Sequence[Chart]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Charts under the catalogue's headings; they come in its order."""
    return [
        (group, [_chart(chart, {}) for chart in some])
        for group, some in groupby(charts, key=lambda chart: group_of(chart.names[0]))
    ]


_TILES = (
    ("Reward", "reward_mean"),
    ("Success rate", "success_rate"),
    ("Failed rollouts", "trajectories_failed"),
    ("KL from the sampler", "kl_old_new"),
    ("Entropy", "entropy"),
    ("Seconds per step", "time/step"),
)


def _tiles(found: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The figures at the top: the newest value, and the first one beside it."""
    tiles: list[dict[str, Any]] = []
    for title, name in _TILES:
        if (one := found.get(name)) is not None and one.last is not None:
            began = next(v for v in one.values if v is not None)
            tiles.append({"title": title, "name": name, "value": one.last, "began": began})
    return tiles


@router.get("/runs/{run_id}/step")
def rollouts_of_step(
    request: Request, run_id: str, step: Step, show: Literal["best", "worst", "groups"] = "groups"
) -> RedirectResponse:
    """What a training step was made of: the rollouts that its newest policy version answered."""
    with site_of(request).store.read() as connection:
        read_run(connection, run_id)
        line = read_lineage(connection, run_id)
        owner, number = _sampled_by(connection, line, step)
    place = "groups" if show == "groups" else "trajectories"
    order = None if show == "groups" else show
    wanted = query({"run_id": owner, "policy_number": number, "order": order})
    return RedirectResponse(f"/{place}?{wanted}", status_code=303)


def _sampled_by(connection: Connection, line: Sequence[str], step: int) -> tuple[str, int]:
    """Which run of a line made a step, and the newest policy version that sampled what it trained.

    Where it trained nothing, the version that was served after the step before.
    """
    of = metrics.c
    made = select(of.run_id).where(of.run_id.in_(line), of.step == step).order_by(of.seq.desc()).limit(1)
    owner = connection.scalar(made) or line[-1]
    trained = (
        select(func.max(steps.c.policy_number))
        .join(trained_steps, trained_steps.c.step_id == steps.c.id)
        .where(trained_steps.c.run_id == owner, trained_steps.c.train_step == step)
    )
    if (found := connection.scalar(trained)) is not None:
        return owner, found
    served = select(of.value).where(of.run_id.in_(line), of.name == "policy_version", of.step == step - 1)
    version = connection.scalar(served.order_by(of.seq.desc()).limit(1))
    return owner, max(0, step - 1) if version is None else int(version)


@router.get("/compare")
def compare(request: Request, run: Annotated[list[str] | None, Query()] = None) -> HTMLResponse:
    """Several runs on the same axes, and what their settings differ in.

    Raises:
        ConfigError: none is named, or too many are.
        UnknownRunError: one is not there.
    """
    chosen = list(dict.fromkeys(run or ()))
    if not 1 <= len(chosen) <= MOST_COMPARED:
        raise ConfigError(
            f"{len(chosen)} runs to compare: select 2 to {MOST_COMPARED} of them on the page of all runs"
        )
    with site_of(request).store.read() as connection:
        found = [read_run(connection, run_id) for run_id in chosen]
        lines = [read_lineage(connection, one.id) for one in found]
        names = sorted({name for line in lines for name in metric_names(connection, line)})
        stands = [standing(connection, one) for one in found]
        rewards = [read_series(connection, line, ["reward_mean"]).get("reward_mean") for line in lines]
    charts = charts_of(names)
    return render(
        request,
        "compare.html",
        runs=[
            {"run": one, "now": now, "reward": None if reward is None else reward.last, "series": n % 8 + 1}
            for n, (one, now, reward) in enumerate(zip(found, stands, rewards, strict=True))
        ],
        key_names=[n for chart in charts if chart.key and chart.kind == "lines" for n in chart.names],
        more_names=[n for chart in charts if not chart.key or chart.kind == "bars" for n in chart.needed],
        differences=differences([one.config for one in found]),
        plotly=plotly_url(),
    )


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ: a name and its value in each; what belongs to a process is left out."""
    flat = [dict(_flat(config)) for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    found = [(name, [one.get(name, "\u2013") for one in flat]) for name in names]
    return [
        (name, values)
        for name, values in found
        if len(set(values)) > 1 and not name.startswith("process.") and name != "checkpoints"
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names and their values as text."""
    found: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", _written(value)))
    return found


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
