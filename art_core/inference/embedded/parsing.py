"""From a completion's text to the assistant's message: thoughts, content and calls.

Invariant: one parser reads whole answers and streams, so both say the same.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from art_core.config import EngineConfig
from art_core.errors import ConfigError
from art_core.inference.model_families import AUTO, choose_parsers, read_facts
from art_core.inference.reasoning_parsing import PARSERS, ReasoningParser, Thought, opened_by
from art_core.inference.tool_parsing import FORMS, HERMES, ParsedCall, ToolForm

logger = logging.getLogger(__name__)

Part = Thought | str | ParsedCall


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms are looked for in a model's texts.

    Attributes:
        tools: how calls are written; None: they are not looked for, and requests with tools are refused.
        reasoning: whether thoughts are.
        refusal: why requests with tools are refused, and what to do.
    """

    tools: ToolForm | None = HERMES
    reasoning: bool = False
    refusal: str = "this engine was started with tool_call_parser=None, so it reads no calls"


def forms_of(base_model: str, template: str | None, config: EngineConfig) -> Forms:
    """What ``tool_call_parser`` and ``reasoning_parser`` mean here.

    Args:
        base_model: a hub name or a directory.
        template: the chat template that messages are rendered with.
        config: names the parsers.

    Raises:
        ConfigError: a parser is named that the embedded engine does not have.
    """
    tools, reasoning = config.tool_call_parser, config.reasoning_parser
    if tools not in (None, AUTO, *FORMS):
        raise ConfigError(
            f"EngineConfig.tool_call_parser={tools!r}: the embedded engine reads calls in the forms of "
            f"{' and '.join(FORMS)} only; leave it at {AUTO!r}, or serve the model with kind='vllm'"
        )
    if reasoning not in (None, AUTO, *PARSERS):
        raise ConfigError(
            f"EngineConfig.reasoning_parser={reasoning!r}: the embedded engine reads thoughts between think "
            f"tags only ({', '.join(PARSERS)}); leave it at {AUTO!r}, or serve the model with kind='vllm'"
        )
    facts = replace(read_facts(base_model), template=template)
    chosen = choose_parsers(facts, tools=tools, reasoning=reasoning)
    logger.info(chosen.why)
    read = chosen.reasoning in PARSERS
    if chosen.tools is None or chosen.tools in FORMS:
        return Forms(None if chosen.tools is None else FORMS[chosen.tools], read)
    # Said where tools are asked for, not before: the model may well be used without any.
    refusal = (
        f"this model writes calls as {chosen.tools!r} reads them, and the embedded engine reads the forms of "
        f"{' and '.join(FORMS)} only; name one of them as EngineConfig.tool_call_parser, let the model write "
        "it by an EngineConfig.chat_template, or serve the model with kind='vllm'"
    )
    return Forms(None, read, refusal)


class MessageParser:
    """Reads text that arrives in pieces.

    Args:
        tools: how calls are written; None: they are not looked for.
        reasoning: whether thoughts are.
        prompt: the prompt's text, which may have opened a thought.
        single: whether only the first call is wanted: what comes after it is not read any more.
    """

    def __init__(self, *, tools: ToolForm | None, reasoning: bool, prompt: str, single: bool = False) -> None:
        self._tools = None if tools is None else tools.parser()
        self._single = single
        self._called = False
        self._reasoning = ReasoningParser(thinking=opened_by(prompt)) if reasoning else None

    def push(self, piece: str) -> Iterator[Part]:
        """What is certain now, in order."""
        yield from self._wanted(self._read(piece))

    def finish(self) -> Iterator[Part]:
        """What is left at the end."""
        yield from self._wanted(self._rest())

    def _wanted(self, parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            if not (self._single and self._called):
                yield part
            self._called = self._called or isinstance(part, ParsedCall)

    def _read(self, piece: str) -> Iterator[Part]:
        for part in (piece,) if self._reasoning is None else self._reasoning.push(piece):
            yield from self._answer(part)

    def _rest(self) -> Iterator[Part]:
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
