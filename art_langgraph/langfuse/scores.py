"""What a trajectory was worth, as Langfuse's scores.

Invariant: ids and timestamps follow from what is scored, never from when it was sent or scored again, so that
a new reward replaces the old one; a trajectory without a reward has no score that says 0.

Langfuse replaces a score that comes again with the same id and timestamp; so rewards carry the time at which
their rollout ended, and say in their metadata when they were given.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from art_core.store.records import Feedback, FeedbackKind, Score
from art_core.types import Trajectory
from art_langgraph.langfuse.ids import observation_id, score_id, trace_id
from art_langgraph.langfuse.observations import as_text, node_observations, step_observations

REWARD = "reward"
"""Name of the score that is the reward; a component's is ``reward/<component>``."""

STEP_REWARD = "step_reward"
NODE_REWARD = "node_reward"
FEEDBACK = "feedback"
"""People's scores are ``feedback/thumb``, ``feedback/score`` and ``feedback/choice``."""

_LONGEST_COMMENT = 5_000


def trace_scores(
    trajectory: Trajectory,
    history: Sequence[Score] = (),
    feedback: Sequence[Feedback] = (),
    *,
    environment: str | None = None,
    score_configs: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A trajectory's scores, by the names of Langfuse's API.

    Args:
        trajectory: with its steps and spans.
        history: its rewards, oldest first; the last one tells who gave it, and why.
        feedback: what people said of it.
        environment: Langfuse's environment.
        score_configs: ids of score configs in Langfuse, by the scores' names. People's scores that have one
            are sent as annotations, which Langfuse takes only with a config.
    """
    configs = score_configs or {}
    scores = [*_rewards(trajectory, history), *_of_parts(trajectory), *_of_people(trajectory, feedback)]
    for score in scores:
        score["traceId"] = trace_id(trajectory.id)
        if environment is not None:
            score["environment"] = environment
        if (config := configs.get(score["name"])) is not None:
            score["configId"] = config
            if score["name"].startswith(FEEDBACK):
                score["source"] = "ANNOTATION"
    return scores


def _rewards(trajectory: Trajectory, history: Sequence[Score]) -> Iterator[dict[str, Any]]:
    if trajectory.reward is None:
        return
    last = history[-1] if history else None
    about: dict[str, Any] = {}
    if last is not None:
        about = {"author": last.author, "scored_at": _time(last.created_at)}
    odd = {name: str(value) for name, value in trajectory.components.items() if not math.isfinite(value)}
    if odd:
        about["not_finite"] = odd  # JSON has no such numbers, and so no score can be one
    told: dict[str, Any] = {"metadata": about} if about else {}
    reasons = {name: _reason(trajectory, name) for name in trajectory.components}
    # A judge's only score is the reward, also where nobody wrote its history.
    why = (last.explanation if last else "") or "; ".join(reason for reason in reasons.values() if reason)
    yield _score(trajectory, REWARD, trajectory.reward, comment=why, **told)
    for name, value in trajectory.components.items():
        if math.isfinite(value):
            yield _score(trajectory, f"{REWARD}/{name}", value, comment=reasons[name], **told)


def _reason(trajectory: Trajectory, component: str) -> str:
    """The explanation that a judge left with its component."""
    left: Any = trajectory.metadata.get(component)
    found: Any = cast("Mapping[str, Any]", left).get("explanation") if isinstance(left, Mapping) else None
    return found if isinstance(found, str) else ""


def _of_parts(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    where = step_observations(trajectory) if trajectory.step_rewards else {}
    for step, value in trajectory.step_rewards.items():
        if step in where and math.isfinite(value):
            yield _score(trajectory, STEP_REWARD, value, of=step, observationId=where[step])
    for node, value in trajectory.node_rewards.items():
        if not math.isfinite(value):
            continue
        runs = node_observations(trajectory, node) or [observation_id(trajectory.id, "")]
        for run in runs:
            yield _score(
                trajectory,
                NODE_REWARD,
                value,
                of=f"{node}\n{run}",
                observationId=run,
                metadata={"node": node},
            )


def _of_people(trajectory: Trajectory, feedback: Sequence[Feedback]) -> Iterator[dict[str, Any]]:
    for said in feedback:
        name = f"{FEEDBACK}/{said.kind}"
        about: dict[str, Any] = {"author": said.author}
        value: dict[str, Any] = {"value": said.value, "dataType": "NUMERIC"}
        if said.kind == FeedbackKind.THUMB:
            value = {"value": 1 if said.value > 0 else 0, "dataType": "BOOLEAN"}
        elif said.kind == FeedbackKind.CHOICE:
            value = {"value": "preferred" if said.value > 0.5 else "tie", "dataType": "CATEGORICAL"}
            if said.over is not None:
                about |= {"over": said.over, "over_trace_id": trace_id(said.over)}
        yield {
            "id": score_id(trajectory.id, name, f"{said.author}\n{said.created_at!r}\n{said.over}"),
            "name": name,
            "timestamp": _time(said.created_at),
            "metadata": about,
            **value,
            **_comment(said.comment),
        }


def _score(
    trajectory: Trajectory, name: str, value: float, *, of: str = "", comment: str = "", **more: Any
) -> dict[str, Any]:
    return {
        "id": score_id(trajectory.id, name, of),
        "name": as_text(name),
        "value": value,
        "dataType": "NUMERIC",
        "timestamp": _time(trajectory.started_at + (trajectory.duration or 0.0)),
        **_comment(comment),
        **more,
    }


def _comment(text: str) -> dict[str, str]:
    return {"comment": as_text(text, _LONGEST_COMMENT)} if text else {}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
