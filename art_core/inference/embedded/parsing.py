"""From a completion's text to the assistant's message: thoughts, content and calls.

Invariant: one parser reads whole answers and streams, so both say the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from art_core.config import EngineConfig
from art_core.errors import ConfigError
from art_core.inference.model_families import AUTO, FALLBACK, ModelFacts, choose_parsers
from art_core.inference.reasoning_parsing import PARSERS, ReasoningParser, Thought, opened_by
from art_core.inference.tool_parsing import ParsedCall, ToolCallParser

Part = Thought | str | ParsedCall


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms are looked for in a model's texts.

    Attributes:
        tools: whether calls are; without, requests with tools are refused.
        reasoning: whether thoughts are.
    """

    tools: bool = True
    reasoning: bool = False


def forms_of(base_model: str, template: str | None, config: EngineConfig) -> Forms:
    """What ``tool_call_parser`` and ``reasoning_parser`` mean here.

    Raises:
        ConfigError: a parser that the embedded engine does not have.
    """
    tools, reasoning = config.tool_call_parser, config.reasoning_parser
    if tools not in (None, AUTO, FALLBACK):
        raise ConfigError(
            f"EngineConfig.tool_call_parser={tools!r}: the embedded engine reads calls in the form of "
            f"{FALLBACK!r} only; leave it at {AUTO!r}, or serve the model with kind='vllm'"
        )
    if reasoning not in (None, AUTO, *PARSERS):
        raise ConfigError(
            f"EngineConfig.reasoning_parser={reasoning!r}: the embedded engine reads thoughts between think "
            f"tags only ({', '.join(PARSERS)}); leave it at {AUTO!r}, or serve the model with kind='vllm'"
        )
    if reasoning == AUTO:
        reasoning = choose_parsers(ModelFacts(base_model, template=template), tools=None).reasoning
    return Forms(tools is not None, reasoning in PARSERS)


class MessageParser:
    """Reads text that arrives in pieces.

    Args:
        tools: whether calls are looked for.
        reasoning: whether thoughts are.
        prompt: the prompt's text, which may have opened a thought.
    """

    def __init__(self, *, tools: bool, reasoning: bool, prompt: str) -> None:
        self._tools = ToolCallParser() if tools else None
        self._reasoning = ReasoningParser(thinking=opened_by(prompt)) if reasoning else None

    def push(self, piece: str) -> Iterator[Part]:
        """What is certain now, in order."""
        for part in (piece,) if self._reasoning is None else self._reasoning.push(piece):
            yield from self._answer(part)

    def finish(self) -> Iterator[Part]:
        """What is left at the end."""
        if self._reasoning is not None:
            for part in self._reasoning.finish():
                yield from self._answer(part)
        if self._tools is not None:
            yield from self._tools.finish()

    def _answer(self, part: Thought | str) -> Iterator[Part]:
        if isinstance(part, Thought) or self._tools is None:
            if part:
                yield part
        else:
            yield from self._tools.push(part)
