"""What rewards read off a trajectory: the answer, its tool calls and their results, what was expected.

Invariant: what is not there is a `RewardError` that says what was looked for, never an empty default that
would be scored.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from art_core.errors import ConfigError, RewardError
from art_core.types import Step, ToolSpec, Trajectory
from art_core.views.text import content_text

Expected: TypeAlias = str | Callable[[Trajectory], Any]
"""Where the right answer is: a key of the scenario's metadata or inputs, or a function of the trajectory."""


def check_expected(expected: object, reward: str) -> None:
    """Refuse what cannot say where the right answer is, before anything runs.

    Raises:
        ConfigError: it is neither a key nor a function.
    """
    if not isinstance(expected, str) and not callable(expected):
        shown = repr(expected)
        given = shown if len(shown) < 80 else type(expected).__name__
        raise ConfigError(
            f"reward {reward!r}: expected={given}: give a key of the scenarios' metadata or inputs, where "
            "the right answers are, or a function of the trajectory"
        )


def expected_value(trajectory: Trajectory, expected: Expected, reward: str) -> Any:
    """What a trajectory should have come to.

    Args:
        trajectory: a rollout.
        expected: a key of the scenario's metadata (looked at first) or inputs, or a function.
        reward: who asks, for the message.

    Raises:
        RewardError: the scenario has no such key.
    """
    if not isinstance(expected, str):
        return expected(trajectory)
    scenario = trajectory.scenario
    for place in (scenario.metadata, scenario.inputs):
        if expected in place:
            return place[expected]
    known = sorted({*scenario.metadata, *scenario.inputs})
    raise RewardError(
        f"reward {reward!r}: scenario {scenario.id!r} has no {expected!r} in its metadata or inputs "
        f"(it has: {', '.join(map(repr, known)) or 'nothing'}); add it, or give `expected` a function"
    )


def answer_text(trajectory: Trajectory, output: object, node: str | None, reward: str) -> str:
    """The text that an agent answered with.

    The output when that is a text and no node is asked for; else what the last answered call said, of
    that node if it is named. A call that made tool calls alone said the empty text.

    Raises:
        RewardError: no call was answered.
    """
    if node is None and isinstance(output, str):
        return output
    for step in reversed(trajectory.steps):
        if step.response is not None and (node is None or step.identity.node == node):
            return content_text(step.response)
    where = "" if node is None else f" in node {node!r}"
    raise RewardError(f"reward {reward!r}: trajectory {trajectory.id} has no answered call{where} to read")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that a model made.

    Attributes:
        id: what its result refers to.
        name: the tool.
        arguments: parsed; None when they are no JSON object.
        step: the call's step.
        result: the tool's answer, as a later call saw it; None when none did.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    step: Step
    result: str | None = None

    @property
    def spec(self) -> ToolSpec | None:
        """The tool's specification as the request offered it; None when it offered no such tool."""
        for tool in self.step.tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and cast("Mapping[str, Any]", function).get("name") == self.name:
                return cast("ToolSpec", function)
        return None


TOOL_RESULTS = "tool_results"
"""In the metadata of a part of a trajectory: what tools answered its calls, in the order of the calls.

A step's calls are answered after it, so the step alone does not hold what came of them.
"""


def tool_calls(trajectory: Trajectory, node: str | None = None) -> tuple[ToolCall, ...]:
    """The tool calls of a trajectory, or of one node of it, in the order in which they were made."""
    found: list[ToolCall] = []
    known = trajectory.metadata.get(TOOL_RESULTS)
    for number, step in enumerate(trajectory.steps):
        made = (step.response or {}).get("tool_calls") or ()
        for call in cast("Sequence[Mapping[str, Any]]", made):
            function = cast("Mapping[str, Any]", call.get("function") or {})
            identifier = str(call.get("id") or "")
            result = _result(trajectory, number, identifier) if known is None else known[len(found)]
            arguments = parsed_arguments(function.get("arguments"))
            found.append(ToolCall(identifier, str(function.get("name") or ""), arguments, step, result))
    return tuple(call for call in found if node is None or call.step.identity.node == node)


def part_of(trajectory: Trajectory, steps: Sequence[Step]) -> Trajectory:
    """A trajectory of some of its steps alone, which still knows what tools answered their calls."""
    kept = {step.id for step in steps}
    results = [call.result for call in tool_calls(trajectory) if call.step.id in kept]
    return replace(trajectory, steps=tuple(steps), metadata={**trajectory.metadata, TOOL_RESULTS: results})


def tool_results(trajectory: Trajectory) -> tuple[str, ...]:
    """What tools answered, as the models saw it; each answer once."""
    messages = (message for step in trajectory.steps for message in step.messages)
    return tuple(dict.fromkeys(content_text(m) for m in messages if m.get("role") == "tool"))


def parsed_arguments(arguments: object) -> Mapping[str, Any] | None:
    """A call's arguments as an object; None when they are none."""
    if arguments is None or arguments == "":
        return {}  # how servers spell a call without arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return cast("Mapping[str, Any]", arguments) if isinstance(arguments, Mapping) else None


_FENCE = re.compile(r"\A\s*```[\w-]*[^\S\n]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def unfenced(text: str) -> str:
    """The text inside of a code fence that is all there is; any other text as it is."""
    fenced = _FENCE.match(text)
    return fenced.group(1) if fenced else text


def _result(trajectory: Trajectory, number: int, identifier: str) -> str | None:
    """The answer to a call of the step with this number, as a later step saw it.

    Some servers give the same ids in every turn, so answers behind what the step itself was given go first.
    """
    anywhere: str | None = None
    known = len(trajectory.steps[number].messages)
    for step in trajectory.steps[number + 1 :]:
        for index, message in enumerate(step.messages):
            if message.get("role") == "tool" and str(message.get("tool_call_id") or "") == identifier:
                if index >= known:
                    return content_text(message)
                anywhere = content_text(message) if anywhere is None else anywhere
    return anywhere
