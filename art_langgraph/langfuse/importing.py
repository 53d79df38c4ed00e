"""Import: production traces of a LangGraph application, from Langfuse into the store.

Invariant: a trace is one trajectory, however often it is imported; what its scores say now is its reward, and
the earlier ones stay in its history. Traces that came from here are left out.

The roots of traces are found by pages, then each new trace is read whole; of those that the store has, only
the scores are asked for. What was written before an error stays; doing it again goes on from there.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from art_core.store.finding import find_run
from art_core.store.records import FeedbackKind
from art_core.store.schema import trajectories
from art_core.store.store import Store
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.ledger import Ledger
from art_langgraph.langfuse.observations import OWN_TAG
from art_langgraph.langfuse.scores import FEEDBACK, REWARD
from art_langgraph.langfuse.traces import (
    Json,
    TraceFilter,
    TraceRecord,
    find_traces,
    read_scores,
    read_trace,
    seconds,
    traces_in_file,
)
from art_langgraph.langfuse.trajectories import (
    SAID,
    Worth,
    said_of,
    trajectory_id_of,
    trajectory_of,
    worth_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What became of an import.

    Attributes:
        imported: ids of the trajectories that are new.
        updated: ids of those whose scores had changed.
        unchanged: traces that were there already.
        running: traces that have not ended yet.
        own: traces that were exported from here.
        failed: why others could not be kept, by trace.
        seconds: that it took.
    """

    imported: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    unchanged: int = 0
    running: int = 0
    own: int = 0
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.imported)} traces imported, {len(self.updated)} with new scores, {self.unchanged} "
            f"unchanged, {self.running} running, {self.own} exported from here, {len(self.failed)} failed; "
            f"{self.seconds:.1f} s"
        )


@dataclass(slots=True)
class _Tally:
    imported: list[str] = field(default_factory=list[str])
    updated: list[str] = field(default_factory=list[str])
    unchanged: int = 0
    running: int = 0
    own: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    newest: datetime | None = None
    oldest_running: datetime | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def until(self) -> datetime | None:
        """Until when everything is here: what still runs must be found the next time."""
        return self.oldest_running or self.newest

    def result(self) -> ImportResult:
        for trace, reason in self.failed.items():
            logger.warning("Langfuse's trace %s was not imported: %s", trace, reason)
        return ImportResult(
            tuple(self.imported),
            tuple(self.updated),
            self.unchanged,
            self.running,
            self.own,
            self.failed,
            time.monotonic() - self.began,
        )


Progress = Callable[[int], None]
"""Called with how many traces have been dealt with."""


def import_from_langfuse(
    store: Store,
    wanted: TraceFilter | None = None,
    *,
    client: LangfuseClient | None = None,
    ledger: Ledger | None = None,
    reward: str = REWARD,
    only_new: bool = False,
    run_id: str | None = None,
    progress: Progress | None = None,
) -> ImportResult:
    """Bring traces into the store as trajectories of text, with their scores as rewards.

    Args:
        store: where they are kept.
        wanted: which traces; None: all of them.
        client: of the project; None: the one that the environment names.
        ledger: remembers until when was imported; None: the one beside the store.
        reward: name of the score that is the reward; other numbers become its components.
        only_new: begin where the last import through the same filter ended, so that older traces are not
            looked at again, nor what has been said of them since.
        run_id: a run of the store to keep them with: its id, or a part of it.
        progress: told how far it is.

    Raises:
        ConfigError: no project is named.
        LangfuseError: the server does not answer, or will not.
        UnknownRunError: there is no such run.
        StoreError: the store cannot be written.
    """
    tally = _Tally()
    wanted = wanted or TraceFilter()
    run_id = None if run_id is None else find_run(store, run_id).id
    with ExitStack() as owned:
        client = client or owned.enter_context(LangfuseClient())
        ledger = ledger or owned.enter_context(Ledger.beside(store))
        destination, key = client.connection.destination, wanted.key()
        last = ledger.newest_import(destination, key)
        if only_new and last is not None and wanted.since is None:
            wanted = wanted.replace(since=datetime.fromisoformat(last))
        for page in find_traces(client, wanted):
            found = [root for root in page if _can_be_had(root, tally)]
            _import_page(store, client, found, tally, reward, run_id)
            if progress is not None:
                progress(len(tally.imported) + len(tally.updated) + tally.unchanged + len(tally.failed))
        until = tally.until
        if until is not None and wanted.limit is None:
            ledger.imported(destination, key, until.isoformat())  # not before: pages come newest first
    return tally.result()


def import_file(
    store: Store, path: str | Path, *, reward: str = REWARD, run_id: str | None = None
) -> ImportResult:
    """Bring the traces of a file into the store; see `import_from_langfuse` and `traces_in_file`.

    Raises:
        TraceFileError: the file cannot be read, or holds something else.
        UnknownRunError: there is no such run.
        StoreError: the store cannot be written.
    """
    tally = _Tally()
    run_id = None if run_id is None else find_run(store, run_id).id
    for record in traces_in_file(path):
        if OWN_TAG in (record.about.get("tags") or ()):
            tally.own += 1
            continue
        if record.observations:
            _keep(store, record, _known(store, [record.id]).get(record.id), tally, reward, run_id, whole=True)
        else:
            tally.failed[record.id] = "it has no observations"
    return tally.result()


def _can_be_had(root: Json, tally: _Tally) -> bool:
    if OWN_TAG in (root.get("tags") or ()):
        tally.own += 1
        return False
    began = datetime.fromisoformat(str(root["startTime"]))
    if root.get("endTime") is None:
        tally.running += 1
        tally.oldest_running = min(began, tally.oldest_running or began)
        return False
    tally.newest = max(began, tally.newest or began)
    return True


def _import_page(
    store: Store,
    client: LangfuseClient,
    roots: Sequence[Json],
    tally: _Tally,
    reward: str,
    run_id: str | None,
) -> None:
    traces = [str(root["traceId"]) for root in roots]
    if not traces:
        return
    scores, known = read_scores(client, traces), _known(store, traces)
    for root, trace in zip(roots, traces, strict=True):
        found = scores.get(trace, ())
        there = known.get(trace)
        if there is not None and not there.went_on(seconds(root["startTime"]) or 0.0):
            # Which of its observations a score is of needs no second look at them: the store has them.
            record, whole = _remembered(store, root, found), False
        else:
            record, whole = read_trace(client, trace, found), True
        _keep(store, record, there, tally, reward, run_id, whole=whole)


def _remembered(store: Store, root: Json, scores: Sequence[Json]) -> TraceRecord:
    """A trace that the store has, as far as its scores need it."""
    trace = str(root["traceId"])
    spans = store.trajectory(trajectory_id_of(trace)).spans
    kinds = {"llm": "GENERATION", "tool": "TOOL", "retriever": "RETRIEVER"}
    observations = tuple(
        {"id": s.id, "type": kinds.get(s.kind, "CHAIN"), "parentObservationId": s.parent_id} for s in spans
    )
    return TraceRecord(trace, observations, tuple(scores))


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store has of a trace.

    Attributes:
        said: what its scores were when they were last looked at, as `said_of` gives it.
        ended: Unix time, seconds.
    """

    said: Json
    ended: float

    def went_on(self, began: float) -> bool:
        """Whether something that began then is newer: the trace was interrupted, and resumed since."""
        return began > self.ended + 1e-3


def _known(store: Store, traces: Sequence[str]) -> dict[str, _Known]:
    ids = {trajectory_id_of(trace): trace for trace in traces}
    c = trajectories.c
    query = select(c.id, c.metadata, c.started_at, c.duration).where(c.id.in_(list(ids)))
    found: dict[str, _Known] = {}
    with store.read() as connection:
        for row in connection.execute(query):
            about: Json = json.loads(row.metadata).get("langfuse") or {}
            said = {name: about[name] for name in SAID if name in about}
            found[ids[row.id]] = _Known(said, row.started_at + (row.duration or 0.0))
    return found


def _keep(
    store: Store,
    record: TraceRecord,
    had: _Known | None,
    tally: _Tally,
    reward: str,
    run_id: str | None,
    *,
    whole: bool,
) -> None:
    name, said, grew = trajectory_id_of(record.id), said_of(record, reward), False
    try:
        if whole:
            trajectory = trajectory_of(record, reward=reward)
            grew = had is not None and had.went_on(trajectory.started_at + (trajectory.duration or 0.0))
            if had is None or grew:
                # What is said of it comes after it: an import that ends in between is made up for.
                about = {k: v for k, v in trajectory.metadata["langfuse"].items() if k not in SAID}
                store.save_trajectory(
                    replace(trajectory, reward=None, metadata={"langfuse": about}), run_id=run_id
                )
        changed = had is None or grew or had.said != said
        if changed:
            _add_feedback(store, name, record.scores)
            _score(store, name, worth_of(record, reward=reward), said)
    except (ValueError, TypeError, KeyError, AttributeError) as odd:  # not what the API describes
        tally.failed[record.id] = f"{type(odd).__name__}: {odd}"
        return
    if had is None:
        tally.imported.append(name)
    elif changed:
        tally.updated.append(name)
    else:
        tally.unchanged += 1


def _score(store: Store, name: str, worth: Worth, said: Json) -> None:
    """Bring a trajectory's reward up to what is said in Langfuse.

    Only when that has changed: what somebody here has said since is the newer word otherwise.
    """
    trajectory = store.trajectory(name)
    components = {**trajectory.components, **worth.components}
    if worth.reward is not None and not trajectory.failed:
        components = dict(worth.components)
        store.score(name, worth.reward, components=components, author=worth.author, explanation=worth.comment)
        trajectory = trajectory.with_reward(worth.reward)
    store.save_trajectory(
        replace(
            trajectory,
            components=components,
            step_rewards={**trajectory.step_rewards, **worth.step_rewards},
            node_rewards={**trajectory.node_rewards, **worth.node_rewards},
            metadata={**trajectory.metadata, "langfuse": {**trajectory.metadata["langfuse"], **said}},
        )
    )


def _add_feedback(store: Store, name: str, scores: Iterable[Json]) -> None:
    """Keep what people said in Langfuse as feedback, once."""
    said = [score for score in scores if score.get("source") == "ANNOTATION"]
    if not said:
        return
    there = {(f.kind, f.value, f.author, f.comment) for f in store.feedback(name)}
    for score in said:
        found = _feedback(score)
        if found is None or found in there:
            continue
        kind, value, author, comment = found
        store.add_feedback(name, kind=kind, value=value, author=author, comment=comment)


def _feedback(score: Json) -> tuple[FeedbackKind, float, str, str] | None:
    value: Any = score.get("value")
    author = str(score.get("authorUserId") or "langfuse")
    words = [str(score["name"]).removeprefix(f"{FEEDBACK}/"), str(score.get("comment") or "")]
    comment = ": ".join(word for word in words if word)
    if score.get("dataType") == "BOOLEAN" and isinstance(value, bool | int | float):
        return FeedbackKind.THUMB, 1.0 if value else -1.0, author, comment
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return FeedbackKind.SCORE, float(value), author, comment
    return None
