"""Rewards of tool use: which tools were called, with which arguments, and how many calls went wrong.

Invariant: every call counts once, the ones that cannot be parsed included.

Data flow: made calls and expected calls -> pairs of the same tool (in order, or any) -> a share.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from art_core.errors import ConfigError, RewardError
from art_core.rewards.compose import Measure
from art_core.rewards.reading import (
    Expected,
    ToolCall,
    check_expected,
    expected_value,
    parsed_arguments,
    tool_calls,
)
from art_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A tool call that should have been made.

    Attributes:
        name: the tool.
        arguments: its arguments; None where any will do.
    """

    name: str
    arguments: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, given: Any, reward: str) -> "ExpectedCall":
        """Read a name, ``{"name": ..., "arguments": {...}}`` or a tool call in OpenAI's wire format.

        Raises:
            RewardError: it is none of these.
        """
        if isinstance(given, ExpectedCall):
            return given
        if isinstance(given, str) and given:
            return cls(given)
        if isinstance(given, Mapping):
            call = cast("Mapping[str, Any]", given)
            call = cast("Mapping[str, Any]", call.get("function", call))
            name, arguments = call.get("name"), call.get("arguments")
            parsed = None if arguments is None else parsed_arguments(arguments)
            if isinstance(name, str) and name and (arguments is None or parsed is not None):
                return cls(name, parsed)
        raise RewardError(
            f"reward {reward!r}: {given!r} is no expected call; "
            "give a tool's name, or {'name': ..., 'arguments': {...}}"
        )


@dataclass(frozen=True, slots=True)
class ToolChoice(Measure):
    """How well the tools called agree with those expected, 0 to 1: F1 over calls.

    A call too many costs as much as one that is missing. No calls where none are expected is 1.0.

    Attributes:
        expected: where the expected calls are; a list, see `ExpectedCall.parse`.
        ordered: they must also come in this order (the longest common subsequence counts).
        node: whose calls count; None: everybody's.
    """

    expected: Expected = "tool_calls"
    ordered: bool = False
    node: str | None = None
    _: KW_ONLY
    name: str = "tool_choice"

    def __post_init__(self) -> None:
        check_expected(self.expected, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The agreement."""
        wanted = [call.name for call in _expected_calls(trajectory, self.expected, self.name)]
        made = [call.name for call in tool_calls(trajectory, self.node)]
        if not wanted and not made:
            return 1.0
        same = (
            best_in_order([[float(a == b) for b in made] for a in wanted])
            if self.ordered
            else (Counter(wanted) & Counter(made)).total()
        )
        return 2 * same / (len(wanted) + len(made))


@dataclass(frozen=True, slots=True)
class ToolArguments(Measure):
    """How many arguments of the expected calls are right, 0 to 1; a call that is missing has none right.

    Expected and made calls of the same tool are paired so that most agrees. An expected call is worth the
    share of its arguments, those made up by the model included, that are equal. Calls too many cost
    nothing here: add `ToolChoice`. 1.0 where no calls are expected.

    Attributes:
        expected: as in `ToolChoice`.
        ordered: pairs must not cross.
        extra: arguments beyond the expected ones are no mistake.
        same: whether an expected and a given value are the same.
        node: as in `ToolChoice`.
    """

    expected: Expected = "tool_calls"
    ordered: bool = False
    extra: bool = False
    same: Callable[[Any, Any], bool] | None = None
    node: str | None = None
    _: KW_ONLY
    name: str = "tool_arguments"

    def __post_init__(self) -> None:
        check_expected(self.expected, self.name)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The share."""
        wanted = _expected_calls(trajectory, self.expected, self.name)
        made = tool_calls(trajectory, self.node)
        if not wanted:
            return 1.0
        likeness = [[self._likeness(a, b) for b in made] for a in wanted]
        return (best_in_order if self.ordered else best_in_any_order)(likeness) / len(wanted)

    def _likeness(self, wanted: ExpectedCall, made: ToolCall) -> float:
        if wanted.name != made.name or made.arguments is None:
            return 0.0
        if wanted.arguments is None:
            return 1.0
        same = self.same or _equal
        keys = set(wanted.arguments) if self.extra else {*wanted.arguments, *made.arguments}
        right = sum(
            key in wanted.arguments
            and key in made.arguments
            and bool(same(wanted.arguments[key], made.arguments[key]))
            for key in keys
        )
        return right / len(keys) if keys else 1.0


@dataclass(frozen=True, slots=True)
class ToolErrors(Measure):
    """Share of the tool calls that went wrong; 0.0 when none were made; subtract it.

    A call went wrong when its arguments are no JSON object, the request offered no such tool, or the
    tool's answer matches ``error``.

    Attributes:
        error: how a tool's answer says that it failed; LangGraph's tool node begins such answers with
            ``Error``.
        node: as in `ToolChoice`.

    Raises:
        ConfigError: the pattern cannot be compiled.
    """

    error: str = r"\A\s*error\b"
    node: str | None = None
    _: KW_ONLY
    name: str = "tool_errors"

    def __post_init__(self) -> None:
        try:
            re.compile(self.error)
        except re.error as error:
            raise ConfigError(
                f"reward {self.name!r}: pattern {self.error!r} cannot be compiled: {error}"
            ) from None

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The share."""
        made = tool_calls(trajectory, self.node)
        return sum(self._failed(call) for call in made) / len(made) if made else 0.0

    def _failed(self, call: ToolCall) -> bool:
        if call.arguments is None or (call.step.tools and call.spec is None):
            return True
        return call.result is not None and re.search(self.error, call.result, re.IGNORECASE) is not None


def best_in_order(likeness: Sequence[Sequence[float]]) -> float:
    """The largest sum of pairs that do not cross.

    Args:
        likeness: of each expected with each made call, at least 0  [expected, made].
    """
    best = [0.0] * (len(likeness[0]) + 1 if likeness else 1)
    for row in likeness:
        before = best
        best = [0.0]
        for index, value in enumerate(row):
            best.append(max(before[index] + value, before[index + 1], best[index]))
    return best[-1]


def best_in_any_order(likeness: Sequence[Sequence[float]]) -> float:
    """The largest sum of pairs in which every row and every column is used at most once.

    The Hungarian method with potentials (Kuhn 1955; Munkres 1957), O(rows^2 * columns).

    Args:
        likeness: of each expected with each made call, at least 0  [expected, made].
    """
    rows = [list(row) for row in likeness if row]
    if not rows:
        return 0.0
    if len(rows) > len(rows[0]):
        rows = [list(column) for column in zip(*rows, strict=True)]
    width = len(rows[0])
    row_potential = [0.0] * (len(rows) + 1)
    column_potential = [0.0] * (width + 1)
    owner = [0] * (width + 1)  # the row (from 1) that has each column; column 0 is the one being placed
    for row in range(1, len(rows) + 1):
        owner[0] = row
        slack = [float("inf")] * (width + 1)
        came_from = [0] * (width + 1)
        visited = [False] * (width + 1)
        column = 0
        while owner[column]:
            visited[column] = True
            current = owner[column]
            nearest, step = 0, float("inf")
            for other in range(1, width + 1):
                if visited[other]:
                    continue
                cost = -rows[current - 1][other - 1] - row_potential[current] - column_potential[other]
                if cost < slack[other]:
                    slack[other], came_from[other] = cost, column
                if slack[other] < step:
                    step, nearest = slack[other], other
            for other in range(width + 1):
                if visited[other]:
                    row_potential[owner[other]] += step
                    column_potential[other] -= step
                else:
                    slack[other] -= step
            column = nearest
        while column:
            owner[column] = owner[came_from[column]]
            column = came_from[column]
    return sum(rows[owner[c] - 1][c - 1] for c in range(1, width + 1) if owner[c])


def _expected_calls(trajectory: Trajectory, expected: Expected, reward: str) -> list[ExpectedCall]:
    given = expected_value(trajectory, expected, reward)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RewardError(f"reward {reward!r}: expected a list of tool calls, got {given!r}")
    return [ExpectedCall.parse(call, reward) for call in cast("Sequence[Any]", given)]


def _equal(wanted: Any, given: Any) -> bool:
    # JSON's true is not its 1, whatever Python says.
    if isinstance(wanted, bool) is not isinstance(given, bool):
        return False
    return bool(wanted == given)
