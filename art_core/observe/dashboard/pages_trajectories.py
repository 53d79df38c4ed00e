"""The pages of trajectories: all of them, one, and the parts of one that are fetched when somebody asks.

A trajectory's page holds what fits; long texts, whole requests and tokens come by themselves, as a part of a
page for its script, and as a page of their own without one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from art_core.errors import UnknownTrajectoryError
from art_core.observe.dashboard.blocks import as_text, span_text, step_blocks
from art_core.observe.dashboard.drawing_graph import draw, fitting_shape
from art_core.observe.dashboard.filters import filter_from, run_choices
from art_core.observe.dashboard.live_trajectory import sign_of
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.texts import LIMIT, cut
from art_core.observe.dashboard.token_view import Colour, Part, token_page, tokenizer_of
from art_core.observe.dashboard.trajectory_view import StepItem, sections_of
from art_core.observe.dashboard.visits import visits_of
from art_core.store import Store
from art_core.store.browse import (
    TrajectoryFilter,
    choices,
    count_trajectories,
    graph_shapes,
    list_trajectories,
    trajectory_row,
)
from art_core.store.parts import read_step
from art_core.store.reading import read_runs
from art_core.store.records import TrainedStep
from art_core.store.schema import runs
from art_core.types import Trajectory

router = APIRouter()

SECTIONS = 60
"""Visits that a trajectory's page shows at once."""

WHOLE = 2_000_000
"""Characters of a text that are shown when all of it is asked for."""


@router.get("/trajectories")
def trajectories(request: Request, after: str | None = None) -> HTMLResponse:
    """A list of trajectories, narrowed down by what the address says."""
    store = site_of(request).store
    which = filter_from(request.query_params)
    page = list_trajectories(store, which, after=after)
    return render(
        request,
        "trajectories.html",
        which=which,
        page=page,
        after=after,
        total=count_trajectories(store, which),
        choices=choices(store, which.run_id),
        runs=run_choices(store),
        asked=dict(request.query_params),
    )


@router.get("/trajectories/{trajectory_id:path}/tokens")
def tokens(
    request: Request,
    trajectory_id: str,
    step: str,
    part: Part = "completion",
    page: Annotated[int, Query(ge=0)] = 0,
    colour: Colour = "logprob",
    training: str = "",
) -> HTMLResponse:
    """A step's tokens, a page of them."""
    store = site_of(request).store
    found = read_step(store, trajectory_id, step)
    if found.tokens is None:
        raise UnknownTrajectoryError(
            f"step {step} has no tokens: {found.untrainable or 'the server gave none'}"
        )
    all_trained = store.trained(trajectory_id)
    trained = [one for one in all_trained if one.step_id == step]
    shown = next((one for one in trained if _key(one) == training), trained[-1] if trained else None)
    scale = max((abs(one.advantage) for one in all_trained), default=0.0)
    view = token_page(
        found,
        part,
        page,
        trained=shown,
        advantage_scale=scale,
        tokenizer=tokenizer_of(base_model_of(store, trajectory_row(store, trajectory_id).run_id)),
    )
    return _part(
        request,
        "_tokens.html",
        "Tokens",
        trajectory_id,
        step=found,
        view=view,
        colour=colour,
        trained=[(_key(one), one) for one in trained],
        shown=shown,
        training=_key(shown) if shown else None,
    )


@router.get("/trajectories/{trajectory_id:path}/request")
def whole_request(request: Request, trajectory_id: str, step: str) -> HTMLResponse:
    """All that a step's model was given: messages, tools, sampling parameters."""
    found = read_step(site_of(request).store, trajectory_id, step)
    return _part(
        request,
        "_request.html",
        "Request",
        trajectory_id,
        step=found,
        blocks=[block for block in step_blocks(found, found.messages) if block.given],
        tools=[(_tool_name(tool), as_text(tool)) for tool in found.tools],
        sampling=as_text(found.sampling) if found.sampling else "",
    )


@router.get("/trajectories/{trajectory_id:path}/text")
def whole_text(
    request: Request,
    trajectory_id: str,
    step: str = "",
    block: int = 0,
    span: str = "",
    side: Literal["inputs", "outputs"] = "outputs",
    all_messages: bool = False,
) -> HTMLResponse:
    """A long text, whole."""
    store = site_of(request).store
    if span:
        spans = {one.id: one for one in store.trajectory(trajectory_id).spans}
        if span not in spans:
            raise UnknownTrajectoryError(f"trajectory {trajectory_id} has no span {span}")
        text = span_text(spans[span], side)
    elif all_messages:
        found = read_step(store, trajectory_id, step)
        text = _nth([b.text for b in step_blocks(found, found.messages)], block, trajectory_id)
    else:
        trajectory = store.trajectory(trajectory_id)
        sections = sections_of(trajectory, visits_of(trajectory), ())
        steps = [i for s in sections for i in s.items if isinstance(i, StepItem) and i.step.id == step]
        text = _nth([b.text for i in steps for b in i.blocks], block, trajectory_id)
    return _part(request, "_text.html", "Text", trajectory_id, text=cut(text, WHOLE))


@router.get("/trajectories/{trajectory_id:path}")
def trajectory(
    request: Request, trajectory_id: str, begin: Annotated[int, Query(ge=0, alias="from")] = 0
) -> HTMLResponse:
    """One trajectory: the way through the graph, what was said, what it was worth."""
    store = site_of(request).store
    row = trajectory_row(store, trajectory_id)
    whole = store.trajectory(trajectory_id)
    visits = visits_of(whole)
    shape = fitting_shape(graph_shapes(store, row.run_id), visits)
    trained = store.trained(trajectory_id)
    sections = sections_of(whole, visits, trained)
    begin = min(begin, max(0, len(sections) - 1))
    return render(
        request,
        "trajectory.html",
        row=row,
        sign=sign_of(row),
        trajectory=whole,
        drawing=draw(whole, visits, shape),
        shaped=shape is not None,
        visits=[visit for visit in visits if visit.number],
        sections=sections[begin : begin + SECTIONS],
        begin=begin,
        sections_total=len(sections),
        page_size=SECTIONS,
        scores=store.scores(trajectory_id),
        feedback=store.feedback(trajectory_id),
        trained_in=sorted({(one.run_id, one.train_step) for one in trained}),
        sampled=sum(len(step.tokens.completion) for step in whole.steps if step.tokens),
        prompted=sum(len(step.tokens.prompt) for step in whole.steps if step.tokens),
        beside=_beside(store, whole),
        cut=cut,
        limit=LIMIT,
        metadata=as_text(dict(whole.metadata)) if whole.metadata else "",
        inputs=as_text(dict(whole.scenario.inputs)) if whole.scenario.inputs else "",
    )


def _part(request: Request, template: str, title: str, trajectory_id: str, **values: Any) -> HTMLResponse:
    """A part of a page for a script that asks for one; else a page that holds it."""
    bare = "x-art-part" in request.headers
    values |= {"cut": cut, "trajectory_id": trajectory_id, "title": title, "part_template": template}
    return render(request, template if bare else "part.html", **values)


def _nth(texts: list[str], number: int, trajectory_id: str) -> str:
    if not 0 <= number < len(texts):
        raise UnknownTrajectoryError(f"trajectory {trajectory_id} has no text of that number")
    return texts[number]


def _key(trained: TrainedStep) -> str:
    return f"{trained.run_id}:{trained.train_step}"


def base_model_of(store: Store, run_id: str | None) -> str | None:
    """The base model of a run, where it says."""
    if run_id is None:
        return None
    with store.read() as connection:
        found = read_runs(connection, runs.c.id == run_id)
    named: object = found[0].config.get("base_model") if found else None
    return named if isinstance(named, str) else None


def _beside(store: Store, trajectory: Trajectory) -> dict[str, str | int | None]:
    """The members of its group before and after it."""
    if trajectory.group_id is None:
        return {}
    which = TrajectoryFilter(group_id=trajectory.group_id, order="oldest")
    ids = [row.id for row in list_trajectories(store, which, 500).items]
    if trajectory.id not in ids:
        return {}
    at = ids.index(trajectory.id)
    return {
        "before": ids[at - 1] if at else None,
        "after": ids[at + 1] if at + 1 < len(ids) else None,
        "place": at + 1,
        "size": len(ids),
    }


def _tool_name(tool: Mapping[str, Any]) -> str:
    function: Any = tool.get("function")
    return str(function.get("name", "?")) if isinstance(function, dict) else str(tool.get("name", "?"))
