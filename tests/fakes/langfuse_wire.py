"""Langfuse's wire format: spans and scores as its API gives them back, conditions, groups of fields."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

GROUPS = {
    "core": ("id", "traceId", "startTime", "endTime", "projectId", "parentObservationId", "type"),
    "basic": (
        "name", "level", "statusMessage", "version", "environment", "userId", "sessionId",
        "isRootObservation",
    ),
    "time": ("completionStartTime", "createdAt", "updatedAt"),
    "io": ("input", "output"),
    "metadata": ("metadata",),
    "model": ("model", "modelParameters"),
    "usage": ("usageDetails",),
    "prompt": ("promptName", "promptVersion"),
    "trace_context": ("tags", "release", "traceName"),
}  # fmt: skip
"""Fields of an observation, by the groups in which they are asked for."""


def plain_value(value: Any) -> Any:
    """A protobuf attribute's value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat().replace("+00:00", "Z")


def observation_of(span: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """A span, and what is known of its resource, as an observation."""
    given = {a.key: plain_value(a.value) for a in span.attributes}
    observation = "langfuse.observation."
    parent = span.parent_span_id.hex() or None
    metadata: dict[str, Any] = {}
    for prefix in ("langfuse.trace.metadata.", f"{observation}metadata."):
        metadata |= {k.removeprefix(prefix): _json(v) for k, v in given.items() if k.startswith(prefix)}
    return {
        "id": span.span_id.hex(),
        "traceId": span.trace_id.hex(),
        "startTime": _time(span.start_time_unix_nano),
        "endTime": _time(span.end_time_unix_nano) if span.end_time_unix_nano else None,
        "projectId": "p",
        "parentObservationId": parent,
        "type": given.get(f"{observation}type", "span").upper(),
        "name": span.name,
        "level": given.get(f"{observation}level", "DEFAULT"),
        "statusMessage": given.get(f"{observation}status_message"),
        "version": given.get("langfuse.version"),
        "environment": about.get("langfuse.environment") or given.get("langfuse.environment") or "default",
        "userId": given.get("user.id"),
        "sessionId": given.get("session.id"),
        "isRootObservation": parent is None or bool(given.get("langfuse.internal.is_app_root")),
        "completionStartTime": _json(given.get(f"{observation}completion_start_time")),
        "createdAt": _time(time.time_ns()),
        "updatedAt": _time(time.time_ns()),
        "input": given.get(f"{observation}input"),
        "output": given.get(f"{observation}output"),
        "metadata": metadata,
        "model": given.get(f"{observation}model.name"),
        "modelParameters": _json(given.get(f"{observation}model.parameters")),
        "usageDetails": _json(given.get(f"{observation}usage_details")),
        "promptName": given.get(f"{observation}prompt.name"),
        "promptVersion": given.get(f"{observation}prompt.version"),
        "tags": given.get("langfuse.trace.tags") or [],
        "release": about.get("langfuse.release"),
        "traceName": given.get("langfuse.trace.name"),
    }


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def score_of(score: Mapping[str, Any]) -> dict[str, Any]:
    """A score that came in, as it is given back."""
    kind = score.get("dataType", "NUMERIC")
    value = score["value"]
    subject: dict[str, Any] = {"kind": "trace", "id": score["traceId"]}
    if "observationId" in score:
        subject = {"kind": "observation", "id": score["observationId"], "traceId": score["traceId"]}
    return {
        "id": score["id"],
        "projectId": "p",
        "name": score["name"],
        "value": bool(value) if kind == "BOOLEAN" else value,
        "dataType": kind,
        "source": score.get("source", "API"),
        "timestamp": score["timestamp"],
        "environment": score.get("environment", "default"),
        "createdAt": score["timestamp"],
        "updatedAt": score["timestamp"],
        "comment": score.get("comment"),
        "metadata": score.get("metadata"),
        "authorUserId": score.get("authorUserId"),
        "subject": subject,
    }


# -- what is asked for -------------------------------------------------------------------------------


def with_fields(observation: Mapping[str, Any], names: set[str], whole: set[str]) -> dict[str, Any]:
    """An observation's fields of these names; long metadata is cut but for those that are wanted whole."""
    shown = {name: observation[name] for name in names}
    if "metadata" in shown:
        shown["metadata"] = {k: v if k in whole else _cut(v) for k, v in observation["metadata"].items()}
    return shown


def _cut(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= 200 else text[:200]


def plain_conditions(query: Mapping[str, str]) -> Iterator[dict[str, Any]] | list[dict[str, Any]]:
    """The conditions that a query's parameters stand for."""
    columns = {"traceId": "traceId", "sessionId": "sessionId", "name": "name", "type": "type"}
    found = [{"column": c, "operator": "=", "value": query[q]} for q, c in columns.items() if q in query]
    if "isRootObservation" in query:
        root = query["isRootObservation"].lower() == "true"
        found.append({"column": "isRootObservation", "operator": "=", "value": root})
    return found


def meets(observation: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    """Whether an observation meets a condition of a filter."""
    column = {"traceTags": "tags"}.get(condition["column"], condition["column"])
    value, operator, found = condition.get("value"), condition["operator"], observation[column]
    if condition.get("type") == "datetime":
        found, value = datetime.fromisoformat(found), datetime.fromisoformat(value)
    if condition.get("type") == "stringObject":
        found = found.get(condition["key"])
    return {
        "=": lambda: found == value,
        ">": lambda: found > value,
        ">=": lambda: found >= value,
        "<": lambda: found < value,
        "<=": lambda: found <= value,
        "any of": lambda: bool(set(found if isinstance(found, list) else [found]) & set(value)),
        "all of": lambda: set(value) <= set(found),
        "none of": lambda: not set(found if isinstance(found, list) else [found]) & set(value),
        "contains": lambda: value in (found or ""),
        "starts with": lambda: (found or "").startswith(value),
    }[operator]()
