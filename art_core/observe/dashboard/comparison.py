"""Texts compared word by word, so that what one says and another does not can be marked.

Invariant: the words of a marked text, joined, are that text, and the same two texts are always marked alike.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_WORD = re.compile(r"\s*\S+|\s+$")

MOST_WORDS = 1500
"""Of each text; longer ones are compared only so far, since the time grows with the square."""


@dataclass(frozen=True, slots=True)
class Run:
    """Words that follow each other.

    Attributes:
        text: they, with the spaces between.
        own: the text that they are compared with does not have them there.
    """

    text: str
    own: bool


def marked(text: str, reference: str) -> list[Run]:
    """A text, in runs of words that a reference has, and of words that are its own."""
    words, others = _words(text), _words(reference)
    if words == others:
        return [Run(text, False)] if text else []
    compared = [word.strip() for word in words[:MOST_WORDS]]
    found: list[Run] = []
    matcher = SequenceMatcher(None, [word.strip() for word in others[:MOST_WORDS]], compared, autojunk=False)
    for kind, _, _, begin, end in matcher.get_opcodes():
        if end > begin:
            found.append(Run("".join(words[begin:end]), kind != "equal"))
    rest = "".join(words[MOST_WORDS:])
    return [*found, Run(rest, False)] if rest else found


def own_items(items: Sequence[Hashable], reference: Sequence[Hashable]) -> list[bool]:
    """Of each item, whether a reference does not have it there."""
    found = [True] * len(items)
    for block in SequenceMatcher(None, reference, items, autojunk=False).get_matching_blocks():
        found[block.b : block.b + block.size] = [False] * block.size
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text)
