import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.tool_parsing import BARE_JSON, FORMS, HERMES, ParsedCall, ToolForm

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
LIST = f"[{BARE}, {BARE.replace('Paris', 'Rome')}]"


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


@pytest.mark.parametrize("between", [";\n", " ", "\n", ""])
def test_lists_and_objects_may_follow_each_other(between: str) -> None:
    content, calls = parse_tool_calls(between.join((LIST, BARE, f"[ {BARE} ]")), BARE_JSON)
    assert content is None
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome", "Paris", "Paris"]


@pytest.mark.parametrize(
    "text",
    [
        LIST,
        LIST.removesuffix("]"),
        LIST.removesuffix("]") + "\n",
        LIST.replace("arguments", "parameters"),
        LIST.replace("[", "[\n  ").replace("}, ", "},\n  ").replace("]", "\n]"),
    ],
)
def test_a_list_is_the_calls_in_it_also_where_the_answer_ends_before_its_last_bracket(text: str) -> None:
    content, calls = parse_tool_calls(f"Let me look.\n{text}", BARE_JSON)
    assert content == "Let me look."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]


def test_a_list_is_read_when_it_is_complete_and_not_before() -> None:
    parser = BARE_JSON.parser()
    assert [*parser.push(LIST[:-1])] == []
    assert len([*parser.push(LIST[-1:] + " and")]) == 3
    assert [*parser.finish()] == []


@pytest.mark.parametrize("wrap", ["{}", "[{}]"])
def test_brackets_and_quotes_inside_a_bare_calls_strings_do_not_end_it(wrap: str) -> None:
    arguments = {"code": 'f"{x}" }} ]] \\" {[\\', "more": {"a": [{"b": "}]"}, []]}}
    text = wrap.replace("{}", json.dumps({"name": "run", "arguments": arguments}))
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
        f'[{BARE}, {{"a": 1}}]',
        f'[{{"a": 1}}, {BARE}]',
        f"[{BARE}, 1]",
        f"[{BARE}, [{BARE}]]",
        f"[[{BARE}]]",
        f"[{BARE}; {BARE}]",
        f"[{BARE},]",
        f"[{BARE}, ",
        f'[{BARE}, {{"name": "get_weather", "argu',
        "[]",
        "[{}]",
        '[{"a',
        " [ {",
        " [[ ",
    ],
)
def test_an_object_or_a_list_with_anything_that_is_no_call_stays_text(text: str) -> None:
    """C08"""
    assert parse_tool_calls(text, BARE_JSON) == (text, [])


@pytest.mark.parametrize("text", ["a {b} c", "[1] see {x}", "a[0] = b[[1]][ {c} ]", "- [x] done [link](to)"])
def test_text_in_braces_and_brackets_that_is_no_call_is_not_held_back(text: str) -> None:
    parser = BARE_JSON.parser()
    said = ""
    for at, character in enumerate(text):
        said += "".join(str(part) for part in parser.push(character))
        held = text[len(said) : at + 1]
        assert not held.strip(" [{"), "only what may still become a call waits"
    assert said == text


def test_a_form_begins_a_call_that_it_reads() -> None:
    for form in FORMS.values():
        text = form.opening("get_weather") + ' {"city": "Paris"}}' + (form.end or "")
        assert parse_tool_calls(text, form) == (None, [ParsedCall("get_weather", '{"city": "Paris"}')])
        begun = form.opening(None)
        rest = BARE.removeprefix('{"name":') if begun.endswith('"name":') else BARE
        assert len(parse_tool_calls(begun + rest + (form.end or ""), form)[1]) == 1


@pytest.mark.parametrize("named", ["get_weather", None])
def test_bare_calls_are_begun_as_a_list_whose_end_ends_the_answer(named: str | None) -> None:
    begun = BARE_JSON.opening(named)
    assert LIST.startswith(begun)
    parser = BARE_JSON.parser()
    assert len([*parser.push(begun), *parser.push(LIST.removeprefix(begun))]) == 2


PIECES = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "word", '{"name"']
    ),
    max_size=8,
)
BARE_PIECES = st.lists(
    st.sampled_from(
        [BARE, BARE.replace("Paris", '\\" {}]'), LIST, "{", "}", '"', "\\", ";", " ", "\n", "word", '{"a"']
    )
    | st.sampled_from(["[", "]", ", ", "[ {", '[{"a"', f"[{BARE}"])
    | st.text(alphabet='[{}]"\\; a:,', max_size=6),
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


SAID = st.sampled_from(
    [BARE, LIST, f"[{BARE}", "{", "[", "]", ", ", '{"a": 1}', '{"a', "word ", "; ", "\\", '"']
)
BLANK = " ;"


@given(st.lists(SAID, max_size=8))
def test_everything_but_bare_calls_and_what_stands_around_them_stays_content(pieces: list[str]) -> None:
    """C08"""
    text = "".join(pieces)
    content, calls = parse_tool_calls(text, BARE_JSON)
    if not calls:
        assert (content or "") == text
    solid = [character for character in text if character not in BLANK]
    said = [character for character in content or "" if character not in BLANK]
    made = Counter[str]()
    for call in calls:
        made.update(c for c in BARE.replace('{"city": "Paris"}', call.arguments) if c not in BLANK)
    # A list's own brackets and commas go with its calls; nothing else does, and nothing is made up.
    gone = Counter(solid) - Counter(said) - made
    assert set(gone) <= set("[],")
    assert gone["]"] <= gone["["] <= len(calls) - gone[","]
    assert gone.total() + made.total() + len(said) == len(solid)
    rest = iter(solid)
    assert all(character in rest for character in said), "in the order in which it was written"
