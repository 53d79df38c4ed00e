"""Reasoning in text: what stands between ``<think>`` and ``</think>`` before the answer.

Invariant: the thoughts and the answer found do not depend on how the text was cut when it arrived; without
the white space at their ends, thoughts and answer together are the whole text but for the two tags.

Qwen 3, DeepSeek R1 and models distilled from them write this form. A template may open the thought itself,
so that the text begins inside it. A thought that is never closed is all there is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OPEN = "<think>"
CLOSE = "</think>"

PARSERS = ("qwen3", "deepseek_r1", "deepseek_v3")
"""vLLM's names of the parsers that read this form."""


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


def opened_by(prompt: str) -> bool:
    """Whether a prompt's text ends inside a thought."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE) and prompt.rstrip().endswith(OPEN)


class ReasoningParser:
    """Splits text that arrives in pieces into thoughts and answer.

    White space next to a tag belongs to the form and is dropped.

    Args:
        thinking: whether the text begins inside a thought.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._text = ""
        self._state: Literal["before", "thinking", "after", "answer"] = "thinking" if thinking else "before"
        self._begun = False

    def push(self, piece: str) -> Iterator[Thought | str]:
        """What is certain now, in order."""
        self._text += piece
        if self._state == "before":
            self._open()
        if self._state == "thinking":
            yield from self._think()
        if self._state == "after":
            self._text = self._text.lstrip()
            self._state = "answer" if self._text else "after"
        if self._state == "answer" and self._text:
            answer, self._text = self._text, ""
            yield answer

    def finish(self) -> Iterator[Thought | str]:
        """What is left at the end."""
        text, self._text = self._text, ""
        if self._state == "before" and text:
            yield text
        elif self._state == "thinking":
            yield from self._thought(text.rstrip())

    def _open(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self._text, self._state = begun[len(OPEN) :], "thinking"
        elif not OPEN.startswith(begun):
            self._state = "answer"

    def _think(self) -> Iterator[Thought]:
        end = self._text.find(CLOSE)
        if end >= 0:
            thought, self._text = self._text[:end].rstrip(), self._text[end + len(CLOSE) :]
            self._state = "after"
        else:
            certain = _certain(self._text)
            thought, self._text = self._text[:certain], self._text[certain:]
        yield from self._thought(thought)

    def _thought(self, text: str) -> Iterator[Thought]:
        if not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            yield Thought(text)


def _certain(text: str) -> int:
    """How many characters come before a closing tag that may have begun, and the space before it."""
    begun = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
    return len(text[: len(text) - begun].rstrip())
