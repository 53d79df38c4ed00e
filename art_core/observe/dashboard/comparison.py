"""Texts compared word by word, so that what one says and another does not can be marked.

Invariant: the words of a marked text, joined, are that text, and the same two texts are always marked alike.
"""

import re
from collections.abc import Sequence
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


def likeness(texts: Sequence[str]) -> float | None:
    """The share of words that the texts have in common, from 0 to 1 (Jaccard); None for fewer than two."""
    sets = [set(text.split()) for text in texts]
    if len(sets) < 2:
        return None
    union = set[str]().union(*sets)
    return len(set(sets[0]).intersection(*sets[1:])) / len(union) if union else 1.0


def _words(text: str) -> list[str]:
    return _WORD.findall(text)
