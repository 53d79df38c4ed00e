"""Compare what was recorded with what a pattern's table says; every difference is one readable line."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fakes.vllm_server import completion_ids, logprob, prompt_ids
from integration.patterns.table import Call, Part, calls, order, prompt_text, reply_of, response_text

from art_core.types import PolicyVersion, Step

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Way:
    """A way in, by what it can know.

    Attributes:
        name: as it appears in test ids.
        exact: whether steps hold the server's token ids and logprobs, and can be trained.
        handler: whether a handler hears of the graph's nodes.
    """

    name: str
    exact: bool
    handler: bool = True


WAYS = (
    Way("chatart", exact=True, handler=False),
    Way("chatart_and_handler", exact=True),
    Way("gateway", exact=True),
    Way("handler", exact=False),
)


def differences(
    steps: Sequence[Step],
    expected: Part,
    way: Way,
    *,
    superseded: Iterable[str],
    policy: PolicyVersion,
    requests: Sequence[Mapping[str, Any]],
) -> list[str]:
    """How a trajectory's steps differ from the table; empty when they are exactly what it says.

    Args:
        steps: in recorded order.
        expected: the table.
        way: through which way in they came.
        superseded: ids of steps that a later attempt took the place of.
        policy: the version that answered.
        requests: what the server received.
    """
    gone = set(superseded)
    rows = [_row(step, step.id in gone) for step in steps]
    wanted = [call.row for call in calls(expected)]
    found = [f"missing: {row}" for row in (Counter(wanted) - Counter(rows)).elements()]
    found += [f"unexpected: {row}" for row in (Counter(rows) - Counter(wanted)).elements()]
    if found:
        return found
    place = {row: index for index, row in enumerate(rows)}
    at = {call: place[call.row] for call in calls(expected)}
    found += _namespaces({call: steps[index] for call, index in at.items()})
    found += [
        f"order: {before.namespace} {before.prompt} came after {after.namespace} {after.prompt}"
        for before, after in order(expected)
        if at[before] > at[after]
    ]
    bodies = {prompt_text(body["messages"]): body for body in requests}
    for call, index in at.items():
        found += [
            f"{call.namespace} {call.prompt}: {what}" for what in _tokens(steps[index], call, way, bodies)
        ]
        if (steps[index].policy == policy) is not way.exact:
            found.append(f"{call.namespace} {call.prompt}: policy is {steps[index].policy}")
    ids = [step.identity.run_id for step in steps]
    if None in ids or len(set(ids)) != len(ids):
        found.append(f"run ids are missing or shared: {ids}")
    return found


def _row(step: Step, superseded: bool) -> tuple[Any, ...]:
    where = step.identity
    return (
        where.node,
        re.sub(f":{UUID.pattern}", "", where.namespace),
        where.graph_step,
        where.call_index,
        where.attempt,
        superseded,
        prompt_text(step.messages),
        response_text(step.response),
    )


def _namespaces(steps: Mapping[Call, Step]) -> Iterable[str]:
    """The numbers in the table and the UUIDs in the steps must be renamings of each other, part by part."""
    names: dict[str, str] = {}
    for call, step in steps.items():
        expected, actual = "", ""
        for number, uuid in zip(call.namespace.split("|"), step.identity.namespace.split("|"), strict=True):
            expected, actual = f"{expected}|{number}", f"{actual}|{uuid}"
            if names.setdefault(expected, actual) != actual:
                yield f"namespace {call.namespace} is {actual[1:]}, and was {names[expected][1:]} before"
            if not UUID.search(uuid) and uuid != number:  # LangGraph counts calls of one subgraph: ``|1|``
                yield f"namespace {step.identity.namespace} has no UUID in {uuid!r}"
    if len(set(names.values())) != len(names):
        yield f"branches share a namespace: {sorted(names.values())}"


def _tokens(
    step: Step, call: Call, way: Way, bodies: Mapping[tuple[str, ...], Mapping[str, Any]]
) -> Iterable[str]:
    if not way.exact:
        if step.tokens is not None or step.trainable or not step.untrainable:
            yield f"no tokens can be known here, yet untrainable={step.untrainable!r}, tokens={step.tokens}"
        return
    if step.tokens is None or not step.trainable:
        yield f"no exact tokens: untrainable={step.untrainable!r}"
        return
    sampled = completion_ids(reply_of(call.answer))
    if step.tokens.completion != sampled:
        yield f"completion ids are {step.tokens.completion}, sampled were {sampled}"
    if step.tokens.logprobs != tuple(logprob(token, i) for i, token in enumerate(sampled)):
        yield f"logprobs are {step.tokens.logprobs}"
    if step.tokens.prompt != prompt_ids(bodies[call.prompt]):
        yield "prompt ids are not those of the request"
