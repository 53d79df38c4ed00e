"""The page that audits a run's rewards.

Invariant: an audit reads and changes nothing; it is made once for the same rollouts and the same words of
people, however often its page is opened, and never more than one at a time.

The first request for it starts a thread and is answered with its progress; the page asks again until there is
a report. Neither the reward function nor a judge is at hand here: ``art-langgraph audit`` can ask those.
"""

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Select, func, select

from art_core.errors import ArtError
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.series import read_run
from art_core.rewards.audit import AuditReport, audit
from art_core.rewards.labels import labels_of
from art_core.store import Store
from art_core.store.schema import feedback, groups, scores, trajectories
from art_core.types import TrajectoryGroup

router = APIRouter()

GROUPS = 60
"""The newest groups, which an audit looks at unless it is told otherwise."""

MOST_GROUPS = 500

AT_ONCE = 0.4
"""Seconds that a page waits for an audit before it shows progress instead."""

_KEPT = 20  # reports in memory

Key = tuple[str, int, int, int, int]
"""Run, groups, and the newest group, score and feedback: what an audit's outcome depends on."""


@dataclass(slots=True, eq=False)
class _Job:
    """An audit under way, or its outcome; by its number a page finds it again although the run goes on."""

    number: int = 0
    total: int = 0
    read: int = 0
    report: AuditReport | None = None
    problem: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Audits:
    """The audits of one dashboard."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Key, _Job] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._numbers = itertools.count(1)

    def known(self, number: int, run_id: str) -> _Job | None:
        """The audit of a run that has this number, if it is still in memory."""
        with self._lock:
            return next((j for k, j in self._jobs.items() if j.number == number and k[0] == run_id), None)

    def job(self, store: Store, key: Key) -> _Job:
        """The audit for a key, begun now if nobody asked for it before."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(next(self._numbers))
                work = threading.Thread(
                    target=self._work, args=(store, key, job), name="art-audit", daemon=True
                )
                work.start()
            self._jobs.move_to_end(key)
            while len(self._jobs) > _KEPT:
                self._jobs.popitem(last=False)
            return job

    def _work(self, store: Store, key: Key, job: _Job) -> None:
        run_id, count, *_ = key
        try:
            with self._turn:
                found: list[TrajectoryGroup] = []
                ids = _newest_groups(store, run_id, count)
                job.total = len(ids)
                for group_id in ids:
                    found.append(store.group(group_id))
                    job.read = len(found)
                job.report = audit(found, labels=labels_of(store.feedback(run_id=run_id)))
        except ArtError as unfit:
            job.problem = str(unfit)
        except BaseException as fault:  # whatever it is, the page that waits for it must be told
            job.problem = f"the audit failed: {type(fault).__name__}: {fault}"
            raise
        finally:
            job.done.set()


def _of_newest(run_id: str, count: int) -> Select[Any]:
    """Ids of a run's newest groups, newest first."""
    return select(groups.c.id).where(groups.c.run_id == run_id).order_by(groups.c.seq.desc()).limit(count)


def _newest_groups(store: Store, run_id: str, count: int) -> list[str]:
    """Ids of a run's newest groups, oldest first."""
    with store.read() as connection:
        return list(connection.scalars(_of_newest(run_id, count)))[::-1]


def _key(store: Store, run_id: str, count: int) -> Key:
    members = select(trajectories.c.id).where(trajectories.c.group_id.in_(_of_newest(run_id, count)))
    with store.read() as connection:
        group = connection.scalar(select(func.max(groups.c.seq)).where(groups.c.run_id == run_id))
        score = connection.scalar(select(func.max(scores.c.seq)).where(scores.c.trajectory_id.in_(members)))
        said = connection.scalar(
            select(func.max(feedback.c.seq)).where(feedback.c.trajectory_id.in_(members))
        )
    return run_id, count, group or 0, score or 0, said or 0


@router.get("/runs/{run_id}/audit")
def audit_page(
    request: Request,
    run_id: str,
    count: Annotated[int, Query(alias="groups", ge=1, le=MOST_GROUPS)] = GROUPS,
    job: int | None = None,
) -> HTMLResponse:
    """What is wrong with the rewards of a run, or how far the audit has come.

    ``job`` is the number of an audit that the page waits for.
    """
    store = site_of(request).store
    with store.read() as connection:
        run = read_run(connection, run_id)
    common: dict[str, Any] = {"run": run, "count": count, "most": MOST_GROUPS}
    audits = _audits(request)
    found = None if job is None else audits.known(job, run_id)
    if found is None:
        key = _key(store, run_id, count)
        if not key[2]:
            return render(request, "audit.html", job=None, working=False, **common)
        found = audits.job(store, key)
    working = not found.done.wait(AT_ONCE)  # asked once: it may end while the page is made
    return render(request, "audit.html", job=found, working=working, **common)


def _audits(request: Request) -> Audits:
    state = request.app.state
    if not hasattr(state, "audits"):
        state.audits = Audits()
    return state.audits
