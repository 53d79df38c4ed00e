import pytest
from helpers.tiny import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from art_core.inference.embedded.spelling import Speller

TOKENIZER = tiny_tokenizer()
SPELL = Speller(TOKENIZER)


@given(st.text(max_size=30))
def test_the_bytes_of_tokens_joined_are_the_texts_bytes(text: str) -> None:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    assert b"".join(SPELL(token)[1] for token in ids).decode() == text


def test_a_part_of_a_character_has_its_own_byte() -> None:
    ids: list[int] = TOKENIZER("\u00e9", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    assert [SPELL(token) for token in ids] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]


def test_a_special_token_is_spelled_by_its_name() -> None:
    end = TOKENIZER.eos_token_id
    assert isinstance(end, int)
    assert SPELL(end) == ("<|im_end|>", b"<|im_end|>")


def test_a_row_of_the_model_that_is_no_token_has_no_text() -> None:
    assert SPELL(len(TOKENIZER) + 5) == ("", b"")


@pytest.mark.parametrize(("token", "spelled"), [(0, b"\xc3"), (2, b"word")])
def test_byte_tokens_of_sentencepiece_are_bytes(token: int, spelled: bytes) -> None:
    bare = Tokenizer(models.BPE(vocab={"<0xC3>": 0, "<0xA9>": 1, "word": 2}, merges=[]))
    bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert Speller(PreTrainedTokenizerFast(tokenizer_object=bare))(token)[1] == spelled
