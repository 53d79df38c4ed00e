import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.config import EngineConfig
from art_core.errors import ConfigError
from art_core.inference.embedded.parsing import Forms, MessageParser, forms_of
from art_core.inference.reasoning_parsing import ReasoningParser, Thought, opened_by
from art_core.inference.tool_parsing import HERMES, ParsedCall

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def read(*pieces: str, thinking: bool = False) -> tuple[str, str]:
    """Thoughts and answer."""
    parser = ReasoningParser(thinking=thinking)
    found = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
    thoughts = "".join(part.text for part in found if isinstance(part, Thought))
    return thoughts, "".join(part for part in found if isinstance(part, str))


def test_thoughts_and_answer_are_told_apart() -> None:
    assert read("<think>\n2 + 2\n</think>\n\n4.") == ("2 + 2", "4.")


def test_text_without_a_thought_is_the_answer_as_it_is() -> None:
    assert read(" plain </think> <b>text</b>\n") == ("", " plain </think> <b>text</b>\n")


def test_a_thought_that_the_template_opened_needs_no_tag() -> None:
    assert read("so\n</think>4", thinking=True) == ("so", "4")


def test_a_thought_that_is_never_closed_is_all_there_is() -> None:
    assert read("<think>\nwhy, and </thi") == ("why, and </thi", "")


def test_a_tag_later_in_the_answer_is_text() -> None:
    assert read("<think>a</think>b <think>c</think>") == ("a", "b <think>c</think>")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("say <think> please", False),
    ],
)
def test_whether_a_prompt_opens_a_thought(prompt: str, opened: bool) -> None:
    assert opened_by(prompt) is opened


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "<", " ", "\n", "word", CALL]), max_size=8
)


@given(PIECES, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_what_is_found_does_not_depend_on_how_the_text_was_cut(
    pieces: list[str], cuts: list[int], thinking: bool
) -> None:
    """C03"""
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read(*(text[a:b] for a, b in itertools.pairwise(places)), thinking=thinking) == read(
        text, thinking=thinking
    )


def test_a_call_inside_a_thought_is_none_and_one_after_it_is() -> None:
    parser = MessageParser(tools=HERMES, reasoning=True, prompt="")
    found = [*parser.push(f"<think>maybe {CALL}</think>{CALL}"), *parser.finish()]
    assert found == [Thought(f"maybe {CALL}"), ParsedCall("f", "{}")]


def test_the_template_decides_whether_thoughts_are_looked_for() -> None:
    asks = (
        "{% if add_generation_prompt %}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    assert forms_of("m", asks, EngineConfig()) == Forms(HERMES, reasoning=True)
    assert forms_of("m", "{{ messages }}", EngineConfig()) == Forms(HERMES, reasoning=False)
    assert not forms_of("m", asks, EngineConfig(reasoning_parser=None)).reasoning
    assert forms_of("m", "", EngineConfig(reasoning_parser="deepseek_r1")).reasoning


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_is_not_here_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}='mistral'.*kind='vllm'"):
        forms_of("m", "", EngineConfig(**{setting: "mistral"}))
