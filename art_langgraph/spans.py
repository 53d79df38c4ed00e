"""Spans: what LangChain tells of runs, as a tracer keeps it.

Invariant: every run that started becomes exactly one span, once: when it ends, or when its rollout does.
Runs that LangGraph marks as its own plumbing become none, and what they called hangs on their parent.

Inputs and outputs are copied into JSON values at once, since graphs go on changing their state; long ones
are cut, and say so.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_openai_messages
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command, Interrupt
from pydantic import BaseModel

from art_core.recording import Rollout
from art_core.types import Span

HIDDEN = "langsmith:hidden"
"""LangGraph's tag for runs that are its own plumbing."""

MAX_TEXT = 20_000
"""Characters of one text that are kept."""

MAX_ITEMS = 200
"""Items of one list or mapping that are kept."""

_MAX_DEPTH = 12


@dataclasses.dataclass(slots=True)
class _Open:
    span: Span
    rollout: Rollout
    clock: float


class SpanTracker:
    """Spans that have started and not ended, over all rollouts of a handler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[UUID, _Open] = {}
        self._hidden: dict[UUID, tuple[UUID | None, str]] = {}
        self._attempts: Counter[tuple[str, str]] = Counter()

    def start(
        self,
        kind: str,
        name: str,
        rollout: Rollout,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None,
        tags: Sequence[str] | None,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        """A run has started."""
        metadata = metadata or {}
        namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
        node = metadata.get("langgraph_node")
        with self._lock:
            parent = self._visible(parent_run_id)
            if HIDDEN in (tags or ()):
                self._hidden[run_id] = (parent, rollout.id)
                return
            above = self._open.get(parent) if parent else None
            enters = kind == "chain" and namespace and name == node
            if enters and (above is None or above.span.namespace != namespace):
                # The node itself: LangGraph runs it again under the same namespace.
                self._attempts[rollout.id, namespace] += 1
            attempt = max(1, self._attempts[rollout.id, namespace]) if namespace else 1
        span = Span(
            id=str(run_id),
            kind=kind,
            name=name,
            started_at=time.time(),
            duration=0.0,
            parent_id=str(parent) if parent else None,
            node=node,
            namespace=namespace,
            attempt=attempt,
            inputs=_shown(inputs),
            tags=tuple(tags or ()),
        )
        with self._lock:
            self._open[run_id] = _Open(span, rollout, time.perf_counter())

    def end(self, run_id: UUID, outputs: Any) -> None:
        """A run has returned."""
        seen = run_id in self._open  # else nobody is to see a copy, which is long to make
        self._close(run_id, "ok", _shown(outputs) if seen else None, None)

    def fail(self, run_id: UUID, error: BaseException) -> None:
        """A run has raised; waiting for a person is no error, and neither is handing on to a parent graph."""
        if isinstance(error, GraphInterrupt):
            self._close(run_id, "interrupted", _shown(error.args[0] if error.args else ()), None)
        elif isinstance(error, GraphBubbleUp):
            self._close(run_id, "ok", _shown(error.args[0] if error.args else None), None)
        else:
            self._close(run_id, "error", None, f"{type(error).__name__}: {error}".removesuffix(": "))

    def close(self, rollout: Rollout) -> None:
        """The rollout is about to end: what is still open was cancelled, or outlives its graph."""
        with self._lock:
            left = [run_id for run_id, open_ in self._open.items() if open_.rollout is rollout]
            self._hidden = {k: v for k, v in self._hidden.items() if v[1] != rollout.id}
            for key in [k for k in self._attempts if k[0] == rollout.id]:
                del self._attempts[key]
        for run_id in left:
            self._close(run_id, "cancelled", None, None)

    def rollout_of(self, run_id: UUID | None) -> Rollout | None:
        """The rollout of an open run, for its children that have lost their context."""
        with self._lock:
            open_ = self._open.get(run_id) if run_id else None
            return open_.rollout if open_ else None

    def _visible(self, run_id: UUID | None) -> UUID | None:
        return self._hidden[run_id][0] if run_id is not None and run_id in self._hidden else run_id

    def _close(self, run_id: UUID, status: str, outputs: Any, error: str | None) -> None:
        with self._lock:
            open_ = self._open.pop(run_id, None)
            self._hidden.pop(run_id, None)
        if open_ is None:
            return
        duration = time.perf_counter() - open_.clock
        span = dataclasses.replace(open_.span, status=status, outputs=outputs, error=error, duration=duration)
        open_.rollout.add_span(span)


# -- values ------------------------------------------------------------------------------------------


def _shown(value: Any) -> Any:
    """`jsonable`; what cannot be copied says so, and costs nobody the span."""
    try:
        return jsonable(value)
    except Exception as error:  # a graph's state may hold objects whose own code raises when looked at
        return f"({type(value).__name__} that cannot be shown: {type(error).__name__}: {error})"


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy that JSON can hold: messages in OpenAI's format, models and dataclasses as mappings."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} characters)"
    if depth >= _MAX_DEPTH:
        return jsonable(repr(value))

    def deeper(item: Any) -> Any:
        return jsonable(item, depth + 1)

    if isinstance(value, RemoveMessage):  # an order to the state's reducer, which has no form on the wire
        return {"role": "remove", "id": value.id}
    if isinstance(value, BaseMessage):
        return deeper(convert_to_openai_messages(value))
    if isinstance(value, Document):
        return deeper({"page_content": value.page_content, "metadata": value.metadata})
    if isinstance(value, Command):
        parts = {"resume": value.resume, "update": value.update, "goto": value.goto}
        return deeper({k: v for k, v in parts.items() if v})
    if isinstance(value, Interrupt):
        return deeper({"interrupt": value.value, "id": value.id})
    if isinstance(value, BaseModel):
        return deeper(dict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return deeper({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        items = list(cast(Mapping[Any, Any], value).items())
        kept = {str(k): deeper(v) for k, v in items[:MAX_ITEMS]}
        return kept if len(items) <= MAX_ITEMS else {**kept, "...": f"{len(items)} items"}
    if isinstance(value, list | tuple | set | frozenset):
        many = list(cast(Sequence[Any], value))
        shown = [deeper(v) for v in many[:MAX_ITEMS]]
        return shown if len(many) <= MAX_ITEMS else [*shown, f"... ({len(many)} items)"]
    return jsonable(repr(value))
