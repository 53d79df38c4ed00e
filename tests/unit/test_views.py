"""Trajectories as people see them."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)
from art_core.views.text import MARK, safe, shorten

SYSTEM = {"role": "system", "content": "You plan."}
USER = {"role": "user", "content": "Go."}


def assistant(text=None, *calls):
    tool_calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": tool_calls} if calls else {})}


def step(at, node, namespace, messages, response, **changes) -> Step:
    default = {
        "rollout_id": "t",
        "model": "agent@3",
        "policy": PolicyVersion("agent", 3),
        "tokens": StepTokens((1, 2, 3), (4, 5), (-0.1, -0.2)),
        "started_at": float(at),
        "duration": 0.25,
    }
    identity = StepIdentity(node=node, namespace=namespace, attempt=changes.pop("attempt", 1))
    return Step(
        id=f"s{at}", messages=tuple(messages), response=response, identity=identity, **{**default, **changes}
    )


def trajectory(*steps, **changes) -> Trajectory:
    default = {"id": "t-1", "scenario": Scenario("s"), "status": RolloutStatus.FINISHED}
    return Trajectory(steps=tuple(steps), **{**default, **changes})


# The server said {"a":1}; LangChain sends it back as {"a": 1}, and with other fields left out.
CALLED = assistant("", ("look", '{"a":1}'))
CALLED_AS_RESENT = {**assistant(None, ("look", '{"a": 1}')), "name": "agent"}
TOOL = {"role": "tool", "tool_call_id": "c0", "content": "found"}
PLANNER = [
    step(0, "planner", "planner:1", [SYSTEM, USER], CALLED),
    step(2, "planner", "planner:2", [SYSTEM, USER, CALLED_AS_RESENT, TOOL], assistant("the plan")),
]
WRITER = step(1, "writer", "work:3|writer:4", [{"role": "user", "content": "Write."}], assistant("text"))


# -- messages ----------------------------------------------------------------------------------------


def test_a_conversation_holds_each_message_once_also_when_langchain_wrote_it_anew() -> None:
    told = trajectory(*PLANNER).messages()
    assert told == (SYSTEM, USER, CALLED, TOOL, assistant("the plan"))


def test_one_nodes_conversation_is_its_own() -> None:
    t = trajectory(PLANNER[0], WRITER, PLANNER[1])
    assert t.messages("planner") == (SYSTEM, USER, CALLED, TOOL, assistant("the plan"))
    assert t.messages(node="writer") == ({"role": "user", "content": "Write."}, assistant("text"))
    assert len(t.messages()) == 7


def test_a_node_that_made_no_call_is_an_error_that_lists_those_that_did() -> None:
    with pytest.raises(KeyError, match=r"'painter'; nodes with steps: planner, writer"):
        trajectory(PLANNER[0], WRITER).messages("painter")


def test_a_trimmed_history_goes_on_with_what_is_new() -> None:
    late = {"role": "user", "content": "And now?"}
    t = trajectory(
        step(0, "chat", "chat:1", [SYSTEM, USER], assistant("one")),
        step(1, "chat", "chat:2", [SYSTEM, late], assistant("two")),
    )
    assert t.messages() == (SYSTEM, USER, assistant("one"), late, assistant("two"))


def test_parallel_branches_of_one_node_show_their_common_prompt_once() -> None:
    asks = [{"role": "user", "content": f"item {i}"} for i in range(3)]
    t = trajectory(
        *(step(i, "work", f"work:{i}", [SYSTEM, ask], assistant(f"did {i}")) for i, ask in enumerate(asks))
    )
    contents = [m["content"] for m in t.messages()]
    assert contents == ["You plan.", "item 0", "did 0", "item 1", "did 1", "item 2", "did 2"]


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8))
def test_a_growing_conversation_is_shown_exactly(turns: list[str]) -> None:
    history: list = [SYSTEM]
    steps = []
    for at, turn in enumerate(turns):
        history.append({"role": "user", "content": turn})
        steps.append(step(at, "chat", f"chat:{at}", list(history), assistant(turn[::-1])))
        history.append(assistant(turn[::-1]))
    assert list(trajectory(*steps).messages()) == history


# -- tree --------------------------------------------------------------------------------------------


def test_the_tree_follows_namespaces_and_attempts() -> None:
    again = step(3, "writer", "work:3|writer:4", [USER], assistant("better"), attempt=2)
    root = trajectory(PLANNER[0], WRITER, again).tree()
    assert [child.name for child in root.children] == ["planner", "work"]
    work = root.children[1]
    assert [(c.name, c.attempt) for c in work.children] == [("writer", 1), ("writer", 2)]
    assert root.total_steps == 3
    shown = str(root)
    assert shown.splitlines()[0] == "s"
    assert re.search(r"work\n.*── writer\n.*text\n.*── writer  attempt 2\n.*better", shown)


def test_tools_are_shown_where_they_were_used_in_the_order_of_time() -> None:
    tool = Span(
        id="r", kind="tool", name="look", started_at=0.5, duration=0.1, node="planner", namespace="planner:1"
    )
    broken = replace(tool, id="r2", started_at=3.0, error="no such page", node="web", namespace="web:9")
    node = replace(tool, id="r3", kind="chain")
    root = trajectory(*PLANNER, spans=(tool, broken, node)).tree()
    assert [c.name for c in root.children] == ["planner", "planner", "web"]
    shown = str(root)
    assert shown.index("-> look") < shown.index("tool look") < shown.index("the plan")
    assert "no such page" in shown
    assert shown.count("tool look") == 2


def test_calls_outside_of_graphs_hang_on_the_root() -> None:
    root = trajectory(step(0, None, "", [USER], assistant("hi"))).tree()
    assert len(root.steps) == 1
    assert not root.children


@given(st.lists(st.tuples(st.lists(st.sampled_from("ab"), max_size=3), st.integers(1, 2)), max_size=12))
def test_every_step_is_in_the_tree_exactly_once(places: list[tuple[list[str], int]]) -> None:
    steps = [
        step(
            at, path[-1] if path else None, "|".join(f"{p}:{p}" for p in path), [USER], None, attempt=attempt
        )
        for at, (path, attempt) in enumerate(places)
    ]
    nodes = list(trajectory(*steps).tree().walk())
    assert sorted(s.id for n in nodes for s in n.steps) == sorted(s.id for s in steps)


# -- rendering ---------------------------------------------------------------------------------------


def test_render_shows_who_said_what_with_tokens_and_outcome() -> None:
    shown = trajectory(PLANNER[0], WRITER, PLANNER[1], reward=0.75, components={"won": 0.5}).render()
    assert "reward 0.750" in shown
    assert "won 0.500" in shown
    assert "[planner]  agent@3  3+2 tokens" in shown
    assert "[work > writer]" in shown
    assert '-> look({"a":1})' in shown
    assert shown.count("You plan.") == 1
    assert shown.index("look") < shown.index("Write.") < shown.index("the plan")


def test_render_of_one_node_leaves_the_others_out() -> None:
    shown = trajectory(PLANNER[0], WRITER).render("writer")
    assert "Write." in shown
    assert "You plan." not in shown


def test_render_says_why_a_rollout_failed_and_why_a_step_is_not_trained() -> None:
    """C10."""
    broken = step(0, "n", "n:1", [USER], None, tokens=None, error="503", untrainable="the call failed")
    shown = trajectory(
        broken,
        status=RolloutStatus.FAILED,
        failure=Failure("timeout", "nothing within 5 s"),
        faults={"unattributed_calls": 2},
    ).render()
    assert "failed" in shown
    assert "timeout: nothing within 5 s" in shown
    assert "2 unattributed calls" in shown
    assert "not trained: the call failed" in shown
    assert re.search(r"error\s+503", shown)


EVIL = "\x1b[2J\x1b]0;title\x07[bold]x[/bold] [link=http://e]y[/link]\x9b31m\x07\u202e<script>alert(1)</script>\ud800"


def test_untrusted_text_is_neither_markup_nor_a_command_to_the_terminal() -> None:
    t = trajectory(
        step(
            0, EVIL, f"{EVIL}:1", [{"role": EVIL, "content": EVIL}], assistant(EVIL, (EVIL, EVIL)), error=EVIL
        ),
        id=EVIL,
        scenario=Scenario(EVIL),
        components={EVIL: 1.0},
        status=RolloutStatus.FAILED,
        failure=Failure("exception", EVIL),
    )
    for shown in (t.render(), str(t.tree()), TrajectoryGroup(t.scenario, (t,)).render()):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
        assert "title" not in shown
        shown.encode()
    assert "[bold]x[/bold] [link=http://e]y[/link]" in t.render(width=200)


def test_untrusted_text_is_escaped_in_html() -> None:
    t = trajectory(
        step(
            0, EVIL, f"{EVIL}:1", [{"role": EVIL, "content": EVIL}], assistant(EVIL, (EVIL, EVIL)), error=EVIL
        ),
        id=EVIL,
        scenario=Scenario(EVIL),
        reward=1.0,
        components={EVIL: 1.0},
    )
    for html in (t._repr_html_(), TrajectoryGroup(t.scenario, (t,))._repr_html_()):
        assert "<script" not in html
        assert "&lt;script&gt;" in html
        tags = set(re.findall(r"</?(\w+)", html))
        assert tags <= {"div", "b", "details", "summary", "table", "tr", "td", "pre"}
        html.encode()


@given(st.text(alphabet=st.characters(), max_size=300), st.integers(40, 120))
def test_no_text_breaks_the_width_or_leaves_a_control_character(text: str, width: int) -> None:
    t = trajectory(step(0, "n", "n:1", [{"role": "user", "content": text}], assistant(text)))
    for line in t.render(width=width).splitlines():
        assert cell_len(line) <= width
        assert line.isprintable() or re.search(r"[\s\u200c\u200d]", line)


def test_very_long_text_is_shortened_in_the_middle() -> None:
    long = "start " + "x" * 100_000 + " end"
    t = trajectory(step(0, "n", "n:1", [{"role": "user", "content": long}], assistant("ok")))
    shown = t.render()
    assert len(shown) < 2_000
    assert "start" in shown
    assert "end" in shown
    assert re.search(r"99,\d{3}\s+characters", shown)
    assert len(t._repr_html_()) < 10_000


@given(st.text(max_size=60), st.integers(1, 50))
def test_shortening_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        head = limit * 2 // 3
        assert short.startswith(text[:head])
        assert short.endswith(text[len(text) - (limit - head) :])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("win\r\ndows", "win\ndows"),
        ("over\rwritten", f"over{MARK}written"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b", MARK),
        ("a\u202eb", f"a{MARK}b"),
        ("\ud83d", MARK),
        ("family \U0001f468\u200d\U0001f469", "family \U0001f468\u200d\U0001f469"),
        ("zażółć 漢字", "zażółć 漢字"),
    ],
)
def test_safe_text_keeps_what_people_write_and_marks_what_it_takes_out(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_content_parts_are_shown_as_text_and_images_by_their_name() -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    shown = trajectory(
        step(
            0, "n", "n:1", [{"role": "user", "content": parts}], {"role": "assistant", "tool_calls": ["odd"]}
        )
    ).render()
    assert "what is it?" in shown
    assert "[image_url]" in shown
    assert "odd" in shown


def test_a_group_is_a_table_of_its_members() -> None:
    group = TrajectoryGroup(
        Scenario("s"),
        (
            trajectory(WRITER, reward=1.0, duration=2.0),
            trajectory(status=RolloutStatus.FAILED, failure=Failure("timeout", "too slow")),
        ),
    )
    shown = group.render()
    assert re.search(r"finished\s*│\s*1\.000\s*│\s*1\s*│\s*2\.0\s*│\s*text", shown)
    assert re.search(r"timeout.*too slow", shown)


def test_rich_prints_trajectories_groups_and_trees_by_themselves() -> None:
    console = Console(width=80, color_system=None)
    t = trajectory(WRITER, reward=1.0)
    with console.capture() as captured:
        console.print(t, TrajectoryGroup(t.scenario, (t,)), t.tree())
    assert captured.get().count("text") == 3


def test_looking_at_types_needs_no_console() -> None:
    import subprocess
    import sys

    code = (
        "import importlib.util, sys, types; sys.modules['art_core'] = m = types.ModuleType('art_core'); "
        "m.__path__ = ['art_core']; import art_core.recording; assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
