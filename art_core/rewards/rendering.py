"""Trajectories as compact text for a judge.

Invariant: every call, tool and node of a trajectory, in every branch, has an entry; tokens, logprobs and
binary data have none. What is left out has left a mark with its size. Equal agents' behaviour gives equal
entries: no ids, times or model names are in them.

Steps and spans -> entries (where, what) -> what all trajectories of a set begin with is told once -> the
rest of each is cut in its longest entries' middle until it fits its share of the budget.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_core.capture import superseded
from art_core.types import Message, Span, Step, Trajectory, enclosing_nodes
from art_core.views.text import content_text, safe, tool_calls

CountTokens = Callable[[str], int]
"""Tokens of a text, for the judge's model."""

LEAST_ENTRY = 60
"""Characters of an entry that are always shown."""

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,[A-Za-z0-9+/=_-]*")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{160,}={0,2}")
_BULK = frozenset({"logprobs", "token_ids", "prompt_token_ids", "response_metadata", "usage_metadata"})
_TOOLS = ("tool", "retriever")
_OWN_FIELDS = frozenset({"tool_calls", "tool_call_id", "name", "role"})


def approximate_tokens(text: str) -> int:
    """About as many tokens as most vocabularies need: one for four bytes of UTF-8."""
    return -(-len(text.encode(errors="replace")) // 4)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened: where (branch and who) and what."""

    where: str
    what: str

    def text(self, limit: int | None = None) -> str:
        """As the judge reads it, with at most about ``limit`` characters of ``what``."""
        return f"[{self.where}] {self.what if limit is None else shortened(self.what, limit)}"


Entries = tuple[Entry, ...]


def entries(trajectory: Trajectory) -> Entries:
    """What happened in a trajectory, in the order in which it started."""
    branches = _Branches()
    gone = superseded(trajectory.steps)
    read = _Read(trajectory)
    told: list[Entry] = []
    # The namespace's order of appearance gives branches their numbers.
    for made in sorted((*trajectory.steps, *trajectory.spans), key=lambda made: made.started_at):
        if isinstance(made, Step):
            place = branches.of(made.identity.namespace, made.identity.node, made.identity.attempt)
            place += ", run again later" if made.id in gone else ""
            told.extend(_step_entries(made, read, place))
        elif entry := _span_entry(made, read, branches):
            told.append(entry)
    if final := _final(trajectory):
        told.append(final)
    return tuple(told)


def common_beginning(sets: Sequence[Entries]) -> int:
    """How many entries all of several trajectories begin with; 0 for a single one."""
    if len(sets) < 2:
        return 0
    same = 0
    for some in zip(*sets, strict=False):
        if any(entry != some[0] for entry in some):
            break
        same += 1
    return same


def fitted(some: Sequence[Entry], budget: int, count: CountTokens) -> str | None:
    """Entries as text of at most ``budget`` tokens; None if even their shortest form has more.

    The longest entries are shortened first, all to one length.
    """

    def at(limit: int | None) -> str:
        return "\n".join(entry.text(limit) for entry in some)

    whole = at(None)
    if count(whole) <= budget:
        return whole
    low, high = LEAST_ENTRY, max((len(entry.what) for entry in some), default=0)
    best = at(low)
    if count(best) > budget:
        return None
    while high - low > 1:
        limit = (low + high) // 2
        text = at(limit)
        if count(text) <= budget:
            low, best = limit, text
        else:
            high = limit
    return best


def shares(needs: Sequence[int], budget: int) -> list[int]:
    """A budget divided: who needs less than an equal part gets that, and the rest is shared by the others."""
    given = [0] * len(needs)
    left = budget
    order = sorted(range(len(needs)), key=lambda i: needs[i])
    for done, index in enumerate(order):
        given[index] = min(needs[index], left // (len(order) - done))
        left -= given[index]
    return given


def shortened(text: str, limit: int) -> str:
    """Text with its middle left out, so that about ``limit`` characters stay."""
    if len(text) <= limit:
        return text
    mark = f" [… {len(text) - limit} characters left out …] "
    keep = limit
    head = (keep + 1) // 2
    return f"{text[:head]}{mark}{text[len(text) - (keep - head) :]}"


def plain(text: str) -> str:
    """Text without binary data and characters that hide or reorder others."""
    text = _DATA_URL.sub(lambda m: f"[{m[1] or 'data'}, {len(m[0])} characters left out]", text)
    return safe(_BASE64.sub(_without_base64, text))


def _without_base64(match: re.Match[str]) -> str:
    run = match[0]
    kinds = (str.isupper, str.islower, str.isdigit)
    if all(any(kind(c) for c in run) for kind in kinds):
        return f"[base64, {len(run)} characters left out]"
    return run


class _Branches:
    """Names of branches without the ids in their namespaces: ``work``, ``work#2``, ``work#2 > inner``."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._seen: Counter[str] = Counter()

    def of(self, namespace: str, node: str | None, attempt: int = 1) -> str:
        name = self._path(namespace) or node or ""
        # A namespace's last node may be the graph's own; the node says more where they differ.
        return plain(name) + (f" attempt {attempt}" if attempt > 1 else "")

    def _path(self, namespace: str) -> str:
        if not namespace:
            return ""
        if namespace not in self._names:
            above, _, last = namespace.rpartition("|")
            outer = self._path(above)
            name = last.partition(":")[0]
            path = f"{outer} > {name}" if outer else name
            self._seen[path] += 1
            number = self._seen[path]
            self._names[namespace] = path if number == 1 else f"{path}#{number}"
        return self._names[namespace]


class _Read:
    """What the models of a trajectory have read and said so far, and who called which tool.

    Branches of one graph run at the same time, each with a history of its own: a message is new unless it
    continues, from its beginning, some history of the same graph.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self._histories: dict[str, dict[Any, Any]] = {}
        inside = [step.identity.namespace for step in trajectory.steps]
        inside += [span.namespace for span in trajectory.spans if span.kind in _TOOLS]
        self.told_by_others = {node for namespace in inside for node in enclosing_nodes(namespace)}
        self.results: set[str] = set()
        self.tools: dict[str, str] = {}
        for step in trajectory.steps:
            for message in (*step.messages, step.response or {}):
                if message.get("role") == "tool":
                    self.results.add(plain(content_text(message)).strip())
                for call in _calls(message):
                    self.tools[str(call.get("id"))] = str(call["function"].get("name", "?"))

    def new(self, step: Step) -> tuple[Message, ...]:
        """A step's messages that are new; it and its answer are then part of a history."""
        graph = step.identity.namespace.rpartition("|")[0]
        here = self._histories.setdefault(graph, {})
        known = 0
        for number, message in enumerate((*step.messages, *((step.response,) if step.response else ()))):
            key = message.get("role"), _said(message).strip()
            known += number == known < len(step.messages) and key in here
            here = here.setdefault(key, {})
        return step.messages[known:]


def _step_entries(step: Step, read: _Read, place: str) -> Iterator[Entry]:
    at = f"{place}: " if place else ""
    for message in read.new(step):
        role = plain(str(message.get("role", "message")))
        if role == "tool":
            name = message.get("name") or read.tools.get(str(message.get("tool_call_id")), "?")
            yield Entry(f"{at}result of {plain(str(name))}", plain(content_text(message)))
        else:
            yield Entry(f"{at}{role}", _said(message))
    choice = f" (choice {step.choice + 1})" if step.choice else ""
    if step.response is not None:
        cut = " [cut off: it reached its length limit]" if step.finish_reason == "length" else ""
        yield Entry(f"{at}agent{choice}", _said(step.response) + cut)
    else:
        yield Entry(f"{at}agent{choice}", f"(the call failed: {plain(step.error or 'no answer')})")


def _said(message: Message) -> str:
    calls = [f"call {plain(name)}({plain(_compact(arguments))})" for name, arguments in tool_calls(message)]
    text = plain(content_text(message))
    return "\n".join([text, *calls] if text or not calls else calls)


def _compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return arguments


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls: Any = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        return []
    found = [call for call in cast("Sequence[Any]", calls) if isinstance(call, Mapping)]
    return [call for call in found if isinstance(call.get("function"), Mapping)]


def _span_entry(span: Span, read: _Read, branches: _Branches) -> Entry | None:
    """What a span tells that no step does: tools whose result no model read, nodes without a model."""
    place = branches.of(span.namespace, span.node, span.attempt)
    at = f"{place}: " if place else ""
    trouble = f"(failed: {plain(span.error)})" if span.error else ""
    if span.kind in _TOOLS:
        result = _output_text(span.outputs)
        if result.strip() in read.results and not trouble:
            return None
        what = f"{_output_text(span.inputs)} -> {result}{trouble}"
        return Entry(f"{at}{span.kind} {plain(span.name)}", what)
    is_node = span.kind == "chain" and span.node == span.name and span.namespace
    if is_node and (trouble or span.namespace not in read.told_by_others):
        return Entry(place, trouble or f"-> {_output_text(span.outputs)}")
    return None


def _final(trajectory: Trajectory) -> Entry | None:
    """What the whole run returned, where it was traced."""
    roots = [s for s in trajectory.spans if s.parent_id is None and s.kind == "chain" and not s.namespace]
    if not roots or roots[-1].outputs is None:
        return None
    outputs: Any = roots[-1].outputs
    if isinstance(outputs, Mapping):
        # The conversation has been told.
        outputs = {k: v for k, v in cast("Mapping[str, Any]", outputs).items() if k != "messages"}
    return Entry("final output", _output_text(outputs)) if outputs else None


def _output_text(value: Any) -> str:
    if isinstance(value, Mapping):
        message = cast("Mapping[str, Any]", value)
        if "content" in message and _OWN_FIELDS & message.keys():
            return _said(message)
    if isinstance(value, str):
        return plain(value)
    return plain(json.dumps(_slim(value), ensure_ascii=False, default=str, sort_keys=True))


def _slim(value: Any) -> Any:
    """A JSON value without what is bulk to a reader."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        # A message's ids differ between runs that did the same.
        left_out = _BULK | {"id", "tool_call_id"} if "role" in fields else _BULK
        return {key: _slim(inner) for key, inner in fields.items() if key not in left_out}
    if isinstance(value, list | tuple):
        return [_slim(inner) for inner in cast("Sequence[Any]", value)]
    return value
