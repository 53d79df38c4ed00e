"""Pairs for direct preference optimisation: what people preferred, as TRL's trainers read it.

Invariant: both sides of a row answer the very same prompt; a choice whose sides do not is refused by name,
never bent until it fits. Ties say nothing and make no row.

Choices and their trajectories -> rows of ``prompt``, ``chosen`` and ``rejected`` (lists of messages: TRL's
conversational preference format) -> a JSONL file that ``datasets.load_dataset("json", ...)`` reads.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from art_core.errors import RewardError
from art_core.jsonl import write_lines
from art_core.rewards.labels import Preference
from art_core.rewards.reading import parsed_arguments
from art_core.types import Message, Step, Trajectory
from art_core.views.messages import steps_of
from art_core.views.text import content_text


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One row.

    Attributes:
        prompt: messages that both sides were given.
        chosen: what the preferred one said after them, tools' answers included.
        rejected: what the other one said.
        tools: that both could call.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Any, ...] = ()

    def row(self) -> dict[str, Any]:
        """As JSON can hold it, with TRL's names; ``tools`` only where there are some."""
        parts = (("prompt", self.prompt), ("chosen", self.chosen), ("rejected", self.rejected))
        row: dict[str, Any] = {name: [_plain(message) for message in messages] for name, messages in parts}
        # Text, so that tools of different schemas fit into one column; TRL parses it.
        return row | ({"tools": json.dumps(self.tools)} if self.tools else {})


def preference_pairs(
    preferences: Iterable[Preference],
    trajectory: Callable[[str], Trajectory],
    *,
    node: str | None = None,
) -> list[PreferencePair]:
    """The rows that choices make.

    Args:
        preferences: choices (`labels_of`).
        trajectory: gives a trajectory by its id: ``store.trajectory``.
        node: whose conversation is compared; None: that of the only agent.

    Raises:
        RewardError: two trajectories are of different scenarios or prompts, have no answer, or their calls
        are no single conversation; the message says what to do.
        UnknownTrajectoryError: a trajectory is not there.
    """
    rows: list[PreferencePair] = []
    for one in preferences:
        if one.tie:
            continue
        better, worse = trajectory(one.better), trajectory(one.worse)
        what = f"choice of {better.id} over {worse.id}"
        if better.scenario.id != worse.scenario.id:
            raise RewardError(
                f"{what}: they are of scenarios {better.scenario.id!r} and {worse.scenario.id!r}; a pair "
                "answers one prompt, so leave this choice out"
            )
        prompt, chosen, tools = _conversation(better, node)
        other_prompt, rejected, other_tools = _conversation(worse, node)
        if _keys(prompt) != _keys(other_prompt):
            raise RewardError(
                f"{what}: their prompts differ, first at message {_first_difference(prompt, other_prompt)}; "
                "what each agent was told must be the same (no dates or memories in it), or name the node "
                "that was: node=..."
            )
        if json.dumps(tools, sort_keys=True) != json.dumps(other_tools, sort_keys=True):
            raise RewardError(f"{what}: they had different tools; leave this choice out")
        rows.append(PreferencePair(prompt, chosen, rejected, tools))
    return rows


def export_pairs(path: str | Path, pairs: Sequence[PreferencePair]) -> int:
    """Write rows as JSON lines; the file appears whole or not at all.

    Returns:
        How many rows there are.

    Raises:
        RewardError: there are none.
    """
    if not pairs:
        raise RewardError(f"{path}: there are no pairs to write; ask people for choices that are no ties")
    return write_lines(Path(path), (json.dumps(pair.row(), ensure_ascii=False) for pair in pairs))


def _conversation(
    run: Trajectory, node: str | None
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Any, ...]]:
    """What an agent was told first, what was said from then on, and its tools."""
    try:
        steps = [s for s in steps_of(run, node) if s.response is not None]
    except KeyError as unknown:
        raise RewardError(f"trajectory {run.id}: {unknown.args[0]}") from None
    if not steps:
        raise RewardError(f"trajectory {run.id} has no answered call to compare")
    first, last = steps[0], steps[-1]
    for before, after in pairwise(steps):
        if not _continues(before, after):
            nodes = sorted({str(s.identity.node) for s in steps})
            raise RewardError(
                f"trajectory {run.id}: its calls are no single conversation (step {after.id} does not go on "
                f"from {before.id}); name one node of {', '.join(nodes)} with node=..., or compare runs of "
                "one agent"
            )
    said = (*last.messages[len(first.messages) :], _response(last))
    return first.messages, said, last.tools


def _continues(before: Step, after: Step) -> bool:
    """Whether a call was given all of an earlier one, and what that answered."""
    known = _keys((*before.messages, _response(before)))
    return _keys(after.messages[: len(known)]) == known


def _response(step: Step) -> Message:
    assert step.response is not None
    return step.response


def _keys(messages: Sequence[Message]) -> list[str]:
    """What makes messages the same; servers and clients spell calls of tools differently."""
    return [
        json.dumps([m.get("role"), content_text(m).strip(), [c.get("id") for c in m.get("tool_calls") or ()]])
        for m in messages
    ]


def _first_difference(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = zip(_keys(one), _keys(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs, 1) if a != b), min(len(one), len(other)) + 1)


def _plain(message: Message) -> dict[str, Any]:
    """A message with what chat templates read, and nothing of a server's own."""
    kept: dict[str, Any] = {key: message[key] for key in ("role", "tool_call_id", "name") if message.get(key)}
    kept["content"] = content_text(message)
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in cast("Sequence[Mapping[str, Any]]", calls)]
    return kept


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, which chat templates write as JSON themselves."""
    function = cast("Mapping[str, Any]", call.get("function") or {})
    arguments = function.get("arguments")
    parsed = parsed_arguments(arguments)
    return {
        "id": call.get("id"),
        "type": "function",
        # What is no object was sampled so; a template quotes it.
        "function": {"name": function.get("name"), "arguments": arguments if parsed is None else parsed},
    }
