"""Traces as Langfuse holds them, read from its API or from a file of them.

Invariant: a trace comes whole, with all its observations and scores, in one form (that of the API's
observations), whatever it was read from.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from pydantic import Field, model_validator

from art_core.config.settings import Settings
from art_core.errors import StoreError
from art_langgraph.langfuse.client import LangfuseClient, LangfuseError

_ROOTS = 100  # traces of one page
_SCORES_OF = 20  # traces whose scores are asked for together: their ids are part of an address

Json = dict[str, Any]


class TraceFileError(LangfuseError, StoreError):
    """A file of traces cannot be read, or holds something else."""


class TraceFilter(Settings):
    """Which traces; what is not set does not narrow them down.

    Attributes:
        tags: they have all of these.
        name: what the trace is called.
        session_id: of this session.
        user_id: of this user.
        environment: of this environment.
        since: they began then or later.
        until: they began before that.
        score: they have a score of this name ...
        score_min: ... which is at least this ...
        score_max: ... and at most this.
        limit: so many, the newest.
    """

    tags: tuple[str, ...] = ()
    name: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    environment: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    score: str | None = None
    score_min: float | None = None
    score_max: float | None = None
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _bounds_have_a_name(self) -> "TraceFilter":
        if self.score is None and (self.score_min is not None or self.score_max is not None):
            raise ValueError("score_min and score_max are bounds of a score: name it (score=...)")
        return self

    def conditions(self) -> list[Json]:
        """As Langfuse's API takes them, for the roots of traces."""
        found: list[Json] = [_condition("boolean", "isRootObservation", "=", True)]
        if self.tags:
            found.append(_condition("arrayOptions", "traceTags", "all of", list(self.tags)))
        for column, value in (
            ("traceName", self.name),
            ("sessionId", self.session_id),
            ("userId", self.user_id),
            ("environment", self.environment),
        ):
            if value is not None:
                found.append(_condition("string", column, "=", value))
        for operator, time in ((">=", self.since), ("<", self.until)):
            if time is not None:
                found.append(_condition("datetime", "startTime", operator, _iso(time)))
        return found

    def key(self) -> str:
        """What tells filters apart, times and limit aside."""
        return self.model_dump_json(exclude={"since", "until", "limit"})


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One trace.

    Attributes:
        id: Langfuse's.
        observations: as the API gives them, in the order in which they began.
        scores: as the API gives them, oldest first.
        about: name, session, user, tags and so on.
    """

    id: str
    observations: tuple[Json, ...]
    scores: tuple[Json, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def roots(self) -> list[Json]:
        """Observations that have no parent in the trace."""
        known = {o["id"] for o in self.observations}
        return [o for o in self.observations if o.get("parentObservationId") not in known]


# -- from the API --------------------------------------------------------------------------------------


def find_traces(client: LangfuseClient, wanted: TraceFilter) -> Iterator[list[Json]]:
    """The roots of the traces that a filter finds, newest first, by pages; one root of each trace.

    Raises:
        LangfuseError: the server does not answer, or will not.
    """
    scored = _scored(client, wanted)
    seen: set[str] = set()
    page: list[Json] = []
    filters = json.dumps(wanted.conditions())
    for root in client.observations(page=_ROOTS, filter=filters):
        trace = root.get("traceId")
        if not trace or trace in seen or (scored is not None and trace not in scored):
            continue
        seen.add(trace)
        page.append(root)
        full = wanted.limit is not None and len(seen) >= wanted.limit
        if len(page) >= _SCORES_OF or full:
            yield page
            page = []
        if full:
            return
    if page:
        yield page


def read_scores(client: LangfuseClient, trace_ids: Sequence[str]) -> dict[str, tuple[Json, ...]]:
    """The scores of traces, by trace; oldest first.

    Raises:
        LangfuseError: the server does not answer, or will not.
    """
    found: dict[str, list[Json]] = defaultdict(list)
    for score in client.scores(trace_id=",".join(trace_ids)):
        subject = score.get("subject") or {}
        trace = subject.get("traceId") or (subject.get("id") if subject.get("kind") == "trace" else None)
        if trace in trace_ids:
            found[cast(str, trace)].append(score)
    return {trace: tuple(sorted(scores, key=_when)) for trace, scores in found.items()}


def read_trace(client: LangfuseClient, trace_id: str, scores: Sequence[Json]) -> TraceRecord:
    """A trace with all its observations.

    Raises:
        LangfuseError: the server does not answer, or will not.
    """
    return _record(trace_id, client.observations(trace_id=trace_id), scores)


def _scored(client: LangfuseClient, wanted: TraceFilter) -> set[str] | None:
    """The traces that have the wanted score; None where none is wanted."""
    if wanted.score is None:
        return None
    bounds: dict[str, Any] = {"value_min": wanted.score_min, "value_max": wanted.score_max}
    bounded = {name: bound for name, bound in bounds.items() if bound is not None}
    if bounded:
        bounded["data_type"] = "NUMERIC"  # the API wants to be told
    found: set[str] = set()
    for score in client.scores(name=wanted.score, **bounded):
        subject = score.get("subject") or {}
        found.add(subject.get("traceId") or subject.get("id") or "")
    return found


# -- from a file ---------------------------------------------------------------------------------------


def traces_in_file(path: str | Path) -> Iterator[TraceRecord]:
    """The traces of a file: JSON or JSON lines of what Langfuse's API or its page exports.

    That is traces with their ``observations`` and ``scores`` inside, or observations (a list of them, or
    ``{"data": [...]}`` as the API answers).

    Raises:
        TraceFileError: the file cannot be read, or holds something else; the message says where.
    """
    loose: dict[str, list[Json]] = defaultdict(list)
    for where, item in _items(Path(path)):
        if isinstance(item.get("observations"), list):
            observations = cast("list[Json]", item["observations"])
            if observations and not isinstance(cast(object, observations[0]), dict):
                raise TraceFileError(
                    f"{path}, {where}: trace {item.get('id')} names its observations without holding them; "
                    "export it with its observations"
                )
            _check(path, where, observations)
            about = {name: item[name] for name in _ABOUT if item.get(name) is not None}
            about |= {"traceName": item.get("name"), "metadata": item.get("metadata")}
            yield _record(str(item.get("id")), observations, item.get("scores") or (), about)
        elif "traceId" in item and "startTime" in item:
            _check(path, where, [item])
            loose[str(item["traceId"])].append(item)
        else:
            keys = ", ".join(sorted(item)[:6])
            raise TraceFileError(
                f"{path}, {where}: neither a trace with its observations nor an observation (it has "
                f"{keys}); export traces with observations, or the observations themselves"
            )
    for trace, observations in loose.items():
        yield _record(trace, observations, ())


def _check(path: str | Path, where: str, observations: Iterable[Json]) -> None:
    for observation in observations:
        missing = [name for name in ("id", "type", "startTime") if not isinstance(observation.get(name), str)]
        if missing:
            raise TraceFileError(
                f"{path}, {where}: an observation has no {', '.join(missing)}; export whole observations"
            )
        try:
            for name in ("startTime", "endTime"):
                seconds(observation.get(name))
        except LangfuseError as odd:
            raise TraceFileError(f"{path}, {where}, observation {observation['id']}: {odd}") from odd


def _items(path: Path) -> Iterator[tuple[str, Json]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as unreadable:
        raise TraceFileError(f"{path} cannot be read: {unreadable}") from unreadable
    try:
        whole: Any = json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", _object(path, f"line {number}", line)
        return
    if isinstance(whole, dict):
        whole = cast(Json, whole).get("data", [whole])
    if not isinstance(whole, list):
        raise TraceFileError(
            f"{path}: expected a list of traces or observations, found {type(whole).__name__}; export traces "
            "with observations"
        )
    for number, item in enumerate(cast("list[Any]", whole), 1):
        if not isinstance(item, dict):
            raise TraceFileError(f"{path}, item {number}: expected an object, found {type(item).__name__}")
        yield f"item {number}", cast(Json, item)


def _object(path: Path, where: str, line: str) -> Json:
    try:
        found: Any = json.loads(line)
    except ValueError as broken:
        raise TraceFileError(f"{path}, {where}: not JSON: {broken}; correct or remove it") from broken
    if not isinstance(found, dict):
        raise TraceFileError(f"{path}, {where}: expected an object, found {type(found).__name__}")
    return cast(Json, found)


# -- both ----------------------------------------------------------------------------------------------

_ABOUT = ("sessionId", "userId", "tags", "environment", "release", "version", "input", "output")


def _record(
    trace_id: str, observations: Iterable[Json], scores: Sequence[Json], about: Json | None = None
) -> TraceRecord:
    found = sorted(observations, key=lambda o: (seconds(o.get("startTime")) or 0.0, o["id"]))
    record = TraceRecord(trace_id, tuple(found), tuple(sorted(scores, key=_when)))
    told: Json = {}
    for o in (*found, *record.roots):
        told |= {name: o[name] for name in ("traceName", *_ABOUT[:6]) if o.get(name)}
    told.pop("version", None)  # an observation's own
    given = {name: value for name, value in (about or {}).items() if value is not None}
    return TraceRecord(record.id, record.observations, record.scores, told | given)


def seconds(time: Any) -> float | None:
    """A time of the API as Unix seconds; None when there is none.

    Raises:
        LangfuseError: it is not a time.
    """
    if not isinstance(time, str):
        return None
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        raise LangfuseError(f"{time!r} is not a time (expected ISO 8601)") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _when(score: Json) -> float:
    return seconds(score.get("timestamp")) or 0.0


def _condition(kind: str, column: str, operator: str, value: Any) -> Json:
    return {"type": kind, "column": column, "operator": operator, "value": value}


def _iso(time: datetime) -> str:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
