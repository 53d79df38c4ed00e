"""Trajectories of agents that talk and call tools, written in few words."""

import json
from collections.abc import Sequence
from typing import Any

from helpers.trajectories import a_step

from art_core.types import Scenario, StepIdentity, Trajectory


def call(name: str, arguments: Any = None, identifier: str | None = None) -> dict[str, Any]:
    """A tool call; arguments that are a text are sent as they are."""
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": identifier or f"call-{name}",
        "type": "function",
        "function": {"name": name, "arguments": spelled},
    }


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool's specification; all of its properties are required."""
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def conversation(
    *turns: str | Sequence[dict[str, Any]],
    results: Sequence[Sequence[str]] = (),
    nodes: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] = (),
    **metadata: Any,
) -> Trajectory:
    """One step for each turn: a text, or tool calls, whose results the next step is given.

    Args:
        turns: what the model said.
        results: of the calls of each turn that made some.
        nodes: each turn's node; ``agent`` when there are none.
        tools: offered to every call.
        **metadata: the scenario's.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    steps: list[Any] = []
    answers = iter(results)
    for number, turn in enumerate(turns):
        said = isinstance(turn, str)
        response: dict[str, Any] = {"role": "assistant", "content": turn if said else None}
        if not said:
            response["tool_calls"] = list(turn)
        node = nodes[number] if nodes else "agent"
        steps.append(
            a_step(
                "t",
                number,
                messages=tuple(messages),
                response=response,
                tools=tuple(tools),
                identity=StepIdentity(node=node),
            )
        )
        messages = [*messages, response]
        if not said:
            for made, answer in zip(turn, next(answers, ()), strict=False):
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": answer})
    return Trajectory(
        id="t",
        scenario=Scenario("question-1", metadata=metadata),
        steps=tuple(steps),
        started_at=999.0,
    )
