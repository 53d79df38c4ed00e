"""What a single token is: its text, and the bytes that it stands for.

Invariant: the bytes of consecutive tokens, joined, are the UTF-8 bytes of their text, also where a
character is spread over several tokens. Special tokens stand for their own names.
"""

import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable letter for each byte (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Speller:
    """Spells tokens of one tokenizer.

    Args:
        tokenizer: the model's; used by whoever calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._byte_level = "ByteLevel" in decoder
        self._added: frozenset[int] = frozenset(tokenizer.added_tokens_decoder)
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """A token's text, with U+FFFD for parts of characters, and its bytes."""
        known = self._known.get(token)
        if known is None:
            text = self._tokenizer.decode([token])
            assert isinstance(text, str)
            known = self._known[token] = (text, self._bytes(token, text))
        return known

    def _bytes(self, token: int, text: str) -> bytes:
        if token in self._added or "\ufffd" not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return text.encode()  # a row of the model that is no token
        if self._byte_level:
            letters = _byte_of_letter()
            return bytes(letters[letter] for letter in piece) if set(piece) <= set(letters) else text.encode()
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else text.encode()
