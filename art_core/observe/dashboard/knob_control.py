"""Turning a run's live knobs from its page.

Invariant: only a request that a page of this very server made is heard, and only if control was asked for;
what the run's own check would refuse is refused here, by field, and leaves the file as it was.

A turn is written to the same ``knobs.json`` that ``model.turn`` writes, which the run reads before its next
training step; the run then records it as an event.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, select

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.observe.dashboard.page import site_of
from art_core.observe.dashboard.series import read_run
from art_core.rewards.reweighting import weights_to_turn
from art_core.store.records import Event, Run
from art_core.store.schema import trajectories
from art_core.training.knobs import REWARD_WEIGHTS, KnobBoard, Knobs, weight_knob
from art_core.types import Scenario, Trajectory
from art_core.views.text import shown

router = APIRouter()

MOST_BYTES = 10_000
"""Of a request that turns knobs."""

MOST_WEIGHTS = 50
"""Components of rewards that have a field."""

_LOOKED_AT = 32  # newest rollouts whose components can be turned


@router.post("/runs/{run_id}/knobs")
async def turn(request: Request, run_id: str, x_art_control: Annotated[str, Header()] = "") -> JSONResponse:
    """Turn knobs: a JSON object as ``knobs.json`` has it; null goes back to what was configured, or scored.

    The header ``X-ART-Control`` carries the token of the page. Other sites cannot send that header, nor read
    the token.
    """
    site = site_of(request)
    if not site.control:
        return _refused(403, "this dashboard is read-only; start it with --control to turn knobs")
    if not secrets.compare_digest(x_art_control.encode(), site.token.encode()):
        return _refused(
            403, "the page is older than its server, or this request is none of its own; reload it"
        )
    body = await request.body()
    if len(body) > MOST_BYTES:
        return _refused(413, f"{len(body)} bytes: more than any knobs take")
    with site.store.read() as connection:
        run = read_run(connection, run_id)
    try:
        values = json.loads(body)
    except ValueError as unreadable:
        return _refused(422, f"this is no JSON: {unreadable}")
    if not isinstance(values, dict) or not values:
        return _refused(422, "expected a JSON object of knobs and what to turn them to")
    turned = cast("dict[str, Any]", values)
    if wrong := _wrong(turned):
        return JSONResponse({"errors": wrong}, status_code=422)
    try:
        board = _board(run)
        board.turn(**turned)
    except ConfigError as refused:
        return _refused(422, str(refused))
    except OSError as unwritable:
        return _refused(409, f"knobs.json cannot be written: {unwritable}")
    return JSONResponse({"knobs": board.knobs.values()})


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"errors": {"": message}}, status_code=status)


def _wrong(values: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with which knob by itself."""
    found: dict[str, str] = {}
    for name, value in values.items():
        alone: dict[str, Any] = {name[:60]: value}
        if name == REWARD_WEIGHTS and isinstance(value, Mapping):
            weights = cast("Mapping[str, Any]", value)
            alone = {weight_knob(component): {component: weight} for component, weight in weights.items()}
        for field, own in alone.items():
            try:
                Knobs(**{name: own})
            except ConfigError as unusable:
                found[field] = shown(str(unusable).removeprefix("Knobs: "))
    return found


def _board(run: Run) -> KnobBoard:
    """The knobs of a run as its file has them.

    Raises:
        ConfigError: the run does not say where its file is, it is not on this machine, or what is in the
            file cannot be used.
    """
    where = run.config.get("checkpoints")
    if not isinstance(where, str):
        raise ConfigError(
            f"run {run.id} does not say where its checkpoints are; turn its knobs by model.turn()"
        )
    if not Path(where).is_dir():
        raise ConfigError(f"{where} is not on this machine; open the dashboard where the run goes on")
    board = KnobBoard(Path(where), _configured(run))
    refused = [turned.message for turned in board.read() if turned.kind == "knobs_refused"]
    if refused:
        raise ConfigError(f"{'; '.join(refused)}; mend or remove {board.path}")
    return board


def _configured(run: Run) -> TrainConfig:
    """How a run was told to train, as `TrainableModelConfig.train_config` has it.

    Raises:
        ConfigError: its settings are of another version of this software.
    """
    train, rate = run.config.get("train"), run.config.get("learning_rate")
    if isinstance(train, Mapping):
        return TrainConfig(**cast("Mapping[str, Any]", train))
    return TrainConfig() if rate is None else TrainConfig(learning_rate=rate)


def scored_weights(connection: Connection, line: Sequence[str]) -> dict[str, float]:
    """Weights of rewards that can be turned, by component, as the newest rollouts were scored.

    Args:
        connection: of the project's store.
        line: a run and those that it continues.
    """
    of = trajectories.c
    found: dict[str, float] = {}
    left = _LOOKED_AT
    for run_id in reversed(line):  # one by one: the newest of several runs would have to be sorted out
        newest = (
            select(of.reward, of.components, of.metrics, of.step_rewards, of.node_rewards, of.metadata)
            .where(of.run_id == run_id, of.reward.is_not(None))
            .order_by(of.seq.desc())
            .limit(left)
        )
        for row in connection.execute(newest):
            left -= 1
            scored = Trajectory(
                id="",
                scenario=Scenario(""),
                reward=row.reward,
                components=json.loads(row.components),
                metrics=json.loads(row.metrics),
                step_rewards=json.loads(row.step_rewards),
                node_rewards=json.loads(row.node_rewards),
                metadata=json.loads(row.metadata),
            )
            found = {**weights_to_turn(scored), **found}
        if not left:
            break
    return dict(sorted(found.items())[:MOST_WEIGHTS])


def knob_views(run: Run, events: Sequence[Event], scored: Mapping[str, float]) -> dict[str, Any]:
    """The knobs of a run for its page: what is configured, what they were turned to, and where they go.

    Args:
        run: the run.
        events: its turns of knobs, oldest first.
        scored: weights of rewards that have a field, also while nobody turns them; see `scored_weights`.
    """
    problem, now = "", Knobs()
    try:
        now = _board(run).knobs
    except ConfigError as unknown:
        problem = shown(unknown)
        now = _last_turned(events)
    try:
        configured: Mapping[str, Any] = _configured(run).model_dump()
    except ConfigError:  # of another version of the settings
        configured = {}
    return {
        "problem": problem,
        "items": [
            {
                "id": name,
                "name": name,
                "label": name,
                "what": field.description,
                "configured": _written(configured.get(name)),
                "turned": _written(getattr(now, name)),
            }
            for name, field in Knobs.model_fields.items()
            if name != REWARD_WEIGHTS
        ]
        + _weight_views(now.reward_weights or {}, scored),
    }


def _weight_views(turned: Mapping[str, float], scored: Mapping[str, float]) -> list[dict[str, Any]]:
    """A knob for each component of the rewards; names are what users made them, and no ids."""
    return [
        {
            "id": f"reward-weight-{n}",
            "name": weight_knob(component),
            "label": shown(weight_knob(component), 80),
            "what": "weight of this component in what is trained; empty: as it was scored",
            "configured": _written(scored.get(component)),
            "turned": _written(turned.get(component)),
        }
        for n, component in enumerate(dict.fromkeys([*scored, *turned]))
    ]


def _written(value: float | None) -> str | None:
    return None if value is None else f"{value:.12g}"


def _last_turned(events: Sequence[Event]) -> Knobs:
    """What the record says that the knobs were turned to."""
    found: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for event in events:
        name, after = str(event.data.get("name")), event.data.get("after")
        if event.kind == "knob_turned" and name in Knobs.model_fields:
            found[name] = after
        elif event.kind == "knob_turned" and name.startswith(weight_knob("")):
            weights[name.removeprefix(weight_knob(""))] = after
    try:
        return Knobs(**found, reward_weights=weights)
    except ConfigError:
        return Knobs()
