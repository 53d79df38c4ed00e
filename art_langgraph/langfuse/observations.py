"""A trajectory as Langfuse's observations: the rollout, its nodes, tools, retrievers and LLM calls.

Invariant: everything that was recorded is exactly one observation of one trace; every parent is in the same
trace; ids, times and values follow from the trajectory alone.

The rollout itself is the root (``agent``). Spans keep their places below it; an LLM call's span and its steps
become one ``generation``. A call that no span tells of hangs on the node that made it; where nodes left no
spans either, they are as long as their calls, and say so.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.types import Message, Span, Step, Trajectory, enclosing_nodes
from art_langgraph.langfuse.ids import observation_id

OWN_TAG = "art-langgraph"
"""Tag of every trace that comes from here."""

_LEVELS = {"error": "ERROR", "cancelled": "WARNING"}
_USAGE = {"prompt_tokens": "input", "completion_tokens": "output", "total_tokens": "total"}
_CAPTURE_ONLY = frozenset({"logprobs", "top_logprobs", "return_token_ids"})
"""Parameters that capture adds; they say nothing about how was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation, before it is encoded.

    Attributes:
        id: 16 hexadecimal digits.
        parent: the id of its parent; None for the root.
        kind: ``agent``, ``chain``, ``tool``, ``retriever`` or ``generation``.
        started_at: Unix time, seconds.
        ended_at: Unix time, seconds.
        level: ``DEFAULT``, ``WARNING`` or ``ERROR``.
        version: the policy version that answered.
        first_token_at: Unix time, seconds, of a stream's first token; None for answers that came whole.
        prompt: name and version of the Langfuse prompt that a generation was given.
    """

    id: str
    parent: str | None
    kind: str
    name: str
    started_at: float
    ended_at: float
    input: Any = None
    output: Any = None
    level: str = "DEFAULT"
    status_message: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str | None = None
    model: str | None = None
    model_parameters: Mapping[str, Any] | None = None
    usage: Mapping[str, int] | None = None
    first_token_at: float | None = None
    prompt: tuple[str, int] | None = None


def observations(trajectory: Trajectory, *, name: str = "rollout") -> list[Observation]:
    """A trajectory's observations, the root first.

    Args:
        trajectory: whose.
        name: of the root.
    """
    return _Tree(trajectory).all(name)


def step_observations(trajectory: Trajectory) -> dict[str, str]:
    """The id of the observation that each step is part of, by the step's id."""
    tree = _Tree(trajectory)
    return {step.id: tree.id(key) for key, steps in tree.calls.items() for step in steps}


def node_observations(trajectory: Trajectory, node: str) -> list[str]:
    """The ids of the observations of a node's runs; the latest attempts only."""
    tree = _Tree(trajectory)
    runs = {place: key for place, key in tree.nodes.items() if _node_of(place[0]) == node}
    latest: dict[str, int] = defaultdict(int)
    for namespace, attempt in runs:
        latest[namespace] = max(latest[namespace], attempt)
    return [tree.id(key) for (namespace, attempt), key in runs.items() if attempt == latest[namespace]]


class _Tree:
    """Which span or call is below which."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.spans = {span.id: span for span in trajectory.spans}
        self.nodes = {
            (s.namespace, s.attempt): s.id for s in trajectory.spans if s.kind == "chain" and s.name == s.node
        }
        """Observations of nodes, by namespace and attempt."""
        self._silent: dict[tuple[str, int], list[Step]] = {}
        self._graphs = {
            s.parent_id for s in trajectory.spans if s.kind == "chain" and s.node and s.name == s.node
        }
        self.calls = self._calls()
        self._find_silent_nodes()

    def _find_silent_nodes(self) -> None:
        """Nodes that are known by their calls alone."""
        for step in self.trajectory.steps:
            enclosing = step.identity.enclosing
            if step.identity.parent_run_id in self.spans or step.identity.run_id in self.spans:
                continue
            for namespace in enclosing:
                attempt = step.identity.attempt if namespace == enclosing[-1] else 1
                place = namespace, attempt
                if place not in self.nodes:
                    self.nodes[place] = f"node:{namespace}#{attempt}"
                if self.nodes[place].startswith("node:"):
                    self._silent.setdefault(place, []).append(step)

    def _calls(self) -> dict[str, list[Step]]:
        """Steps by the call that they are choices of; keyed by the call's span where it has one alone."""
        found: dict[str, list[Step]] = defaultdict(list)
        for step in self.trajectory.steps:
            found[step.call_id or step.id].append(step)
        of_run: dict[str | None, list[str]] = defaultdict(list)
        for call, steps in found.items():
            of_run[steps[0].identity.run_id].append(call)
        keyed: dict[str, list[Step]] = {}
        for run, calls in of_run.items():
            span = self.spans.get(run or "")
            alone = span is not None and span.kind == "llm" and len(calls) == 1
            for call in calls:
                keyed[span.id if alone and span else f"call:{call}"] = found[call]
        return keyed

    def id(self, key: str) -> str:
        return observation_id(self.trajectory.id, key)

    def all(self, name: str) -> list[Observation]:
        found = [self._root(name)]
        for span in self.trajectory.spans:
            if span.kind != "llm" or span.id not in self.calls:
                found.append(self._span(span))
        found += [self._silent_node(*place, steps) for place, steps in self._silent.items()]
        for key, steps in self.calls.items():
            found.append(self._call(key, steps))
        return found

    def _silent_node(self, namespace: str, attempt: int, steps: Sequence[Step]) -> Observation:
        above = enclosing_nodes(namespace)[:-1]
        return Observation(
            id=self.id(self.nodes[namespace, attempt]),
            parent=self.id(self.nodes.get((above[-1], 1), "") if above else ""),
            kind="chain",
            name=_node_of(namespace),
            started_at=min(step.started_at for step in steps),
            ended_at=max(step.started_at + step.duration for step in steps),
            metadata={**_where(_node_of(namespace), namespace, attempt, ()), "known_by": "its calls alone"},
        )

    def _root(self, name: str) -> Observation:
        rollout = self.trajectory
        times = [(s.started_at, s.duration) for s in (*rollout.spans, *rollout.steps)]
        ended = max((at + lasted for at, lasted in times), default=rollout.started_at)
        if rollout.duration is not None:
            ended = rollout.started_at + rollout.duration
        failure = rollout.failure
        return Observation(
            id=self.id(""),
            parent=None,
            kind="agent",
            name=name,
            started_at=rollout.started_at,
            ended_at=ended,
            input=dict(rollout.scenario.inputs),
            output=self._outcome(),
            level="ERROR" if rollout.failed else "DEFAULT",
            status_message=f"{failure.cause}: {failure.message}" if failure else None,
        )

    def _outcome(self) -> Any:
        """What the agent gave back: its graph's output, else its last answer."""
        graphs = [s for s in self.trajectory.spans if s.parent_id not in self.spans and s.outputs is not None]
        if graphs:
            return graphs[-1].outputs
        answers = [step.response for step in self.trajectory.steps if step.response is not None]
        return answers[-1] if answers else None

    def _parent(self, span: Span | None, parent_id: str | None, namespace: str, attempt: int) -> str:
        if parent_id in self.spans and (span is None or parent_id != span.id):
            return self.id(parent_id or "")
        return self.id(self.nodes.get((namespace, attempt), "")) if span is None else self.id("")

    def _span(self, span: Span) -> Observation:
        kind = {"llm": "generation", "chain": "agent" if span.id in self._graphs else "chain"}.get(
            span.kind, span.kind
        )
        return Observation(
            id=self.id(span.id),
            parent=self._parent(span, span.parent_id, span.namespace, span.attempt),
            kind=kind,
            name=span.name,
            started_at=span.started_at,
            ended_at=span.started_at + span.duration,
            input=span.inputs,
            output=span.outputs,
            level=_LEVELS.get(span.status, "DEFAULT"),
            status_message=span.error or (None if span.status == "ok" else span.status),
            metadata=_where(span.node, span.namespace, span.attempt, span.tags),
        )

    def _call(self, key: str, steps: Sequence[Step]) -> Observation:
        first = steps[0]
        span, identity = self.spans.get(key), first.identity
        above = span.parent_id if span else identity.parent_run_id
        if span is None and identity.run_id in self.spans:
            above = identity.run_id  # one of several calls that one run made
        answers = [step.response for step in steps if step.response is not None]
        error = next((step.error for step in steps if step.error is not None), None)
        if error is None and span is not None and span.status == "error":
            error = span.error or "error"  # it was answered, and the answer could not be used
        sampling = {k: v for k, v in first.sampling.items() if k not in _CAPTURE_ONLY and v is not None}
        return Observation(
            id=self.id(key),
            parent=self._parent(span, above, identity.namespace, identity.attempt),
            kind="generation",
            name=span.name if span else first.model,
            started_at=first.started_at,
            ended_at=max(step.started_at + step.duration for step in steps),
            input=_asked(first),
            output=answers[0] if len(answers) == 1 else answers or None,
            level="ERROR" if error else "DEFAULT",
            status_message=error,
            metadata={
                **_where(identity.node, identity.namespace, identity.attempt, identity.tags),
                "langgraph_step": identity.graph_step,
                "call_index": identity.call_index,
                "step_ids": [step.id for step in steps],
                "finish_reason": first.finish_reason if len(steps) == 1 else [s.finish_reason for s in steps],
                "trainable": all(step.trainable for step in steps),
                "untrainable": next((s.untrainable for s in steps if s.untrainable), None),
            },
            version=first.policy.name if first.policy else None,
            model=first.policy.model if first.policy else first.model,
            model_parameters=sampling or None,
            usage=_usage(steps),
            first_token_at=(
                None if first.time_to_first_token is None else first.started_at + first.time_to_first_token
            ),
            prompt=_prompt(self.trajectory, first.messages),
        )


def _node_of(namespace: str) -> str:
    """The node that a namespace is of: ``inner`` for ``work:<uuid>|inner:<uuid>``."""
    return namespace.rpartition("|")[2].rpartition(":")[0]


def _where(node: str | None, namespace: str, attempt: int, tags: Iterable[str]) -> dict[str, Any]:
    """By the names of LangGraph, as Langfuse's own callback handler keeps them."""
    where: dict[str, Any] = {"langgraph_node": node, "langgraph_checkpoint_ns": namespace or None}
    if node is not None:
        where["attempt"] = attempt
    if tags := list(tags):
        where["tags"] = tags
    return where


def _asked(step: Step) -> Any:
    messages = [dict(message) for message in step.messages]
    return {"messages": messages, "tools": [dict(tool) for tool in step.tools]} if step.tools else messages


def _usage(steps: Sequence[Step]) -> dict[str, int] | None:
    first = steps[0]
    # The choices of one call carry the call's usage each; without any, the tokens say it.
    usage = {_USAGE[name]: count for name, count in first.usage.items() if name in _USAGE}
    if not usage and first.tokens is not None:
        usage = {
            "input": len(first.tokens.prompt),
            "output": sum(len(step.tokens.completion) for step in steps if step.tokens is not None),
        }
    return usage or None


def _prompt(trajectory: Trajectory, messages: Sequence[Message]) -> tuple[str, int] | None:
    """The Langfuse prompt of the scenario whose text is in the call's messages."""
    for prompt in trajectory.scenario.metadata.get("langfuse_prompts") or ():
        text = first_text(trajectory.scenario.inputs.get(prompt.get("input")))
        if text and any(text in first_text(message.get("content")) for message in messages):
            return str(prompt["name"]), int(prompt["version"])
    return None


def first_text(value: Any) -> str:
    """The text of a message's content or of a prompt: the first one where it has several parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return first_text(value.get("content") or value.get("text"))
    if isinstance(value, list | tuple) and value:
        return first_text(value[0])
    return ""


def as_text(value: Any, limit: int | None = None) -> str:
    """A value as Langfuse takes it: text as it is, anything else as JSON; cut after ``limit`` characters."""
    text = value if isinstance(value, str) else as_json(value)
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... (cut; {len(text)} characters in the store)"
    # Half of a surrogate pair, as JSON can escape it, is no UTF-8.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def as_json(value: Any) -> str:
    """JSON, with what JSON cannot hold (NaN, other objects) as text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=repr)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=repr)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
