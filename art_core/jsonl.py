"""Trajectories as JSON lines: one trajectory per line, and OpenAI's fine-tuning format.

Invariant: exporting what was imported from an export gives the same bytes, and nothing of a trajectory is
missing from them.

A line of the first form is the trajectory by the names of `art_core.types`; fields at their default are
left out. Files appear whole or not at all.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from art_core.errors import StoreError
from art_core.store.packing import to_json
from art_core.types import Message, Step, Trajectory

_CHAT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
"""What OpenAI's fine-tuning format knows of a message; it refuses files with other keys."""


@cache
def _adapter() -> TypeAdapter[Trajectory]:
    return TypeAdapter(Trajectory)


def dump_trajectory(trajectory: Trajectory) -> str:
    """One trajectory as one line, without its line feed.

    Raises:
        StoreError: it holds something that JSON cannot.
    """
    try:
        # By way of the validated form, in which a whole-numbered reward is a float, as after an import.
        return to_json(_plain(_adapter().validate_python(json.loads(to_json(_plain(trajectory))))))
    except (ValueError, TypeError, RecursionError) as unwritable:
        raise StoreError(f"trajectory {trajectory.id} cannot be exported: {unwritable}") from unwritable


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    # What is the user's is written as the store writes it: their objects' defaults are no defaults of ours.
    given = trajectory.scenario
    scenario = replace(given, inputs=_as_json(given.inputs), metadata=_as_json(given.metadata))
    own = replace(trajectory, scenario=scenario, metadata=_as_json(trajectory.metadata))
    return _adapter().dump_python(own, exclude_defaults=True, warnings=False)


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(to_json(dict(value)))


def load_trajectory(line: str) -> Trajectory:
    """The inverse of `dump_trajectory`.

    Raises:
        StoreError: the line is not a trajectory; the message says what is wrong with it.
    """
    try:
        return _adapter().validate_python(json.loads(line), extra="forbid")
    except json.JSONDecodeError as broken:
        raise StoreError(f"not JSON: {broken.msg} at column {broken.colno}") from broken
    except ValidationError as misfit:
        faults = [f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in misfit.errors()[:3]]
        raise StoreError(f"not a trajectory: {'; '.join(faults)}") from misfit


def export_trajectories(trajectories: Iterable[Trajectory], path: str | Path) -> int:
    """Write trajectories to a file; returns how many.

    Raises:
        StoreError: one holds something that JSON cannot, or the file cannot be written.
    """
    return write_lines(path, (dump_trajectory(trajectory) for trajectory in trajectories))


def import_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Read the trajectories of a file, one at a time; empty lines are passed over.

    Raises:
        StoreError: the file cannot be read, or a line is bad; the message names file and line.
    """
    for number, line in _lines(Path(path)):
        try:
            yield load_trajectory(line)
        except StoreError as bad:
            raise StoreError(f"{path}, line {number}: {bad}; correct or remove this line") from bad


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # Bytes, because text mode would also take a carriage return for the end of a line.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.decode()
    except UnicodeDecodeError as broken:
        raise StoreError(
            f"{path}, line {number}: not UTF-8: {broken}; correct or remove this line"
        ) from broken
    except OSError as unreadable:
        raise StoreError(f"{path} cannot be read: {unreadable}") from unreadable


# -- OpenAI's fine-tuning format -----------------------------------------------------------------------


def answered(step: Step) -> bool:
    """Whether a call brought an answer."""
    return step.response is not None and step.error is None


def conversations(
    trajectory: Trajectory, *, include: Callable[[Step], bool] = answered
) -> Iterator[dict[str, Any]]:
    """A trajectory's conversations, each once and at its full length, in OpenAI's fine-tuning format.

    A step becomes a conversation of its prompt and its answer, unless a later step's prompt goes on from
    both: then that one holds it. Parallel branches, retries and sub-agents are conversations of their own.

    Args:
        trajectory: whose.
        include: which steps to consider.
    """
    steps = [step for step in trajectory.steps if include(step) and step.response is not None]
    for position, step in enumerate(steps):
        if not any(_goes_on_from(later, step) for later in steps[position + 1 :]):
            line: dict[str, Any] = {"messages": [_chat(m) for m in (*step.messages, step.response or {})]}
            if step.tools:
                line["tools"] = list(step.tools)
            yield line


def export_conversations(
    trajectories: Iterable[Trajectory],
    path: str | Path,
    *,
    include: Callable[[Step], bool] = answered,
) -> int:
    """Write conversations for OpenAI's fine-tuning, and whatever else reads its format; returns how many.

    Raises:
        StoreError: the file cannot be written.
    """
    found = (c for trajectory in trajectories for c in conversations(trajectory, include=include))
    return write_lines(path, (to_json(conversation) for conversation in found))


def _goes_on_from(later: Step, step: Step) -> bool:
    turn = len(step.messages)
    return (
        len(later.messages) > turn
        and later.messages[:turn] == step.messages
        and _said(later.messages[turn]) == _said(step.response or {})
    )


def _said(message: Message) -> tuple[Any, ...]:
    """What a message says, however it was written: agents serialise tool calls' arguments anew."""
    calls = [_called(call.get("function", {})) for call in message.get("tool_calls") or ()]
    return message.get("role"), message.get("content") or "", calls


def _called(function: Mapping[str, Any]) -> tuple[Any, Any]:
    arguments = function.get("arguments")
    try:
        return function.get("name"), json.loads(arguments or "{}")
    except (TypeError, ValueError):  # a malformed call is what it is, to the letter
        return function.get("name"), arguments


def _chat(message: Message) -> dict[str, Any]:
    kept = {key: message[key] for key in _CHAT_KEYS if message.get(key) is not None}
    return kept if "content" in kept or "tool_calls" in kept else kept | {"content": ""}


# -- files -------------------------------------------------------------------------------------------


def is_stream(path: str | Path) -> bool:
    """Whether a path names a device or a pipe, such as ``/dev/stdout``, and no file that can be replaced."""
    path = Path(path)
    # Standard output stays a stream where it was redirected into a file, which may hold something already.
    if str(path) in ("/dev/stdout", "/dev/stderr") or path.parts[:3] == ("/", "dev", "fd"):
        return True
    try:
        return path.exists() and not path.is_file()
    except OSError:  # writing will say what is wrong with it
        return False


def write_lines(path: str | Path, lines: Iterable[str]) -> int:
    """Write lines to a file, which appears whole or not at all; returns how many.

    What a link names is written, and the link stays. A device or a pipe (``/dev/stdout``) is written as it
    is: a file in its place would be nobody's wish.

    Raises:
        StoreError: the file cannot be written.
    """
    path = Path(path)
    if is_stream(path):
        return _write_through(path, lines)
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    count = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            for line in lines:
                file.write(line.encode() + b"\n")
                count += 1
        unfinished.replace(target)
    except OSError as unwritable:
        raise StoreError(f"{path} cannot be written: {unwritable}") from unwritable
    finally:
        with suppress(OSError):  # where nothing could be made, nothing is left
            unfinished.unlink()
    return count


def _write_through(path: Path, lines: Iterable[str]) -> int:
    count = 0
    try:
        with path.open("ab") as file:
            for line in lines:
                file.write(line.encode() + b"\n")
                count += 1
    except BrokenPipeError:
        raise
    except OSError as unwritable:
        raise StoreError(f"{path} cannot be written: {unwritable}") from unwritable
    return count
