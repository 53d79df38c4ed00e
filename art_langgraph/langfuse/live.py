"""LangfuseLive: rollouts in Langfuse moments after they end.

Invariant: it sends only what the store holds, so nothing can be dropped: what it did not get to, a later
export sends. It never runs in a rollout's way: it has a thread of its own, and only reads the store.

It looks at what is new in the store every few seconds, from this process or from another. When a trajectory
gets its reward, or a person's score, after it was sent, its scores follow. In memory are the ids of rollouts
that have not ended, and of those that are due.
"""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from art_core.errors import ArtError, ConfigError
from art_core.store.finding import find_run
from art_core.store.marks import Seen, changed, marks, newest
from art_core.store.store import Store
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import Exporter, ExportOptions, ExportResult
from art_langgraph.langfuse.ledger import Ledger

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0  # seconds between looks while the server does not answer


class LangfuseLive:
    """Exports in the background, from when it is entered until it is left.

    Args:
        store: where rollouts are recorded.
        run_id: of this run only: its id, or a part of it.
        connection: which Langfuse project; None: what the environment names.
        options: how trajectories become traces.
        ledger: what was confirmed before; None: the one beside the store.
        interval: seconds between two looks at the store.
        grace: seconds that leaving takes at most, to send what is left.

    Raises:
        ConfigError: no project is named, the ``langfuse`` package is missing, or a time is not above 0.
        UnknownRunError: there is no such run.
    """

    def __init__(
        self,
        store: Store,
        run_id: str | None = None,
        *,
        connection: LangfuseConnection | None = None,
        options: ExportOptions | None = None,
        ledger: Ledger | None = None,
        interval: float = 2.0,
        grace: float = 30.0,
    ) -> None:
        for name, seconds in (("interval", interval), ("grace", grace)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: expected seconds above 0")
        self._store = store
        self._run_id = None if run_id is None else find_run(store, run_id).id
        self._interval = interval
        self._grace = grace
        self._given_up = threading.Event()
        self._leaving = threading.Event()
        self._client = LangfuseClient(connection, stopped=self._given_up)
        self._owned = ledger is None
        self._ledger = ledger or Ledger.beside(store)
        self._exporter = Exporter(store, self._client, self._ledger, options)
        self._thread = threading.Thread(target=self._run, name="langfuse-live", daemon=True)
        self._lock = threading.Lock()
        self._seen: Seen | None = None
        self._due: set[str] = set()
        self._running = 0
        self._confirmed = self._observations = self._scores = 0
        self._seconds = 0.0
        self._failed: dict[str, str] = {}
        self._problem: str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> ExportResult:
        """Send what is left, for at most ``grace`` seconds; closing twice is harmless.

        Returns:
            What was confirmed since it was entered, and what a later export has still to send.
        """
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(self._grace)
            self._given_up.set()  # ends whatever the client waits for
            self._thread.join(self._client.connection.timeout + 5)
        result = self.state
        if not result.complete:
            logger.warning(
                "not everything is in Langfuse yet: %s; `art-langgraph langfuse export` sends the rest",
                result,
            )
        self._client.close()
        if self._owned:
            self._ledger.close()
        return result

    @property
    def state(self) -> ExportResult:
        """What was confirmed so far, what was refused, and what is due."""
        with self._lock:
            return ExportResult(
                confirmed=self._confirmed,
                running=self._running,
                failed=dict(self._failed),
                left=len(self._due) - self._running,
                stopped=self._problem,
                observations=self._observations,
                scores=self._scores,
                requests=self._client.requests,
                seconds=self._seconds,
            )

    # -- in the background -------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._interval
        while True:
            last = self._leaving.is_set()
            well = self._look()
            if self._given_up.is_set() or (last and well):
                return
            pause = self._interval if well else min(_LONGEST_PAUSE, 2 * pause)
            if last:
                self._given_up.wait(min(pause, 1.0))
            else:
                self._leaving.wait(pause)

    def _look(self) -> bool:
        """Send what is new; whether all went well."""
        try:
            result = self._send(self._new())
        except ArtError as problem:
            # A locked store, wrong keys: said once, tried again, and the store keeps everything.
            return self._trouble(str(problem), said=logger.warning)
        except Exception as fault:
            return self._trouble(f"{type(fault).__name__}: {fault}", said=logger.exception)
        return result is None or result.stopped is None

    def _new(self) -> list[str]:
        """What is due, with what is new in the store."""
        if self._seen is None:  # what was there before; `changed` would go through all its steps
            seen = newest(self._store)
            new = [mark.trajectory_id for mark in marks(self._store, self._run_id)]
        else:
            new, seen = changed(self._store, self._seen, self._run_id)
        with self._lock:
            self._due.update(new)
            self._seen = seen
            return list(self._due)

    def _send(self, due: list[str]) -> ExportResult | None:
        if not due:
            return None
        result = self._exporter.export(trajectory_ids=due)
        known = self._ledger.confirmed(self._client.connection.destination, due)
        found = list(marks(self._store, trajectory_ids=due))
        # What has changed again meanwhile stays due, as do rollouts that run.
        there = {name: state.digest for name, state in known.items()}
        waiting = {mark.trajectory_id for mark in found if there.get(mark.trajectory_id) != mark.digest}
        with self._lock:
            self._due = (self._due - set(due)) | (waiting - result.failed.keys())
            self._running = sum(1 for mark in found if not mark.ended)
            self._confirmed += result.confirmed
            self._observations += result.observations
            self._scores += result.scores
            self._seconds += result.seconds
            for trajectory_id in due:
                self._failed.pop(trajectory_id, None)
            self._failed.update(result.failed)  # refused until they change
        for trajectory_id, reason in result.failed.items():
            logger.warning("trajectory %s is not in Langfuse: %s", trajectory_id, reason)
        if result.stopped:
            self._trouble(result.stopped, said=logger.warning)
        elif self._problem is not None:
            logger.info("Langfuse is kept up to date again")
            self._problem = None
        return result

    def _trouble(self, problem: str, said: Callable[..., None]) -> bool:
        if self._problem is None:  # said once, until it is over
            said("Langfuse is not kept up to date for now: %s", problem)
        with self._lock:
            self._problem = problem
        return False
