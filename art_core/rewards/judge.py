"""A judge: any model that reads messages and answers with text, and what its answers took.

Invariant: every call that was made is counted, whatever came of it; tokens that a judge did not tell are
counted as untold and never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from art_core.errors import RewardError
from art_core.rewards.shape import Price
from art_core.types import Message


@dataclass(frozen=True, slots=True)
class Usage:
    """What calls of a judge took.

    Attributes:
        calls: calls made, failed ones included.
        prompt_tokens: tokens read, of the calls that told.
        completion_tokens: tokens written, reasoning included, of the calls that told.
        untold: calls without token counts: they failed, ran out of time, or the server gives none.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    untold: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.untold + other.untold,
        )

    def cost(self, price: Price) -> float:
        """What the counted tokens cost; calls whose tokens are untold are not in it."""
        return (self.prompt_tokens * price.prompt + self.completion_tokens * price.completion) / 1e6


UNTOLD = Usage(calls=1, untold=1)
"""One call whose tokens are not known."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a judge said to one call, and what the call took."""

    text: str
    usage: Usage = UNTOLD


class Judge(Protocol):
    """A model that can be asked. `art_langgraph.judges.LangChainJudge` makes one of any chat model."""

    @property
    def name(self) -> str:
        """Which model it is; verdicts of one name are taken to be one judge's."""
        ...

    async def ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
        """Answer once.

        Args:
            messages: in OpenAI's wire format; they ask for JSON in words already.
            schema: JSON schema of the wanted answer, for servers that can hold a model to one.

        Raises:
            Exception: any, when there is no answer; it counts as a failed call.
        """
        ...


class JudgeError(RewardError):
    """A judge gave no verdict that can be used; what it should have scored has no score."""
