"""From token ids to text, one token at a time.

Invariant: the pieces, joined, are what decoding all ids at once gives, and no piece ends inside a
character.
"""

from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Decodes a growing list of ids.

    Args:
        tokenizer: the model's.
        keep_special: whether special tokens appear in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep_special
        self._ids: list[int] = []
        # Text before `_done` was given out; decoding starts at `_from`, one piece earlier, because some
        # tokenizers drop a space at the start of what they decode.
        self._from = 0
        self._done = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._ids.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """What is left, unfinished characters as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._from, self._done)
        after = self._decode(self._from, len(self._ids))
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._from, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)
        assert isinstance(text, str)
        return text


class StopFinder:
    """Finds the first of several stop texts in text that arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops))
        self._tail = ""
        self._length = 0

    def push(self, piece: str) -> tuple[str, int] | None:
        """The stop text that the piece completes and where it begins in the whole text."""
        window = self._tail + piece
        start = self._length - len(self._tail)
        self._length += len(piece)
        found = [(window.find(stop), stop) for stop in self._stops if stop in window]
        if found:
            at, stop = min(found)
            return stop, start + at
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return None
