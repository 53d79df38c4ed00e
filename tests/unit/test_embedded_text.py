import pytest
from helpers.tiny import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.embedded.text import Detokenizer, StopFinder

TOKENIZER = tiny_tokenizer()


@given(st.text(max_size=30))
def test_pieces_joined_are_the_whole_text_and_none_ends_inside_a_character(text: str) -> None:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) + detokenizer.finish() == whole
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_is_given_out_at_the_end() -> None:
    ids: list[int] = TOKENIZER("é", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_text_only_when_kept() -> None:
    end = TOKENIZER.eos_token_id
    assert isinstance(end, int)
    assert Detokenizer(TOKENIZER).push(end) == ""
    assert Detokenizer(TOKENIZER, keep_special=True).push(end) == "<|im_end|>"


@pytest.mark.parametrize("pieces", [["hello world"], ["hel", "lo ", "wor", "ld"], list("hello world")])
def test_a_stop_text_is_found_however_it_arrives(pieces: list[str]) -> None:
    finder = StopFinder(("o w", "xyz"))
    found = [hit for piece in pieces if (hit := finder.push(piece))]
    assert found[0] == ("o w", 4)


def test_the_stop_text_that_begins_first_wins() -> None:
    assert StopFinder(("b", "ab")).push("xxab") == ("ab", 2)
