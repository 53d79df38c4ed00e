import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.tool_parsing import BARE_JSON, FORMS, HERMES, ParsedCall, ToolForm

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def parse_tool_calls(
    text: str, form: ToolForm = HERMES, *, cuts: list[int] | None = None
) -> tuple[str | None, list[ParsedCall]]:
    """Content and calls of a text; content is None where there is none beside calls."""
    parser = form.parser()
    places = sorted({0, len(text), *(cut for cut in cuts or () if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    found = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
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


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_bare_object_is_a_call_with_arguments_under_either_name(key: str) -> None:
    text = BARE.replace("arguments", key)
    assert parse_tool_calls(text, BARE_JSON) == (None, [ParsedCall("get_weather", '{"city": "Paris"}')])


@pytest.mark.parametrize("between", [";\n", "; ", "\n", "", " ;\n\n"])
def test_bare_calls_follow_each_other_with_space_or_a_semicolon_between(between: str) -> None:
    text = f"Let me look.\n{BARE}{between}{BARE.replace('Paris', 'Rome')}"
    content, calls = parse_tool_calls(text, BARE_JSON)
    assert content == "Let me look."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]


def test_braces_and_quotes_inside_a_bare_calls_strings_do_not_end_it() -> None:
    arguments = {"code": 'f"{x}" }} \\" {\\', "more": {"a": [{"b": "}"}]}}
    text = json.dumps({"name": "run", "arguments": arguments})
    content, calls = parse_tool_calls(f"{text} done", BARE_JSON)
    assert content == "done"
    assert json.loads(calls[0].arguments) == arguments


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "text"}',
        '{"outer": {"name": "f", "arguments": {}}}',
        "if (x) { return {}; } // {",
        '{"broken',
        " { ",
    ],
)
def test_an_object_that_is_not_a_call_stays_text(text: str) -> None:
    """C08"""
    assert parse_tool_calls(text, BARE_JSON) == (text, [])


def test_text_in_braces_that_is_no_object_is_not_held_back() -> None:
    parser = BARE_JSON.parser()
    assert "".join(str(part) for part in parser.push("a {b} c")) == "a {b} c"


def test_a_form_begins_a_call_that_it_reads() -> None:
    for form in FORMS.values():
        text = form.opening("get_weather") + ' {"city": "Paris"}}' + (form.end or "")
        assert parse_tool_calls(text, form) == (None, [ParsedCall("get_weather", '{"city": "Paris"}')])
        rest = BARE.removeprefix('{"name":') if form.opening(None).endswith('"name":') else BARE
        assert len(parse_tool_calls(form.opening(None) + rest + (form.end or ""), form)[1]) == 1


PIECES = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "word", '{"name"']
    ),
    max_size=8,
)
BARE_PIECES = st.lists(
    st.sampled_from(
        [BARE, BARE.replace("Paris", '\\" {}'), "{", "}", '"', "\\", ";", " ", "\n", "word", '{"a"']
    )
    | st.text(alphabet='{}"\\; a:', max_size=6),
    max_size=8,
)
CUTS = st.lists(st.integers(0, 400), max_size=12)


@given(PIECES, CUTS)
def test_what_is_found_does_not_depend_on_how_the_text_was_cut(pieces: list[str], cuts: list[int]) -> None:
    """C03"""
    whole_content, whole_calls = parse_tool_calls("".join(pieces))
    content, calls = parse_tool_calls("".join(pieces), cuts=cuts)
    assert ((content or ""), calls) == ((whole_content or ""), whole_calls)


@given(BARE_PIECES, CUTS)
def test_what_is_found_of_bare_calls_does_not_depend_on_how_the_text_was_cut(
    pieces: list[str], cuts: list[int]
) -> None:
    """C03"""
    whole_content, whole_calls = parse_tool_calls("".join(pieces), BARE_JSON)
    content, calls = parse_tool_calls("".join(pieces), BARE_JSON, cuts=cuts)
    assert ((content or ""), calls) == ((whole_content or ""), whole_calls)


@given(st.lists(st.sampled_from([BARE, "{", '{"a": 1}', '{"a', "word ", "; ", "\\", '"']), max_size=8))
def test_everything_but_bare_calls_and_what_stands_around_them_stays_content(pieces: list[str]) -> None:
    """C08"""
    text = "".join(pieces)
    content, calls = parse_tool_calls(text, BARE_JSON)
    if not calls:
        assert (content or "") == text
    solid = [character for character in text if character not in " ;"]
    said = [character for character in content or "" if character not in " ;"]
    made = [character for character in BARE * len(calls) if character not in " ;"]
    assert Counter(said) + Counter(made) == Counter(solid)
    rest = iter(solid)
    assert all(character in rest for character in said), "in the order in which it was written"
