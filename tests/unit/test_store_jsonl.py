"""JSON lines of trajectories, and OpenAI's fine-tuning format."""

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trajectories import a_span, a_step, a_trajectory
from pydantic import BaseModel

from art_core.errors import StoreError
from art_core.jsonl import (
    conversations,
    dump_trajectory,
    export_conversations,
    export_trajectories,
    import_trajectories,
    write_lines,
)
from art_core.store import Store
from art_core.types import Scenario, Step, Trajectory, TrajectoryGroup

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def exchange(number: int, messages: Sequence[dict[str, Any]], answer: dict[str, Any], **more: Any) -> Step:
    return a_step("t-1", number, messages=tuple(messages), response=answer, **more)


def talk(*steps: Step) -> Trajectory:
    return replace(a_trajectory("t-1"), steps=steps)


def test_an_export_imported_and_exported_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    trajectories = [
        a_trajectory("t-1", reward=1),  # a whole number where a float belongs
        a_trajectory("t-2", steps=0, metadata={"text": "☂ \ud83d \u2028 \r", "huge": 10**30, "tiny": 1e-300}),
        a_trajectory("t-3", spans=(a_span(0), a_span(1, status="error", error="no"))),
    ]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert export_trajectories(trajectories, first) == 3
    imported = list(import_trajectories(first))
    assert imported == trajectories
    assert export_trajectories(imported, second) == 3
    assert first.read_bytes() == second.read_bytes()
    assert [json.loads(line)["id"] for line in first.read_text().split("\n")[:-1]] == ["t-1", "t-2", "t-3"]


def test_objects_in_a_scenarios_inputs_are_exported_whole_as_the_store_keeps_them(tmp_path: Path) -> None:
    class Said(BaseModel):
        """As chat messages of frameworks are: what tells their kind is a default."""

        text: str
        type: str = "human"

    scenario = Scenario("greeting", {"messages": [Said(text="hi")]}, {"like": Said(text="ho")})
    trajectory = replace(a_trajectory("t-1"), scenario=scenario, metadata={"output": Said(text="hey")})
    export_trajectories([trajectory], tmp_path / "one.jsonl")
    (imported,) = import_trajectories(tmp_path / "one.jsonl")
    assert imported.scenario.inputs == {"messages": [{"text": "hi", "type": "human"}]}
    assert imported.scenario.metadata == {"like": {"text": "ho", "type": "human"}}
    assert imported.metadata == {"output": {"text": "hey", "type": "human"}}
    with Store.open("one", tmp_path) as store:
        store.save_group(TrajectoryGroup(scenario, (trajectory,), id="g-1"))
        assert store.trajectory("t-1").scenario == imported.scenario


def test_an_export_by_way_of_another_store_is_the_same_to_the_byte(tmp_path: Path) -> None:
    with Store.open("one", tmp_path) as one, Store.open("two", tmp_path) as two:
        for n in range(3):
            one.save_trajectory(a_trajectory(f"t-{n}"))
        export_trajectories(one.trajectories(), tmp_path / "one.jsonl")
        for trajectory in import_trajectories(tmp_path / "one.jsonl"):
            two.save_trajectory(trajectory)
        export_trajectories(two.trajectories(), tmp_path / "two.jsonl")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON: "),
        ("[]", "not a trajectory: "),
        ('{"id": "t"}', "scenario: Field required"),
        ('{"id": "t", "scenario": {"id": "s"}, "rewrd": 1}', "rewrd: .*[Uu]nexpected"),
        ('{"id": "t", "scenario": {"id": "s"}, "status": "finished", "reward": NaN}', "finite number"),
        ('{"id": "t", "scenario": {"id": "s"}, "status": "failed", "reward": 1}', "cannot have a reward"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, bad: str, reason: str) -> None:
    path = tmp_path / "some.jsonl"
    good = dump_trajectory(a_trajectory("t-1"))
    path.write_bytes(f"{good}\n\n{bad}\n".encode(errors="surrogateescape"))
    lines = import_trajectories(path)
    assert next(lines).id == "t-1"
    with pytest.raises(StoreError, match=rf"some\.jsonl, line 3: .*{reason}"):
        next(lines)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.jsonl cannot be read"):
        next(import_trajectories(tmp_path / "none.jsonl"))


def test_an_export_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    export_trajectories([a_trajectory("t-1")], path)
    before = path.read_bytes()
    unwritable = a_trajectory("t-2", metadata={("a", "b"): 1})
    with pytest.raises(StoreError, match="trajectory t-2 cannot be exported"):
        export_trajectories([a_trajectory("t-3"), unwritable], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversation_is_exported_once_at_its_full_length() -> None:
    first, second = user("1?"), user("2?")
    trajectory = talk(
        exchange(0, [first], assistant("one")),
        exchange(
            1, [first, assistant("one"), second], assistant("two", reasoning_content="hm", refusal=None)
        ),
    )
    assert list(conversations(trajectory)) == [
        {"messages": [first, assistant("one"), second, assistant("two")]}
    ]


def test_tool_calls_written_anew_are_the_same_conversation() -> None:
    """C21."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    sampled = assistant(None, tool_calls=[call('{"city":"Paris","x":1e3}')])
    resent = assistant("", tool_calls=[call('{"city": "Paris", "x": 1000.0}')])
    trajectory = talk(
        exchange(0, [user("?")], sampled, tools=(TOOL,)),
        exchange(1, [user("?"), resent, result], assistant("Rain."), tools=(TOOL,)),
    )
    (conversation,) = conversations(trajectory)
    assert [m["role"] for m in conversation["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert conversation["tools"] == [TOOL]


def test_parallel_branches_and_rewritten_history_are_conversations_of_their_own() -> None:
    start = user("go")
    trajectory = talk(
        exchange(0, [start], assistant("left")),
        exchange(1, [start], assistant("right")),
        exchange(2, [start, assistant("left"), user("on")], assistant("done")),
        exchange(3, [user("a summary of it")], assistant("ok")),
    )
    ends = [[m["content"] for m in c["messages"]] for c in conversations(trajectory)]
    assert ends == [["go", "right"], ["go", "left", "on", "done"], ["a summary of it", "ok"]]


def test_calls_without_an_answer_and_those_not_asked_for_are_left_out(tmp_path: Path) -> None:
    trajectory = talk(
        exchange(0, [user("a")], assistant("x")),
        a_step("t-1", 1, response=None, error="HTTP 500"),
        exchange(2, [user("b")], assistant(None)),
    )
    path = tmp_path / "chat.jsonl"
    assert export_conversations([trajectory], path) == 2
    assert json.loads(path.read_text().splitlines()[1])["messages"][-1] == assistant("")
    assert export_conversations([trajectory], path, include=lambda step: step.id.endswith("-0")) == 1


def test_a_pipe_is_written_and_a_link_followed_and_neither_is_replaced(tmp_path: Path) -> None:
    pipe, real, link = tmp_path / "pipe", tmp_path / "real.jsonl", tmp_path / "latest.jsonl"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert write_lines(pipe, ["a", "b"]) == 2
    reader.join()
    assert read == [b"a\nb\n"]
    assert pipe.is_fifo()

    link.symlink_to(real)
    assert write_lines(link, ["c"]) == 1
    assert real.read_text() == "c\n"
    assert link.is_symlink()


def test_what_cannot_be_written_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"^{re.escape(str(tmp_path))} cannot be written"):
        write_lines(tmp_path, ["a"])
