"""Rewards of what an agent said: matches, format, forbidden content, refusals, citations.

Invariant: a name says what is measured, and 1.0 means that it is fully there; whether that is good is the
sign of its weight (``quality - 0.5 * forbidden``).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, cast, get_args

from art_core.errors import ConfigError, RewardError
from art_core.rewards.compose import Measure
from art_core.rewards.reading import Expected, answer_text, check_expected, expected_value, tool_results
from art_core.types import Trajectory

Likeness = Literal["tokens", "characters"]
Retrieval = Literal["f1", "precision", "recall"]


def plain(text: str) -> str:
    """Text without what answers differ in by chance: case, width, white space, punctuation around it."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(" .,;:!?\"'`*()[]{}")


@dataclass(frozen=True, slots=True)
class ExactMatch(Measure):
    """1.0 when the answer is (one of) the expected, 0.0 otherwise.

    Attributes:
        expected: where the right answer is; a text, a number, or a list of those that are right.
        normalize: applied to both sides; ``str`` compares them as they are.
        node: whose last message is the answer; None: the agent's output, or its last message.
    """

    expected: Expected = "answer"
    normalize: Callable[[str], str] = plain
    node: str | None = None
    _: KW_ONLY
    name: str = "exact_match"

    def __post_init__(self) -> None:
        check_expected(self.expected, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """Whether they are equal."""
        answer = self.normalize(answer_text(trajectory, output, self.node, self.name))
        right = _texts(expected_value(trajectory, self.expected, self.name), self.name)
        return float(answer in {self.normalize(text) for text in right})


@dataclass(frozen=True, slots=True)
class FuzzyMatch(Measure):
    """How much the answer has in common with (the likest of) the expected, 0 to 1.

    Attributes:
        expected: as in `ExactMatch`.
        by: ``tokens``: F1 of the words they share (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1);
            ``characters``: Ratcliff and Obershelp's ratio, as in Python's difflib.
        normalize: as in `ExactMatch`.
        node: as in `ExactMatch`.
    """

    expected: Expected = "answer"
    by: Likeness = "tokens"
    normalize: Callable[[str], str] = plain
    node: str | None = None
    _: KW_ONLY
    name: str = "fuzzy_match"

    def __post_init__(self) -> None:
        check_expected(self.expected, self.name)
        _one_of(self.by, get_args(Likeness), f"reward {self.name!r}: by")

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The likeness."""
        answer = self.normalize(answer_text(trajectory, output, self.node, self.name))
        right = _texts(expected_value(trajectory, self.expected, self.name), self.name)
        likeness = _shared_words if self.by == "tokens" else _shared_characters
        return max(likeness(answer, self.normalize(text)) for text in right)


@dataclass(frozen=True, slots=True)
class Format(Measure):
    """1.0 when the whole answer matches a regular expression, 0.0 otherwise.

    Python's ``re`` can take very long on nested repetitions (``(a+)+b``), and holds everything up meanwhile:
    no time limit helps against such a pattern.

    Attributes:
        pattern: Python's syntax; ``.`` matches newlines too.
        anywhere: a match somewhere in the answer will do.
        node: as in `ExactMatch`.

    Raises:
        ConfigError: the pattern cannot be compiled.
    """

    pattern: str
    anywhere: bool = False
    node: str | None = None
    _: KW_ONLY
    name: str = "format"

    def __post_init__(self) -> None:
        _compiled(self.pattern, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """Whether it matches."""
        pattern = _compiled(self.pattern, self.name)
        text = answer_text(trajectory, output, self.node, self.name)
        return float((pattern.search if self.anywhere else pattern.fullmatch)(text) is not None)


@dataclass(frozen=True, slots=True)
class Forbidden(Measure):
    """1.0 when a forbidden phrase is in any answer of the run, 0.0 otherwise; subtract it.

    Attributes:
        phrases: looked for as whole words, in any case.
        patterns: regular expressions, looked for as they are.
        node: whose messages are read; None: everybody's.

    Raises:
        ConfigError: nothing is forbidden, or a pattern cannot be compiled.
    """

    phrases: Sequence[str] = ()
    patterns: Sequence[str] = ()
    node: str | None = None
    _: KW_ONLY
    name: str = "forbidden"

    def __post_init__(self) -> None:
        if isinstance(self.phrases, str) or isinstance(self.patterns, str):
            raise ConfigError(f"reward {self.name!r}: give phrases and patterns as lists")
        if not self.phrases and not self.patterns:
            raise ConfigError(f"reward {self.name!r}: nothing is forbidden; give phrases or patterns")
        if not all(phrase.strip() for phrase in self.phrases):
            raise ConfigError(f"reward {self.name!r}: an empty phrase is in every answer; remove it")
        for pattern in self.patterns:
            _compiled(pattern, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """Whether any is there."""
        words = [re.compile(_as_words(phrase), re.IGNORECASE) for phrase in self.phrases]
        patterns = [*words, *(_compiled(pattern, self.name) for pattern in self.patterns)]
        said = _everything_said(trajectory, output, self.node, self.name)
        return float(any(pattern.search(text) for pattern in patterns for text in said))


REFUSALS = (
    r"\bI(?:'m| am) (?:sorry,? but I |not able to |unable to )",
    r"\bI (?:can(?:'t|not)|won't|must decline|will not) (?:help|assist|answer|do that|comply|provide|fulfil)",
    r"\bas an AI(?: language)? model\b",
    r"\bI (?:don't|do not) (?:feel comfortable|have the ability)\b",
)
"""How models of today refuse, in English; other languages need patterns of their own."""


@dataclass(frozen=True, slots=True)
class Refusal(Measure):
    """1.0 when the answer is a refusal, 0.0 otherwise; the sign of its weight says which was wanted.

    Attributes:
        patterns: how refusals are worded (regular expressions, in any case).
        node: as in `ExactMatch`.

    Raises:
        ConfigError: there are no patterns, or one cannot be compiled.
    """

    patterns: Sequence[str] = REFUSALS
    node: str | None = None
    _: KW_ONLY
    name: str = "refusal"

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not self.patterns:
            raise ConfigError(f"reward {self.name!r}: give a list of patterns")
        for pattern in self.patterns:
            _compiled(pattern, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """Whether it is one."""
        text = answer_text(trajectory, output, self.node, self.name).replace(
            "\N{RIGHT SINGLE QUOTATION MARK}", "'"
        )
        return float(any(re.search(pattern, text, re.IGNORECASE) for pattern in self.patterns))


@dataclass(frozen=True, slots=True)
class Citation(Measure):
    """How well the cited sources agree with the expected ones, 0 to 1.

    Attributes:
        expected: where the ids of the right sources are; a list.
        pattern: finds citations; its first group is the source's id, or several with commas between.
        by: ``precision``: share of the cited that are right; ``recall``: share of the right that are cited;
            ``f1``: their harmonic mean. Nothing cited where nothing is expected is 1.0.
        node: as in `ExactMatch`.

    Raises:
        ConfigError: the pattern has no group or cannot be compiled.
    """

    expected: Expected = "sources"
    pattern: str = r"\[([^\[\]]+)\]"
    by: Retrieval = "f1"
    node: str | None = None
    _: KW_ONLY
    name: str = "citation"

    def __post_init__(self) -> None:
        check_expected(self.expected, self.name)
        _one_of(self.by, get_args(Retrieval), f"reward {self.name!r}: by")
        _with_group(self.pattern, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The agreement."""
        cited = _cited(answer_text(trajectory, output, self.node, self.name), self.pattern, self.name)
        right = set(_texts(expected_value(trajectory, self.expected, self.name), self.name, empty=True))
        if not cited and not right:
            return 1.0
        both = len(cited & right)
        if self.by == "f1":
            return 2 * both / (len(cited) + len(right))
        of = cited if self.by == "precision" else right
        return both / len(of) if of else 0.0


@dataclass(frozen=True, slots=True)
class Grounding(Measure):
    """Share of the cited sources that a tool has really shown; 0.0 when nothing is cited.

    Attributes:
        pattern: as in `Citation`.
        node: as in `ExactMatch`.

    Raises:
        ConfigError: the pattern has no group or cannot be compiled.
    """

    pattern: str = r"\[([^\[\]]+)\]"
    node: str | None = None
    _: KW_ONLY
    name: str = "grounding"

    def __post_init__(self) -> None:
        _with_group(self.pattern, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The share."""
        cited = _cited(answer_text(trajectory, output, self.node, self.name), self.pattern, self.name)
        shown = tool_results(trajectory)
        seen = [c for c in cited if any(re.search(_as_words(c), text) for text in shown)]
        return len(seen) / len(cited) if cited else 0.0


def _texts(value: Any, reward: str, *, empty: bool = False) -> list[str]:
    """Expected answers as texts."""
    if isinstance(value, str | int | float):
        return [str(value)]
    if isinstance(value, Sequence | set | frozenset):
        texts = [str(item) for item in cast("Iterable[Any]", value)]
        if texts or empty:
            return texts
    raise RewardError(f"reward {reward!r}: expected a text, a number or a list of them, got {value!r}")


def _shared_words(one: str, other: str) -> float:
    words, others = one.split(), other.split()
    if not words or not others:
        return float(words == others)
    return 2 * (Counter(words) & Counter(others)).total() / (len(words) + len(others))


def _shared_characters(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _everything_said(trajectory: Trajectory, output: object, node: str | None, reward: str) -> list[str]:
    answer = answer_text(trajectory, output, node, reward)
    steps = (s for s in trajectory.steps if node is None or s.identity.node == node)
    return [answer, *(step.message() for step in steps)]


def _as_words(phrase: str) -> str:
    # Not \b: a phrase may begin or end with a sign ("$100", "[12]").
    return rf"(?<!\w){re.escape(phrase.strip())}(?!\w)"


def _cited(text: str, pattern: str, reward: str) -> set[str]:
    groups = (match.group(1) or "" for match in _with_group(pattern, reward).finditer(text))
    return {part.strip() for group in groups for part in group.split(",") if part.strip()}


def _with_group(pattern: str, reward: str) -> re.Pattern[str]:
    compiled = _compiled(pattern, reward)
    if compiled.groups < 1:
        raise ConfigError(f"reward {reward!r}: pattern {pattern!r} has no group; put ( ) around the id")
    return compiled


def _compiled(pattern: str, reward: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"reward {reward!r}: pattern {pattern!r} cannot be compiled: {error}") from None


def _one_of(value: object, known: Sequence[str], what: str) -> None:
    if value not in known:
        raise ConfigError(f"{what}={value!r}: expected one of {', '.join(map(repr, known))}")
