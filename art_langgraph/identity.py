"""Where in a graph a call is made: from LangChain's run to a `StepIdentity`.

Invariant: two calls of one rollout never share namespace, attempt and call index, and what LangGraph ran
again (a retry, a resume after an interrupt) has a higher attempt than what it replaces, or, in a
subgraph of a retried node, more retries.

The branch is the full ``langgraph_checkpoint_ns`` in the run's metadata, which LangChain hands down to
every run inside a node, also across threads. The attempt comes from LangGraph's runtime: it counts
retries, and starts again at 1 when a resumed graph runs the node again under the same namespace; the
time of the first attempt tells those executions apart (checked with langgraph 1.2.24).

What a node's subgraphs do is under it, as in ``work:<uuid>|inner:<uuid>``. When the node is retried, they
run under new namespaces, numbered on: ``work:<uuid>|1|inner:<uuid>``, just as a second call of the subgraph
in one execution would be; and inside them LangGraph's runtime says nothing of the node above. So handlers
tell the rollout of every run of a node (`is_node`, `Branches.enter_node`). When the node is resumed instead,
its subgraphs go on under their old namespaces from their own checkpoints: what they had done stays done.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

from langchain_core.runnables.config import var_child_runnable_config
from langgraph.runtime import ExecutionInfo, get_runtime

from art_core.recording import Rollout
from art_core.types import StepIdentity

_NODE_TAG = "graph:step:"
"""Begins the tag that LangGraph gives to a node's own run alone; what runs inside has others."""

_PUSHED = ("__pregel_push",)
"""What triggers a task of the functional API, whose own run has its name and no such tag."""


class Run(Protocol):
    """What a LangChain run manager says of its run."""

    run_id: UUID
    parent_run_id: UUID | None
    tags: list[str]
    metadata: dict[str, Any]


def identity_of(run: Run | None, rollout: Rollout | None) -> StepIdentity:
    """The identity of the call that is about to be made in this context; takes its call index."""
    if run is None:
        return identify({}, rollout=rollout)
    return identify(
        run.metadata, tags=run.tags, run_id=run.run_id, parent_run_id=run.parent_run_id, rollout=rollout
    )


def identify(
    metadata: Mapping[str, Any] | None,
    *,
    tags: Sequence[str] | None = None,
    run_id: UUID | None = None,
    parent_run_id: UUID | None = None,
    rollout: Rollout | None = None,
) -> StepIdentity:
    """The identity of a call, from what a callback is told of its run; takes its call index.

    Call it in the context of the call itself (where its node runs), once for each call.

    Args:
        metadata: of the run, with LangGraph's ``langgraph_*`` keys where a graph made it.
        tags: of the run.
        run_id: of the call.
        parent_run_id: of what made it.
        rollout: numbers the attempts and calls of each branch; without one both stay at their first.
    """
    metadata = metadata or {}
    if "langgraph_node" not in metadata:
        metadata = _around()
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    attempt = call_index = None
    if rollout is not None:
        attempt = attempt_of(namespace, rollout)
        call_index = rollout.branches.next_call_index(namespace, attempt)
    return StepIdentity(
        node=metadata.get("langgraph_node"),
        namespace=namespace,
        graph_step=metadata.get("langgraph_step"),
        call_index=call_index or 0,
        attempt=attempt or 1,
        run_id=str(run_id) if run_id else None,
        parent_run_id=str(parent_run_id) if parent_run_id else None,
        tags=tuple(tags or ()),
        retries=rollout.branches.retries(namespace) if rollout is not None else (),
    )


def place(rollout: Rollout) -> StepIdentity:
    """The identity of a call that is about to be made here by a client that is not LangChain's."""
    return identify({}, rollout=rollout)


def _around() -> Mapping[str, Any]:
    """What LangChain knows of the node around a call that it was not told of, or got no config for."""
    return (var_child_runnable_config.get() or {}).get("metadata") or {}


def is_node(name: object, tags: Sequence[str], metadata: Mapping[str, Any]) -> bool:
    """Whether a run is a node's own, or a task's; also true of what a task calls by its own name."""
    if any(tag.startswith(_NODE_TAG) for tag in tags):
        return True
    return name == metadata.get("langgraph_node") and metadata.get("langgraph_triggers") == _PUSHED


def attempt_of(namespace: str, rollout: Rollout) -> int:
    """Which attempt of its branch this context runs, 1 for the first, counted across retries and resumes."""
    info = _execution() if namespace else None
    if info is None or info.checkpoint_ns != namespace:
        # A thread that lost its context, but was given the config: the latest attempt that is known.
        return rollout.branches.latest_attempt(namespace)
    return rollout.branches.attempt(namespace, info.node_first_attempt_time, info.node_attempt)


def _execution() -> ExecutionInfo | None:
    try:
        # No graph runs here: LangGraph has no runtime to give (None is what its typing leaves out).
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):
        return None
    return runtime.execution_info if runtime is not None else None
