"""The branches of one rollout: numbers for their calls, attempts and retries.

Invariant: no two calls get the same branch, attempt and number, and what runs again gets a higher attempt, or
more retries, than what it replaces.

A branch is named by its namespace; `art_langgraph.identity` says what those are in LangGraph.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan

from art_core.types import StepIdentity, enclosing_nodes


@dataclass(slots=True)
class _Executions:
    """The attempts of one branch: ``before`` those of the present execution, and the ``latest``."""

    execution: float | None
    before: int = 0
    latest: int = 0


@dataclass(slots=True)
class _NodeRun:
    """The latest run of a node, the run of the graph that made it, and how many before it were retried."""

    run: object
    graph_run: object
    retries: int = 0


class Branches:
    """What a rollout knows of its branches. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call_indices: Counter[tuple[str, int]] = Counter()
        self._executions: dict[str, _Executions] = {}
        self._node_runs: dict[str, _NodeRun] = {}
        self._retried = False

    @classmethod
    def after(cls, calls: Iterable[StepIdentity]) -> "Branches":
        """The branches of a rollout that goes on after these calls, which another process may have made."""
        branches = cls()
        for call in calls:
            at = (call.namespace, call.attempt)
            branches._call_indices[at] = max(branches._call_indices[at], call.call_index + 1)
            # No execution is this one (nan), so what runs now is a later attempt.
            known = branches._executions.setdefault(call.namespace, _Executions(nan, latest=1))
            known.latest = max(known.latest, call.attempt)
            for node, retries in zip(enclosing_nodes(call.namespace), call.retries, strict=False):
                seen = branches._node_runs.setdefault(node, _NodeRun(None, None))
                seen.retries = max(seen.retries, retries)
                branches._retried = branches._retried or retries > 0
        return branches

    def next_call_index(self, namespace: str, attempt: int) -> int:
        """Number the calls of one branch and attempt: 0, 1, 2, ..."""
        with self._lock:
            index = self._call_indices[namespace, attempt]
            self._call_indices[namespace, attempt] += 1
            return index

    def attempt(self, namespace: str, execution: float | None, attempt: int) -> int:
        """Number the attempts of one branch across its executions (a resume starts a new execution).

        Args:
            namespace: the branch.
            execution: what tells its executions apart (when the first attempt of this one began).
            attempt: 1 for the first attempt of this execution, counting retries.
        """
        with self._lock:
            known = self._executions.setdefault(namespace, _Executions(execution))
            if known.execution != execution:
                known.execution, known.before = execution, known.latest
            known.latest = max(known.latest, known.before + attempt)
            return known.before + attempt

    def latest_attempt(self, namespace: str) -> int:
        """The latest attempt of a branch that is known; 1 before any."""
        with self._lock:
            known = self._executions.get(namespace)
            return known.latest if known is not None else 1

    def enter_node(self, namespace: str, run: object, graph_run: object) -> None:
        """A node starts to run; a second run within one run of its graph is a retry.

        Args:
            namespace: the node's.
            run: id of this run of it.
            graph_run: id of the run of the graph that it is a node of.
        """
        with self._lock:
            known = self._node_runs.get(namespace)
            if known is None:
                self._node_runs[namespace] = _NodeRun(run, graph_run)
            elif known.run not in (run, graph_run):  # told already by another handler, or inside the node
                known.retries += known.graph_run == graph_run
                known.run, known.graph_run = run, graph_run
                self._retried = self._retried or known.retries > 0

    def retries(self, namespace: str) -> tuple[int, ...]:
        """How often each node on the path of a namespace was retried so far; empty when none was."""
        if not self._retried:
            return ()
        with self._lock:
            runs = [self._node_runs.get(node) for node in enclosing_nodes(namespace)]
        counts = tuple(run.retries if run is not None else 0 for run in runs)
        return counts if any(counts) else ()
