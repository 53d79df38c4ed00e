"""Verdicts: what a judge's answer says about each item, or everything that is wrong with it.

Invariant: a score is read for exactly the ids that were asked for, once each, on the scale that was asked
for, from one answer that contradicts itself nowhere; otherwise nothing is read. Nothing is repaired by
guessing: an answer on a scale of 10 is not divided by 10.

An answer's text -> the JSON objects with a list of scores in it -> one list -> id to `Verdict`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_core.rewards.judge import JudgeError

_START = re.compile(r"\{|\[\s*\{")
_FALSE_STARTS = 500  # braces that begin no JSON; more of them is no answer but an attempt to keep us busy
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One item's score, from 0 (worst) to 1 (best), and the judge's reason for it."""

    score: float
    explanation: str = ""


def verdict_schema(ids: Sequence[str]) -> dict[str, Any]:
    """JSON schema of an answer about these ids, as strict structured output wants it.

    The explanation comes before the score: a model that writes its reason first scores by it. The list has
    exactly as many entries as there are ids: small models that are free to end it do so after the first.
    """
    item = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "enum": list(ids)},
            "explanation": {"type": "string"},
            "score": {"type": "number", "description": "from 0 (worst) to 1 (best)"},
        },
        "required": ["id", "explanation", "score"],
        "additionalProperties": False,
    }
    scores = {"type": "array", "items": item, "minItems": len(ids), "maxItems": len(ids)}
    return {
        "title": "verdicts",
        "description": "A score and its reason for each trajectory.",
        "type": "object",
        "properties": {"scores": scores},
        "required": ["scores"],
        "additionalProperties": False,
    }


def read_verdicts(text: str, ids: Sequence[str]) -> dict[str, Verdict]:
    """The verdicts of an answer, by id.

    Thoughts, code fences and words around the JSON are passed over; ids may be numbers, and scores text.

    Args:
        text: a judge's answer.
        ids: every id that was asked for.

    Raises:
        JudgeError: the answer has no verdicts, or they are not one for each id; it names every problem.
    """
    found = _lists(text)
    if not found:
        said = "said nothing" if not text.strip() else "has no JSON object with a list `scores`"
        raise JudgeError(f"the answer {said}")
    # A judge may quote what it read; an answer that could be read in two ways is no answer.
    if any(other != found[0] for other in found[1:]):
        raise JudgeError(f"the answer has {len(found)} different lists of scores; expected one")
    verdicts: dict[str, Verdict] = {}
    problems: list[str] = []
    for entry in found[0]:
        try:
            name, verdict = _entry(entry, ids)
        except JudgeError as problem:
            problems.append(str(problem))
            continue
        if name in verdicts:
            problems.append(f"id {name} is there twice")
        verdicts[name] = verdict
    named = {_id(entry) for entry in found[0]}
    if missing := [name for name in ids if name not in named]:
        problems.append(f"missing: id {', '.join(missing)}")
    if problems:
        raise JudgeError("; ".join(problems))
    return verdicts


def _entry(entry: Any, ids: Sequence[str]) -> tuple[str, Verdict]:
    name = _id(entry)
    if name is None:
        raise JudgeError(f"not an object with an id: {_short(entry)}")
    if name not in ids:
        raise JudgeError(f"id {_short(name)} was not asked for")
    score = _number(entry.get("score"))
    if score is None:
        raise JudgeError(f"the score of id {name} is no number: {_short(entry.get('score'))}")
    if not 0 <= score <= 1:
        raise JudgeError(f"the score of id {name} is {score:g}, not from 0 to 1")
    explanation = entry.get("explanation")
    return name, Verdict(score, explanation.strip() if isinstance(explanation, str) else "")


def _id(entry: Any) -> str | None:
    if not isinstance(entry, Mapping):
        return None
    value: Any = cast("Mapping[str, Any]", entry).get("id")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _lists(text: str) -> list[list[Any]]:
    """Every list of scores in a text, outermost JSON values only."""
    found: list[list[Any]] = []
    for value in _json_values(_THOUGHT.sub("", text)):
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get("scores")
        if isinstance(value, list):
            entries = cast("list[Any]", value)
            if any(isinstance(entry, dict) for entry in entries):
                found.append(entries)
    return found


def _json_values(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    at = failed = 0
    while failed < _FALSE_STARTS and (start := _START.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            at, failed = start.start() + 1, failed + 1
            continue
        yield value


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
