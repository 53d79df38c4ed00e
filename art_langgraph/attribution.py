"""Which rollout a call belongs to, and keeping its steps there.

Invariant: a call is kept in the rollout that made it, or counted as unattributed in every rollout that
might have; recording never raises into the graph, and what it cannot do is counted and said.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from uuid import UUID

from art_core.recording import (
    Rollout,
    context_is_known,
    current_rollout,
    open_rollout,
    open_rollouts,
)
from art_core.types import Step
from art_langgraph.identity import Run

logger = logging.getLogger(__name__)

_said: set[str] = set()
_heard: "weakref.WeakValueDictionary[UUID, Rollout]" = weakref.WeakValueDictionary()


def rollout_of(run: Run | None) -> Rollout | None:
    """The rollout that the call being made here belongs to.

    In this order: the current one of this context; the one whose handler was told of the run (a graph that
    is streamed, and whose reader takes each part in a context of its own); the one that the run's metadata
    names (a thread that was given the node's config, but not its context); for a thread that has lost its
    context, the only one that is open.
    """
    if (rollout := current_rollout()) is not None:
        return rollout
    heard = _heard.get(run.run_id) if run is not None else None
    if heard is not None and not heard.ended:
        return heard
    named = run.metadata.get("rollout_id") if run is not None else None
    if isinstance(named, str) and (rollout := open_rollout(named)) is not None:
        return rollout
    if context_is_known() or threading.current_thread() is threading.main_thread():
        return None
    candidates = open_rollouts()
    if len(candidates) != 1:
        return None
    candidates[0].count_fault("adopted_calls")
    return candidates[0]


def hear(run_id: UUID, rollout: Rollout) -> None:
    """A handler of a rollout was told of a run that records itself."""
    _heard[run_id] = rollout


def forget(run_id: UUID) -> None:
    """The run has ended."""
    _heard.pop(run_id, None)


def keep(rollout: Rollout | None, policy: str, steps: Callable[[str], Sequence[Step]]) -> None:
    """Keep the steps of a call (made for a rollout's id) in its rollout, or count it as unattributed."""
    if rollout is None:
        _count_unattributed(policy)
        return
    try:
        for step in steps(rollout.id):
            rollout.submit(step).add_done_callback(partial(_check, rollout, step))
    except Exception:
        # A fault of capture must not become one of the graph; it is counted where it can be seen.
        rollout.count_fault("capture_errors")
        logger.exception("rollout %s: a call of %s could not be recorded", rollout.id, policy)


def _check(rollout: Rollout, step: Step, done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        rollout.count_fault("lost_steps")
        logger.error("rollout %s: step %s could not be stored: %s", rollout.id, step.id, error)


def _count_unattributed(policy: str) -> None:
    candidates = () if context_is_known() else open_rollouts()
    for rollout in candidates:
        rollout.count_fault("unattributed_calls")
    if not candidates or policy in _said:
        return  # nobody is recording here, or it is a judge's: an ordinary call
    _said.add(policy)
    logger.warning(
        "a call of the policy %r was made where its rollout is not known, while %d rollouts are open: it is "
        "not recorded. A thread that an agent starts by itself has no context; start it with "
        "contextvars.copy_context().run, take langchain_core.runnables.config.ContextThreadPoolExecutor in "
        "place of ThreadPoolExecutor, use LangChain's runnables, or pass the node's config on. "
        "(Counted as unattributed_calls; said once.)",
        policy,
        len(candidates),
    )
