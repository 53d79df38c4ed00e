"""Text that may hold any character, on every database.

Invariant: what is read is what was written.

PostgreSQL's text lacks one character, NUL, which a tool's output or a model's answer may hold. There it is
written as an escape, and so is the character that begins escapes; other databases get texts as they are.
"""

from typing import Any

from sqlalchemy import Text, TypeDecorator
from sqlalchemy.engine import Dialect

ESCAPE = "\x1a"
"""ASCII's SUBSTITUTE, made for what a text cannot hold."""


class FreeText(TypeDecorator[str]):
    """A column of text; see the module."""

    impl = Text
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Any:
        """What is done to a value that is written; None: nothing."""
        return escaped if dialect.name == "postgresql" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        """What is done to a value that was read; None: nothing."""
        return unescaped if dialect.name == "postgresql" else super().result_processor(dialect, coltype)


def escaped(text: str | None) -> str | None:
    """A text without NUL that `unescaped` turns back."""
    if text is None or ("\0" not in text and ESCAPE not in text):
        return text
    return text.replace(ESCAPE, ESCAPE * 2).replace("\0", ESCAPE + "0")


def unescaped(text: str | None) -> str | None:
    """The text that `escaped` was given."""
    if text is None or ESCAPE not in text:
        return text
    return ESCAPE.join(part.replace(ESCAPE + "0", "\0") for part in text.split(ESCAPE * 2))
