"""Whether an answer is right, by rule.

Invariant: an answer that names several candidates is wrong, however many of them are right: hedging is no
answer. Form does not matter: ``14 May``, ``May 14th, 2025`` and ``2025-05-14`` are one date, ``48,300 euros``
and ``EUR 48300.00`` one number.
"""

import re
import unicodedata
from collections.abc import Sequence
from datetime import date

from examples.email_research.topics import AnswerKind

MOST_WORDS = 25
"""A longer answer is not an answer but a quotation."""

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"({'|'.join(MONTHS)})[a-z]*\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATES = (
    (re.compile(r"\b(\d{4})-(\d{1,2})-(\d{1,2})\b"), (3, 2, 1)),
    (re.compile(rf"\b{_DAY}\s+(?:of\s+)?{_MONTH}(?:,?\s+(\d{{4}}))?", re.IGNORECASE), (1, 2, 3)),
    (re.compile(rf"\b{_MONTH}\s+{_DAY}\b(?:,?\s+(\d{{4}}))?", re.IGNORECASE), (2, 1, 3)),
)
_NUMBER = re.compile(
    r"(?<![\w.,])(\d{1,3}(?:[, \u00a0\u202f']\d{3})+|\d+)(\.\d+)?\s*(k\b|thousand\b)?", re.IGNORECASE
)


def plain(text: str) -> str:
    """Lower-case words without accents and punctuation, with one space between them."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    letters = "".join(c for c in folded if not unicodedata.combining(c))
    return " ".join(re.findall(r"\w+", letters))


def dates(text: str) -> set[tuple[int | None, int, int]]:
    """The dates that a text names, as (year or None, month, day)."""
    found: set[tuple[int | None, int, int]] = set()
    for pattern, (day, month, year) in _DATES:
        for match in pattern.finditer(text):
            named = match.group(month).lower()
            number = MONTHS.index(named[:3]) + 1 if named[:3] in MONTHS else int(named)
            given = match.group(year)
            found.add((int(given) if given else None, number, int(match.group(day))))
        text = pattern.sub(" ", text)
    return found


def numbers(text: str) -> set[float]:
    """The numbers that a text names."""
    return {
        (float(re.sub(r"\D", "", whole)) + float(part or 0)) * (1000 if scale else 1)
        for whole, part, scale in _NUMBER.findall(text)
    }


def is_right(answer: str | None, expected: str, kind: AnswerKind, rivals: Sequence[str] = ()) -> bool:
    """Whether an answer is the expected one and names nothing else.

    Args:
        answer: what was answered; None or empty where nothing was.
        expected: an ISO date, a whole number, or a name.
        kind: how to compare. A person's last name will do, and the first word of a firm's name.
        rivals: of names: other candidates, of which the answer may name none.
    """
    if not answer or len(answer.split()) > MOST_WORDS:
        return False
    if kind == "date":
        right = date.fromisoformat(expected)
        told = dates(answer)
        return bool(told) and all(
            (month, day) == (right.month, right.day) and year in (None, right.year)
            for year, month, day in told
        )
    if kind == "number":
        return numbers(answer) == {float(expected)}
    words = f" {plain(answer)} "
    key = _key(expected, kind)
    return f" {key} " in words and not any(
        f" {other} " in words for other in (_key(rival, kind) for rival in rivals) if other != key
    )


def _key(name: str, kind: AnswerKind) -> str:
    """The part of a name by which it is known, as plain words."""
    words = plain(name).removeprefix("the ")
    if kind == "person":
        return words.split()[-1]
    return words.split()[0] if kind == "firm" else words
