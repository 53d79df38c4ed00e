"""A Langfuse server without Langfuse: real HTTP on loopback, what came in as data, faults on demand.

It speaks what Langfuse's SDK 5 speaks: OTLP over HTTP (protobuf, gzip), scores in batches, observations and
scores by pages, prompts, projects. What comes twice replaces what was there, by the rules of Langfuse:
an observation by trace, id and start; a score by id and timestamp.
"""

import base64
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PUBLIC_KEY, SECRET_KEY = "pk-test", "sk-test"

_GROUPS = {
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


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests to a path.

    Attributes:
        path: beginning of the paths that it hits.
        times: how many requests; None: all of them, until `LangfuseServer.mend`.
        status: the answer's; 0 cuts the connection.
        retry_after: seconds or a date, in the answer's header.
        delay: seconds before the answer.
        until: the answer waits for this event.
        applied: what came in is kept first: the client cannot know.
        after: so many requests are served well before.
    """

    path: str = "/"
    times: int | None = 1
    status: int = 500
    retry_after: str | None = None
    delay: float = 0.0
    until: threading.Event | None = None
    applied: bool = False
    after: int = 0


@dataclass(slots=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    at: float


@dataclass(slots=True)
class LangfuseServer:
    """Started with ``with``; `base_url` is where it is.

    Attributes:
        observations: by trace, id and start, as the API would give them.
        scores: by id and timestamp, as they came.
        refused_scores: names of scores that are refused.
        refused_observations: names of observations that are refused.
        largest: bytes of a request that are taken.
        prompts: by name, then version: what the API answers.
    """

    observations: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    scores: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    refused_scores: set[str] = field(default_factory=set)
    refused_observations: set[str] = field(default_factory=set)
    public_key: str = PUBLIC_KEY
    largest: int = 5_000_000
    prompts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    page: int = 1000
    _lock: Any = field(default_factory=threading.RLock)
    _server: Any = None
    _thread: Any = None

    def __enter__(self) -> Self:
        outer = self

        class Handler(_Handler):
            fake = outer

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- what tests use ----------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def break_(self, **fault: Any) -> None:
        self.faults.append(Fault(**fault))

    def mend(self) -> None:
        self.faults.clear()

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

    def requests(self, path: str) -> list[Asked]:
        return [a for a in self.asked if a.path.startswith(path)]

    # -- what the server does ----------------------------------------------------------------------

    def fault(self, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if not path.startswith(fault.path):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    return None
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times == 0:
                        self.faults.remove(fault)
                return fault
        return None

    def take_spans(self, body: bytes) -> ExportTraceServiceResponse:
        response, refused = ExportTraceServiceResponse(), []
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {a.key: _value(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name in self.refused_observations:
                        refused.append(span.name)
                        continue
                    found = _observation(span, about)
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
        conditions = json.loads(query["filter"]) if "filter" in query else _plain_conditions(query)
        found = [o for o in found if all(_meets(o, condition) for condition in conditions)]
        limit = min(int(query.get("limit", 50)), self.page)
        start = int(base64.b64decode(query["cursor"]).decode()) if "cursor" in query else 0
        groups = [g for g in query.get("fields", "core,basic").split(",") if g]
        names = {name for group in {"core", *groups} for name in _GROUPS[group]}
        whole = set(query.get("expandMetadata", "").split(","))
        data = [_shown(o, names, whole) for o in found[start : start + limit]]
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
        return {"data": [_score(s) for s in found[start : start + limit]], "meta": meta}

    def prompt(self, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        for prompt in reversed(self.prompts.get(name, [])):
            if "version" in query:
                if prompt["version"] == int(query["version"]):
                    return prompt
            elif query.get("label", "production") in prompt["labels"]:
                return prompt
        return None


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away is what some tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: LangfuseServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(lambda: self._read())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._serve(lambda: self._written(body))

    def _serve(self, answer: Callable[[], None]) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.where, self.query = parts.path, query
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.fake.asked.append(Asked(self.command, parts.path, query, headers, time.monotonic()))
        fault = self.fake.fault(parts.path)
        self.quiet = fault is not None
        if fault is not None:
            if fault.applied:
                answer()
            time.sleep(fault.delay)
            if fault.until is not None:
                fault.until.wait(120)
            self.quiet = False
            if fault.status == 0:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            elif fault.status == 200:
                answer()
            else:
                more = {} if fault.retry_after is None else {"retry-after": fault.retry_after}
                self._json(fault.status, {"message": "as the test wants it"}, more)
            return
        expected = "Basic " + base64.b64encode(f"{self.fake.public_key}:{SECRET_KEY}".encode()).decode()
        if headers.get("authorization") != expected:
            self._json(401, {"message": "Invalid credentials"})
            return
        answer()

    def _written(self, body: bytes) -> None:
        if len(body) > self.fake.largest:
            self._json(413, {"message": "too large"})
        elif self.where == "/api/public/otel/v1/traces":
            assert self.headers["content-type"] == "application/x-protobuf"
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            response = self.fake.take_spans(body)
            self._answer(200, response.SerializeToString(), "application/x-protobuf")
        elif self.where == "/api/public/scores":
            self._json(*self.fake.take_scores(json.loads(body)))
        else:
            self._json(404, {"message": f"no {self.where}"})

    def _read(self) -> None:
        prompts = "/api/public/v2/prompts/"
        if self.where == "/api/public/v2/observations":
            self._json(200, self.fake.list_observations(self.query))
        elif self.where == "/api/public/v3/scores":
            self._json(200, self.fake.list_scores(self.query))
        elif self.where == "/api/public/projects":
            project = {"id": "p", "name": "test", "organization": {"id": "o", "name": "o"}, "metadata": {}}
            self._json(200, {"data": [project]})
        elif self.where.startswith(prompts):
            found = self.fake.prompt(unquote(self.where.removeprefix(prompts)), self.query)
            self._json(200 if found else 404, found or {"message": "Prompt not found"})
        else:
            self._json(404, {"message": f"no {self.where}"})

    def _json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json", headers)

    def _answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        if self.quiet:
            return
        self.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


# -- what came in, as the API gives it ---------------------------------------------------------------


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat().replace("+00:00", "Z")


def _observation(span: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    given = {a.key: _value(a.value) for a in span.attributes}
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


def _score(score: Mapping[str, Any]) -> dict[str, Any]:
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


def _shown(observation: Mapping[str, Any], names: set[str], whole: set[str]) -> dict[str, Any]:
    shown = {name: observation[name] for name in names}
    if "metadata" in shown:
        shown["metadata"] = {k: v if k in whole else _cut(v) for k, v in observation["metadata"].items()}
    return shown


def _cut(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= 200 else text[:200]


def _plain_conditions(query: Mapping[str, str]) -> Iterator[dict[str, Any]] | list[dict[str, Any]]:
    columns = {"traceId": "traceId", "sessionId": "sessionId", "name": "name", "type": "type"}
    found = [{"column": c, "operator": "=", "value": query[q]} for q, c in columns.items() if q in query]
    if "isRootObservation" in query:
        root = query["isRootObservation"].lower() == "true"
        found.append({"column": "isRootObservation", "operator": "=", "value": root})
    return found


def _meets(observation: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
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
