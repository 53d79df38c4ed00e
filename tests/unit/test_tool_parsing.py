import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.tool_parsing import ParsedCall, ToolCallParser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def parse_tool_calls(text: str) -> tuple[str | None, list[ParsedCall]]:
    """Content and calls of a whole text; content is None where there is none beside calls."""
    parser = ToolCallParser()
    found = [*parser.push(text), *parser.finish()]
    calls = [part for part in found if isinstance(part, ParsedCall)]
    content = "".join(part for part in found if isinstance(part, str))
    return (content or None) if calls else content, calls


def test_text_without_a_call_is_content_as_it_is() -> None:
    assert parse_tool_calls(" plain <b>text</b> \n") == (" plain <b>text</b> \n", [])


def test_a_call_alone_leaves_no_content() -> None:
    assert parse_tool_calls(CALL) == (None, [ParsedCall("get_weather", '{"city": "Paris"}')])


def test_several_calls_keep_their_order_and_the_content_before_them() -> None:
    second = CALL.replace("Paris", "Rome")
    content, calls = parse_tool_calls(f"Let me look.\n{CALL}\n{second}")
    assert content == "Let me look."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}',
        "not json",
        "[1, 2]",
        '{"name": 3, "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "text"}',
    ],
)
def test_a_block_that_is_not_a_call_stays_text(body: str) -> None:
    """C08"""
    text = f"<tool_call>{body}</tool_call>"
    assert parse_tool_calls(text) == (text, [])


def test_a_good_call_beside_a_malformed_one_is_still_a_call() -> None:
    content, calls = parse_tool_calls(f"<tool_call>oops</tool_call>\n{CALL}")
    assert content == "<tool_call>oops</tool_call>"
    assert len(calls) == 1


def test_a_call_that_is_complete_but_for_its_closing_tag_counts() -> None:
    assert len(parse_tool_calls(CALL.removesuffix("</tool_call>"))[1]) == 1


def test_letters_outside_ascii_survive_in_arguments() -> None:
    _, calls = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"a": "\\u00e9🙂"}}</tool_call>')
    assert calls[0].arguments == '{"a": "é🙂"}'


PIECES = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "word", '{"name"']
    ),
    max_size=8,
)


@given(PIECES, st.lists(st.integers(0, 400), max_size=12))
def test_what_is_found_does_not_depend_on_how_the_text_was_cut(pieces: list[str], cuts: list[int]) -> None:
    """C03"""
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parser = ToolCallParser()
    found: list[str | ParsedCall] = []
    for start, end in itertools.pairwise(places):
        found.extend(parser.push(text[start:end]))
    found.extend(parser.finish())
    content, calls = parse_tool_calls(text)
    assert "".join(part for part in found if isinstance(part, str)) == (content or "")
    assert [part for part in found if isinstance(part, ParsedCall)] == calls
