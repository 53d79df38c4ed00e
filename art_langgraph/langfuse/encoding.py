"""A trajectory as OTLP requests, ready to be sent.

Invariant: the requests of a trajectory hold each of its observations once, none is larger than asked for,
and encoding the same trajectory again gives the same bytes.

Requests are serialised ``ExportTraceServiceRequest`` messages, whose only field is repeated: laid end to end,
several are one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from langfuse import LangfuseOtelSpanAttributes as Name
from langfuse import __version__ as sdk_version
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from art_core.types import Trajectory
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.observations import OWN_TAG, Observation, as_json, as_text, observations

_LONGEST_TAG = 200  # characters that Langfuse takes of a tag, a session's id or a name
_LATEST = 2**63 - 1  # nanoseconds: in the year 2262
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class EncodedTrace:
    """A trajectory's observations.

    Attributes:
        requests: in order; most trajectories need one.
        observations: how many they hold.
    """

    requests: tuple[bytes, ...]
    observations: int


class TraceEncoder:
    """Encodes trajectories.

    Args:
        connection: whose project they are for.
        name: what every trace is called.
        tags: given to every trace.
        metadata: given to every trace.
        max_text: characters that are kept of one input or output; longer ones say that they were cut.
        max_request_bytes: of one request, before it is compressed.
    """

    def __init__(
        self,
        connection: LangfuseConnection,
        *,
        name: str = "rollout",
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        max_text: int = 200_000,
        max_request_bytes: int = 4_000_000,
    ) -> None:
        about = {Name.ENVIRONMENT: connection.environment, Name.RELEASE: connection.release}
        self._resource = Resource({k: v for k, v in about.items() if v is not None})
        # The server reads values as the SDK writes them when the scope is the SDK's.
        self._scope = InstrumentationScope(
            "langfuse-sdk", sdk_version, attributes={"public_key": connection.public_key}
        )
        self._name = name
        self._tags = tuple(tags)
        self._metadata = dict(metadata or {})
        self._max_text = max_text
        self._max_request_bytes = max_request_bytes

    def encode(self, trajectory: Trajectory, *, run_id: str | None = None) -> EncodedTrace:
        """A trajectory's requests.

        Args:
            trajectory: with its steps.
            run_id: the run that it belongs to.
        """
        found = observations(trajectory, name=self._name)
        shared = self._shared(trajectory, run_id)
        whole = {**shared, **self._of_trace(trajectory, run_id)}
        trace = int(trace_id(trajectory.id), 16)
        spans = [self._span(trace, o, whole if o.parent is None else shared) for o in found]
        return EncodedTrace(tuple(self._requests(spans)), len(found))

    def _requests(self, spans: Sequence[ReadableSpan]) -> list[bytes]:
        request = encode_spans(spans).SerializeToString()
        if len(request) <= self._max_request_bytes or len(spans) == 1:
            return [request]
        half = len(spans) // 2
        return self._requests(spans[:half]) + self._requests(spans[half:])

    def _shared(self, trajectory: Trajectory, run_id: str | None) -> dict[str, Any]:
        """What every observation says of its trace, so that it can be found by it."""
        versions = sorted({step.policy for step in trajectory.steps if step.policy is not None})
        tags = [OWN_TAG, *self._tags]
        tags += [f"run:{run_id}"] if run_id else []
        tags += [f"policy:{version}" for version in versions]
        tags += [f"step:{versions[-1].number}"] if versions else []
        tags += [f"failed:{trajectory.failure.cause}"] if trajectory.failure else []
        shared: dict[str, Any] = {
            Name.TRACE_NAME: self._name[:_LONGEST_TAG],
            Name.TRACE_TAGS: [as_text(tag)[:_LONGEST_TAG] for tag in tags],
        }
        if trajectory.group_id:
            shared[Name.TRACE_SESSION_ID] = as_text(trajectory.group_id)[:_LONGEST_TAG]
        return shared

    def _of_trace(self, trajectory: Trajectory, run_id: str | None) -> dict[str, Any]:
        art = {
            "trajectory_id": trajectory.id,
            "run_id": run_id,
            "group_id": trajectory.group_id,
            "scenario_id": trajectory.scenario.id,
            "status": trajectory.status.value,
            "faults": dict(trajectory.faults) or None,
        }
        given: dict[str, Any] = {
            **self._metadata,
            **trajectory.scenario.metadata,
            **trajectory.metadata,
            **({"metrics": dict(trajectory.metrics)} if trajectory.metrics else {}),
            "art": {key: value for key, value in art.items() if value is not None},
        }
        return {
            f"{Name.TRACE_METADATA}.{as_text(key)}": self._json(value)
            for key, value in given.items()
            if value is not None
        }

    def _span(self, trace: int, o: Observation, shared: Mapping[str, Any]) -> ReadableSpan:
        message = as_text(o.status_message, self._max_text) if o.status_message else None
        attributes: dict[str, Any] = {
            **shared,
            Name.OBSERVATION_TYPE: o.kind,
            Name.OBSERVATION_LEVEL: o.level,
            Name.OBSERVATION_STATUS_MESSAGE: message,
            Name.OBSERVATION_INPUT: None if o.input is None else as_text(o.input, self._max_text),
            Name.OBSERVATION_OUTPUT: None if o.output is None else as_text(o.output, self._max_text),
            Name.VERSION: as_text(o.version) if o.version else None,
            Name.OBSERVATION_MODEL: as_text(o.model) if o.model else None,
            Name.OBSERVATION_MODEL_PARAMETERS: as_text(o.model_parameters) if o.model_parameters else None,
            Name.OBSERVATION_USAGE_DETAILS: as_text(o.usage) if o.usage else None,
            Name.OBSERVATION_COMPLETION_START_TIME: (
                None if o.first_token_at is None else _time(o.first_token_at)
            ),
        }
        if o.prompt is not None:
            attributes[Name.OBSERVATION_PROMPT_NAME], attributes[Name.OBSERVATION_PROMPT_VERSION] = o.prompt
        for key, value in o.metadata.items():
            attributes[f"{Name.OBSERVATION_METADATA}.{as_text(key)}"] = (
                None if value is None else self._json(value)
            )
        started = _nanoseconds(o.started_at)
        return ReadableSpan(
            name=as_text(o.name)[:_LONGEST_TAG] or o.kind,
            context=_context(trace, o.id),
            parent=None if o.parent is None else _context(trace, o.parent),
            resource=self._resource,
            attributes={key: value for key, value in attributes.items() if value is not None},
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, message) if o.level == "ERROR" else Status(),
            start_time=started,
            end_time=max(started, _nanoseconds(o.ended_at)),
            instrumentation_scope=self._scope,
        )

    def _json(self, value: Any) -> str:
        return as_text(as_json(value), self._max_text)


def _time(unix: float) -> str:
    """A moment as the SDK writes it into an attribute: ISO 8601, as JSON."""
    moment = datetime.fromtimestamp(_nanoseconds(unix) / 1e9, UTC)
    return json.dumps(moment.isoformat(timespec="microseconds").replace("+00:00", "Z"))


def _nanoseconds(unix: float) -> int:
    return min(max(0, int(unix * 1e9)), _LATEST)


def _context(trace: int, span: str) -> SpanContext:
    return SpanContext(trace, int(span, 16), is_remote=False, trace_flags=_SAMPLED)
