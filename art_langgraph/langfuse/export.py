"""Export: what the store holds, into Langfuse.

Invariant: a trajectory is confirmed when the server has accepted all its observations and then all its
scores, in the state that the store had; nothing else is counted as delivered. Whatever happens in between (a
crash, a dead server), doing it again sends what is missing, and what comes twice replaces itself.

The store says what there is, the ledger what was confirmed, and marks what has changed since. Trajectories go
in batches: their observations in one request, their scores in another. What changed in its scores alone sends
these alone: Langfuse takes observations for final. Rollouts know nothing of it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from art_core.config.settings import Settings
from art_core.errors import UnknownTrajectoryError
from art_core.store.finding import find_run
from art_core.store.marks import Mark, marks
from art_core.store.reading import read_trajectories
from art_core.store.schema import trajectories
from art_core.store.store import Store
from art_core.types import Trajectory
from art_langgraph.langfuse.client import LangfuseClient, LangfuseUnavailableError
from art_langgraph.langfuse.delivery import Delivered, Parcel, deliver
from art_langgraph.langfuse.ledger import Confirmed, Ledger
from art_langgraph.langfuse.scores import trace_scores

logger = logging.getLogger(__name__)

_READ = 50  # trajectories in memory beside the batch


class ExportOptions(Settings):
    """How trajectories become traces.

    Attributes:
        trace_name: what every trace is called; Langfuse groups by it.
        tags: given to every trace, beside run, step and policy version.
        metadata: given to every trace.
        score_configs: ids of score configs in Langfuse, by the scores' names; people's scores need one to
            be sent as annotations.
        batch: trajectories of one request at most.
        max_request_bytes: of one request, before it is compressed; Langfuse Cloud takes 5 MB.
        max_text: characters that are kept of one input or output; longer ones say that they were cut.
    """

    trace_name: str = Field(default="rollout", min_length=1, max_length=200)
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    score_configs: dict[str, str] = Field(default_factory=dict[str, str])
    batch: int = Field(default=100, ge=1, le=1000)
    max_request_bytes: int = Field(default=4_000_000, ge=10_000)
    max_text: int = Field(default=200_000, ge=100)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What became of an export.

    Attributes:
        confirmed: trajectories that the server has now accepted whole.
        unchanged: those that it had confirmed before, and that are as they were.
        running: those that have not ended yet.
        failed: why others were refused, by trajectory.
        left: those that could not be delivered for now, or were not tried any more.
        stopped: why it ended before its end; None when it did not.
        observations: that were accepted.
        scores: that were accepted.
        requests: that were sent, repeated ones included.
        seconds: that it took.
    """

    confirmed: int = 0
    unchanged: int = 0
    running: int = 0
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    left: int = 0
    stopped: str | None = None
    observations: int = 0
    scores: int = 0
    requests: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether everything that has ended is in Langfuse."""
        return not self.failed and not self.left

    def __str__(self) -> str:
        said = (
            f"{self.confirmed} trajectories confirmed ({self.observations} observations, {self.scores} "
            f"scores), {self.unchanged} unchanged, {self.running} running, {len(self.failed)} refused, "
            f"{self.left} left; {self.requests} requests in {self.seconds:.1f} s"
        )
        return f"{said}; stopped: {self.stopped}" if self.stopped else said


Progress = Callable[[int, int], None]
"""Called with how many trajectories have been dealt with, and how many there are to send."""


def export_to_langfuse(
    store: Store,
    run_id: str | None = None,
    *,
    trajectory_ids: Sequence[str] | None = None,
    client: LangfuseClient | None = None,
    ledger: Ledger | None = None,
    options: ExportOptions | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Send what Langfuse has not confirmed yet: rollouts that have ended, with what they are worth by now.

    It may be done at any time, also while a run goes on, and again and again: what is there is left alone,
    what has changed (a new reward, a person's score) is replaced.

    Args:
        store: where the trajectories are.
        run_id: of this run only: its id, or a part of it.
        trajectory_ids: these only.
        client: of the project; None: the one that the environment names.
        ledger: what was confirmed before; None: the one beside the store.
        options: how trajectories become traces.
        again: send also what was confirmed before.
        progress: told how far it is.

    Returns:
        What was confirmed, what was refused and why, and what is left. It does not raise for a server that
        fails in between.

    Raises:
        UnknownRunError: there is no such run.
        UnknownTrajectoryError: there is no such trajectory.
        ConfigError: no project is named.
        LangfuseRefusedError: the server does not know the keys, or does not have the endpoints.
        StoreError: the store cannot be read.
    """
    if run_id is not None:
        run_id = find_run(store, run_id).id
    if trajectory_ids is not None:
        there = {mark.trajectory_id for mark in marks(store, trajectory_ids=trajectory_ids)}
        if unknown := [name for name in trajectory_ids if name not in there]:
            raise UnknownTrajectoryError(f"{store.location} has no trajectory {', '.join(unknown[:3])}")
    with ExitStack() as owned:
        client = client or owned.enter_context(LangfuseClient())
        ledger = ledger or owned.enter_context(Ledger.beside(store))
        exporter = Exporter(store, client, ledger, options)
        result = exporter.export(run_id, trajectory_ids=trajectory_ids, again=again, progress=progress)
    for trajectory_id, reason in result.failed.items():
        logger.warning("trajectory %s is not in Langfuse: %s", trajectory_id, reason)
    if result.stopped:
        logger.warning("the export to Langfuse has ended early: %s", result)
    return result


@dataclass(frozen=True, slots=True)
class _Due:
    mark: Mark
    scores_only: bool  # its observations were confirmed, and are as they were


@dataclass(slots=True)
class _Tally:
    confirmed: int = 0
    unchanged: int = 0
    running: int = 0
    observations: int = 0
    scores: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    stopped: str | None = None

    def add(self, delivered: Delivered) -> None:
        self.confirmed += len(delivered.whole)
        self.observations += sum(trace.observations for trace in delivered.whole)
        self.scores += sum(len(trace.scores) for trace in delivered.whole)
        self.failed.update(delivered.refused)


class Exporter:
    """Sends a store's trajectories to one project.

    Args:
        store: where they are.
        client: of the project.
        ledger: what was confirmed before.
        options: how they become traces.
    """

    def __init__(
        self, store: Store, client: LangfuseClient, ledger: Ledger, options: ExportOptions | None = None
    ) -> None:
        # Not before: the client has said if the SDK is missing.
        from art_langgraph.langfuse.encoding import TraceEncoder

        self._store = store
        self._client = client
        self._ledger = ledger
        self._options = options = options or ExportOptions()
        self._encoder = TraceEncoder(
            client.connection,
            name=options.trace_name,
            tags=options.tags,
            metadata=options.metadata,
            max_text=options.max_text,
            max_request_bytes=options.max_request_bytes,
        )

    def export(
        self,
        run_id: str | None = None,
        *,
        trajectory_ids: Sequence[str] | None = None,
        again: bool = False,
        progress: Progress | None = None,
    ) -> ExportResult:
        """Send what has not been confirmed; see `export_to_langfuse`."""
        began, requests, tally = time.monotonic(), self._client.requests, _Tally()
        due = self._due(tally, run_id, trajectory_ids, again)
        told = progress or _untold
        told(0, len(due))
        for batch in self._batches(due, tally):
            try:
                delivered = deliver(batch, self._client)
            except LangfuseUnavailableError as unavailable:
                tally.stopped = str(unavailable)
                break
            self._ledger.confirm(
                self._client.connection.destination, [trace.mark for trace in delivered.whole]
            )
            tally.add(delivered)
            told(tally.confirmed + len(tally.failed), len(due))
        return ExportResult(
            confirmed=tally.confirmed,
            unchanged=tally.unchanged,
            running=tally.running,
            failed=tally.failed,
            left=len(due) - tally.confirmed - len(tally.failed),
            stopped=tally.stopped,
            observations=tally.observations,
            scores=tally.scores,
            requests=self._client.requests - requests,
            seconds=time.monotonic() - began,
        )

    def due(self, run_id: str | None = None) -> ExportResult:
        """What an export would find, without sending anything: ``left`` is what it would send."""
        tally = _Tally()
        due = self._due(tally, run_id, None, again=False)
        return ExportResult(unchanged=tally.unchanged, running=tally.running, left=len(due))

    def _due(
        self, tally: _Tally, run_id: str | None, trajectory_ids: Sequence[str] | None, again: bool
    ) -> list[_Due]:
        due: list[_Due] = []
        ended: list[Mark] = []
        for mark in marks(self._store, run_id, trajectory_ids=trajectory_ids):
            if mark.ended:
                ended.append(mark)
            else:
                tally.running += 1
        known: dict[str, Confirmed] = {}
        if not again:
            known = self._ledger.confirmed(
                self._client.connection.destination, [mark.trajectory_id for mark in ended]
            )
        for mark in ended:
            there = known.get(mark.trajectory_id)
            if there is not None and there.digest == mark.digest:
                tally.unchanged += 1
            else:
                due.append(_Due(mark, there is not None and there.recorded == mark.recorded))
        return due

    # -- preparing ---------------------------------------------------------------------------------

    def _batches(self, due: Sequence[_Due], tally: _Tally) -> Iterator[list[Parcel]]:
        batch: list[Parcel] = []
        size = 0
        for trace in self._prepared(due, tally):
            full = len(batch) >= self._options.batch or size + trace.size > self._options.max_request_bytes
            if batch and full:
                yield batch
                batch, size = [], 0
            batch.append(trace)
            size += trace.size
        if batch:
            yield batch

    def _prepared(self, due: Sequence[_Due], tally: _Tally) -> Iterator[Parcel]:
        for start in range(0, len(due), _READ):
            page = due[start : start + _READ]
            with self._store.read() as connection:
                ids = [one.mark.trajectory_id for one in page]
                found = read_trajectories(connection, [trajectories.c.id.in_(ids)])
            by_id = {trajectory.id: trajectory for trajectory in found}
            for one in page:
                try:
                    prepared = self._prepare(one, by_id[one.mark.trajectory_id])
                except Exception as odd:  # one odd trajectory must not keep the others
                    tally.failed[one.mark.trajectory_id] = f"cannot be encoded: {type(odd).__name__}: {odd}"
                    continue
                yield prepared

    def _prepare(self, one: _Due, trajectory: Trajectory) -> Parcel:
        mark = one.mark
        trace = None if one.scores_only else self._encoder.encode(trajectory, run_id=mark.run_id)
        scores = trace_scores(
            trajectory,
            self._store.scores(trajectory.id) if mark.has_scores else (),
            self._store.feedback(trajectory.id) if mark.has_feedback else (),
            environment=self._client.connection.environment,
            score_configs=self._options.score_configs,
        )
        if trace is None:
            return Parcel(mark, (), 0, scores)
        return Parcel(mark, trace.requests, trace.observations, scores)


def _untold(_done: int, _total: int) -> None:
    pass
