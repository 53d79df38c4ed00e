"""What a Langfuse project holds: observations, scores and prompts as they came in, and what is found there.

What comes twice replaces what was there, by the rules of Langfuse: an observation by trace, id and start; a
score by id and timestamp.
"""

import base64
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fakes.langfuse_wire import (
    GROUPS,
    meets,
    observation_of,
    plain_conditions,
    plain_value,
    score_of,
    with_fields,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(slots=True)
class LangfuseProject:
    """The project.

    Attributes:
        observations: by trace, id and start, as the API would give them.
        scores: by id and timestamp, as they came.
        refused_scores: names of scores that are refused.
        refused_observations: names of observations that are refused.
        prompts: by name, then version: what the API answers.
        page: most observations that one answer holds.
    """

    observations: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    scores: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    refused_scores: set[str] = field(default_factory=set)
    refused_observations: set[str] = field(default_factory=set)
    prompts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    page: int = 1000
    _lock: Any = field(default_factory=threading.RLock)

    # -- what tests look at ------------------------------------------------------------------------

    def trace(self, trace_id: str) -> dict[str, dict[str, Any]]:
        """A trace's observations, by name."""
        return {o["name"]: o for o in self.of_trace(trace_id)}

    def of_trace(self, trace_id: str) -> list[dict[str, Any]]:
        with self._lock:
            return [o for (trace, _, _), o in self.observations.items() if trace == trace_id]

    @property
    def trace_ids(self) -> set[str]:
        with self._lock:
            return {trace for trace, _, _ in self.observations}

    def scores_of(self, trace_id: str) -> list[dict[str, Any]]:
        with self._lock:
            return [s for s in self.scores.values() if s["traceId"] == trace_id]

    # -- what comes in and is asked for ------------------------------------------------------------

    def take_spans(self, body: bytes) -> ExportTraceServiceResponse:
        response, refused = ExportTraceServiceResponse(), []
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {a.key: plain_value(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name in self.refused_observations:
                        refused.append(span.name)
                        continue
                    found = observation_of(span, about)
                    key = (found["traceId"], found["id"], span.start_time_unix_nano)
                    with self._lock:
                        self.observations[key] = found
        if refused:
            response.partial_success.rejected_spans = len(refused)
            response.partial_success.error_message = f"refused: {', '.join(refused)}"
        return response

    def take_scores(self, scores: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        errors: list[dict[str, str]] = []
        for score in scores:
            if score["name"] in self.refused_scores:
                errors.append({"message": f"no config takes {score['name']}"})
                continue
            if score.get("source") == "ANNOTATION" and "configId" not in score:
                errors.append({"message": "an annotation needs a configId"})
                continue
            with self._lock:
                self.scores[score["id"], score["timestamp"]] = score
        if not errors:
            return 202, {"message": "Accepted"}
        return 207, {"accepted": len(scores) - len(errors), "rejected": len(errors), "errors": errors}

    def list_observations(self, query: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            found = sorted(self.observations.values(), key=lambda o: (o["startTime"], o["id"]), reverse=True)
        conditions = json.loads(query["filter"]) if "filter" in query else plain_conditions(query)
        found = [o for o in found if all(meets(o, condition) for condition in conditions)]
        limit = min(int(query.get("limit", 50)), self.page)
        start = int(base64.b64decode(query["cursor"]).decode()) if "cursor" in query else 0
        groups = [g for g in query.get("fields", "core,basic").split(",") if g]
        names = {name for group in {"core", *groups} for name in GROUPS[group]}
        whole = set(query.get("expandMetadata", "").split(","))
        data = [with_fields(o, names, whole) for o in found[start : start + limit]]
        meta = {"cursor": base64.b64encode(str(start + limit).encode()).decode()}
        return {"data": data, "meta": meta if start + limit < len(found) else {}}

    def list_scores(self, query: Mapping[str, str]) -> dict[str, Any]:
        traces = set(query.get("traceId", "").split(",")) - {""}
        with self._lock:
            found = [s for s in self.scores.values() if not traces or s.get("traceId") in traces]
        if "name" in query:
            found = [s for s in found if s["name"] in query["name"].split(",")]
        if "valueMin" in query:
            found = [s for s in found if s["value"] >= float(query["valueMin"])]
        if "valueMax" in query:
            found = [s for s in found if s["value"] <= float(query["valueMax"])]
        limit, start = int(query.get("limit", 50)), int(query.get("cursor", 0))
        if limit > 100:
            raise ValueError("limit must not be above 100")
        meta: dict[str, Any] = {"limit": limit}
        if start + limit < len(found):
            meta["cursor"] = str(start + limit)
        return {"data": [score_of(s) for s in found[start : start + limit]], "meta": meta}

    def prompt(self, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        for prompt in reversed(self.prompts.get(name, [])):
            if "version" in query:
                if prompt["version"] == int(query["version"]):
                    return prompt
            elif query.get("label", "production") in prompt["labels"]:
                return prompt
        return None
