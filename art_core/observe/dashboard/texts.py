"""Text that a run recorded, ready for a page: cut where it is long, with what cannot be seen made visible.

Invariant: what comes out holds every character of what is shown, or a sign with a name in its place; no
character of it moves, hides or reorders anything around it, and all of it can be encoded as UTF-8.

Templates show the pieces through autoescaping; nothing here is markup.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT = 3000
"""Characters of one text that a page shows at first."""

_UNSEEN = re.compile(
    "([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\ue000-\uf8ff\U000e0000-\U000e0fff\U000f0000-\U0010ffff])\\1*"
)
_PICTURES = {**{code: chr(0x2400 + code) for code in range(0x20)}, 0x7F: "\u2421"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text.

    Attributes:
        text: what is shown.
        name: of the character that it stands for; empty where it is the text itself.
    """

    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """A text, the middle of which may be left out.

    Attributes:
        head: what is shown, up to where it is cut.
        tail: what is shown after that.
        omitted: characters that are left out.
        length: characters of the whole text.
    """

    head: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    omitted: int
    length: int


def cut(text: str, limit: int = LIMIT) -> Cut:
    """A text of at most ``limit`` characters, and the pieces that it is made of."""
    if len(text) <= limit:
        return Cut(tuple(pieces(text)), (), 0, len(text))
    head = limit * 2 // 3
    tail = limit - head
    return Cut(
        tuple(pieces(text[:head])), tuple(pieces(text[len(text) - tail :])), len(text) - limit, len(text)
    )


def pieces(text: str) -> Iterator[Piece]:
    """The parts of a text; signs stand for characters that cannot be seen."""
    at = 0
    text = text.replace("\r\n", "\n")
    for found in _UNSEEN.finditer(text):
        if found.start() > at:
            yield Piece(text[at : found.start()])
        character, count = found[1], len(found[0])
        times = f"\u00d7{count}" if count > 1 else ""
        yield Piece(f"{_sign(character)}{times}", f"{_name(character)}{times}")
        at = found.end()
    if at < len(text):
        yield Piece(text[at:])


def _sign(character: str) -> str:
    return _PICTURES.get(ord(character), f"U+{ord(character):04X}")


def _name(character: str) -> str:
    known = unicodedata.name(character, "control character").lower()
    return f"{known} (U+{ord(character):04X})"
