"""The answer that a run ended with: where it stands, and the run as it would be with another one.

Invariant: the changed run differs from the recorded one only where the old answer stood: in the agent's
output, in what the last call said, in the arguments of the tool call that handed it in, and in that call's
tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from art_core.rewards.reading import parsed_arguments
from art_core.types import Message, Step, Trajectory
from art_core.views.text import content_text

ANSWER_FIELDS = ("answer", "final_answer", "response", "result", "output", "text")
"""Where an output, or a tool call that hands an answer in, has it; the first that holds a text."""


def answered(trajectory: Trajectory) -> list[Step]:
    """The calls that a model answered."""
    return [step for step in trajectory.steps if step.response is not None]


def answer(trajectory: Trajectory) -> str:
    """The answer.

    The agent's output when that is a text, or the text in it; else what the last answered call said, else
    what its tool call handed in.
    """
    output = trajectory.metadata.get("output")
    if isinstance(output, str):
        return output
    if (field := _field(output)) is not None:
        return cast("Mapping[str, str]", output)[field]
    steps = answered(trajectory)
    if not steps:
        return ""
    response = cast("Message", steps[-1].response)
    text = content_text(response)
    if text.strip():
        return text
    for call in _calls(response):
        arguments = parsed_arguments(_function(call).get("arguments"))
        if (field := _field(arguments)) is not None:
            return cast("Mapping[str, str]", arguments)[field]
    return text


def with_answer(trajectory: Trajectory, text: str) -> Trajectory:
    """The run, had it ended with another answer.

    Sampled tokens of the last call are lengthened or shortened with it, so that rewards of length see it.
    """
    before = answer(trajectory)
    steps = list(trajectory.steps)
    for number in range(len(steps) - 1, -1, -1):
        response = steps[number].response
        if response is not None:
            changed = replace(steps[number], response=_response(response, before, text))
            steps[number] = _stretched(changed, before, text)
            break
    metadata = dict(trajectory.metadata)
    output = metadata.get("output")
    if isinstance(output, str):
        metadata["output"] = text
    elif (field := _field(output)) is not None:
        metadata["output"] = {**cast("Mapping[str, Any]", output), field: text}
    return replace(trajectory, steps=tuple(steps), metadata=metadata)


def _response(response: Message, before: str, text: str) -> Message:
    calls = _calls(response)
    changed: dict[str, Any] = dict(response)
    if not calls or (before and content_text(response) == before):
        changed["content"] = text
    if calls:
        changed["tool_calls"] = [_call(call, before, text) for call in calls]
    return changed


def _call(call: Mapping[str, Any], before: str, text: str) -> Mapping[str, Any]:
    function = _function(call)
    arguments = parsed_arguments(function.get("arguments"))
    field = _field(arguments)
    if arguments is None or field is None or arguments[field] != before:
        return call
    return {**call, "function": {**function, "arguments": json.dumps({**arguments, field: text})}}


def _calls(response: Message) -> list[Mapping[str, Any]]:
    """The tool calls of a response; what a model wrote in their place is none."""
    made: object = response.get("tool_calls")
    if not isinstance(made, Sequence):
        return []
    return [cast("Mapping[str, Any]", c) for c in cast("Sequence[object]", made) if isinstance(c, Mapping)]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function: object = call.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def _field(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return None
    held = cast("Mapping[str, Any]", value)
    return next((name for name in ANSWER_FIELDS if isinstance(held.get(name), str)), None)


def _stretched(step: Step, before: str, after: str) -> Step:
    tokens = step.tokens
    if tokens is None or not tokens.completion:
        return step
    count = max(1, round(len(tokens.completion) * max(len(after), 1) / max(len(before), 1)))
    ids = (tokens.completion * (count // len(tokens.completion) + 1))[:count]
    stretched = replace(tokens, completion=ids, logprobs=(None,) * count)
    usage = {**step.usage, "completion_tokens": count} if step.usage else step.usage
    return replace(step, tokens=stretched, usage=usage)
