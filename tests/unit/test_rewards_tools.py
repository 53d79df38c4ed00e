"""Rewards of tool use."""

from itertools import permutations

import pytest
from helpers.conversations import call, conversation, tool
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError, RewardError
from art_core.rewards import ExpectedCall, ToolArguments, ToolChoice, ToolErrors
from art_core.rewards.tools import best_in_any_order, best_in_order

SEARCH = {"name": "search", "arguments": {"query": "trip", "limit": 5}}
READ = {"name": "read", "arguments": {"id": "m1"}}


def made(*calls: dict, expected: object) -> object:
    return conversation(*([c] for c in calls), "done", tool_calls=expected)


@pytest.mark.parametrize(
    ("calls", "expected", "any_order", "ordered"),
    [
        (["search", "read"], ["search", "read"], 1, 1),
        (["read", "search"], ["search", "read"], 1, 1 / 2),
        (["search"], ["search", "read"], 2 / 3, 2 / 3),
        (["search", "search", "read"], ["search", "read"], 4 / 5, 4 / 5),
        (["delete"], ["search"], 0, 0),
        ([], [], 1, 1),
        (["search"], [], 0, 0),
        ([], ["search"], 0, 0),
    ],
)
def test_tool_choice_is_the_f1_of_calls_and_order_counts_if_asked(
    calls, expected, any_order, ordered
) -> None:
    run = made(*(call(name) for name in calls), expected=expected)
    assert ToolChoice().value(run) == pytest.approx(any_order)
    assert ToolChoice(ordered=True).value(run) == pytest.approx(ordered)


@pytest.mark.parametrize(
    ("arguments", "worth", "with_extra"),
    [
        ({"query": "trip", "limit": 5}, 1, 1),
        ({"query": "trip", "limit": 5.0}, 1, 1),
        ({"query": "trip"}, 1 / 2, 1 / 2),
        ({"query": "trip", "limit": 5, "page": 1}, 2 / 3, 1),
        ({"query": "TRIP", "limit": True}, 0, 0),
        ("{not json", 0, 0),
        ("[1]", 0, 0),
    ],
)
def test_tool_arguments_are_the_share_that_is_right(arguments, worth, with_extra) -> None:
    run = made(call("search", arguments), expected=[SEARCH])
    assert ToolArguments().value(run) == pytest.approx(worth)
    assert ToolArguments(extra=True).value(run) == pytest.approx(with_extra)


def test_calls_of_one_tool_are_paired_so_that_most_agrees_unless_order_counts() -> None:
    expected = [{"name": "read", "arguments": {"id": i}} for i in ("m1", "m2", "m3")]
    run = made(call("read", {"id": "m3"}), call("read", {"id": "m1"}), expected=expected)
    assert ToolArguments().value(run) == pytest.approx(2 / 3)
    assert ToolArguments(ordered=True).value(run) == pytest.approx(1 / 3)


def test_arguments_may_be_compared_by_the_users_own_rule_or_not_at_all() -> None:
    run = made(call("search", {"query": "TRIP", "limit": 5}), expected=[SEARCH])
    alike = ToolArguments(same=lambda wanted, given: str(wanted).lower() == str(given).lower())
    assert alike.value(run) == 1
    assert ToolArguments().value(made(call("search", {"query": "x"}), expected=["search"])) == 1
    assert ToolArguments().value(made(call("search"), expected=[])) == 1
    true_for_one = made(call("read", {"id": True}), expected=[{"name": "read", "arguments": {"id": 1}}])
    assert ToolArguments().value(true_for_one) == 0


def test_expected_calls_are_read_in_the_wire_format_too() -> None:
    run = made(call("read", {"id": "m1"}), expected=[call("read", {"id": "m1"}), ExpectedCall("gone")])
    assert ToolArguments().value(run) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    "expected", ["search", None, [{"tool": "search"}], [7], [{"name": "a", "arguments": "{"}]]
)
def test_expected_calls_that_are_none_are_an_error(expected: object) -> None:
    with pytest.raises(RewardError, match="'tool_arguments'"):
        ToolArguments().value(made(call("search"), expected=expected))


def test_tool_errors_are_bad_arguments_unknown_tools_and_error_answers() -> None:
    tools = [tool("search", query={"type": "string"}), tool("read", id={"type": "string"})]
    run = conversation(
        [call("search", {"query": "x"}, "1"), call("read", '{"id": ', "2")],
        [call("delete", {}, "3"), call("read", {"id": "m9"}, "4")],
        "done",
        results=[["2 hits", "Error: bad arguments"], ["Error: no such tool", "error invoking tool 'read'"]],
        tools=tools,
    )
    assert ToolErrors().value(run) == 3 / 4
    assert ToolErrors(error="hits").value(run) == 3 / 4
    assert ToolErrors(node="elsewhere").value(run) == 0
    with pytest.raises(ConfigError, match="'tool_errors'"):
        ToolErrors(error="(")


def test_an_answer_goes_to_its_own_call_also_when_a_server_repeats_ids() -> None:
    first, second = call("read", {"id": "a"}, "call_0"), call("read", {"id": "b"}, "call_0")
    run = conversation([first], [second], "done", results=[["Error: gone"], ["hello"]])
    assert ToolErrors().value(run) == 1 / 2
    run = conversation([first], [second], "done", results=[["hello"], ["hello, no Error"]])
    assert ToolErrors().value(run) == 0


likenesses = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.floats(0, 1), min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(likenesses)
def test_the_best_pairs_are_those_that_trying_all_would_find(likeness: list[list[float]]) -> None:
    rows, columns = len(likeness), len(likeness[0])
    slots = [*range(columns), *([None] * rows)]
    chosen = set(permutations(slots, rows))

    def worth(pairs: tuple[int | None, ...]) -> float:
        return sum(likeness[row][column] for row, column in enumerate(pairs) if column is not None)

    def rises(pairs: tuple[int | None, ...]) -> bool:
        used = [column for column in pairs if column is not None]
        return used == sorted(used)

    assert best_in_any_order(likeness) == pytest.approx(max(map(worth, chosen)))
    assert best_in_order(likeness) == pytest.approx(max(worth(pairs) for pairs in chosen if rises(pairs)))
