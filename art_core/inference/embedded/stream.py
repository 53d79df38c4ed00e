"""From sampled tokens to OpenAI's answer, piece by piece.

Invariant: the pieces of a stream, put together, are the whole answer: the same text and calls, and
every sampled token once in ``token_ids`` and ``logprobs``. A piece may carry tokens and no text yet
(half a character, half a stop text, half a tool call).
"""

from collections.abc import Iterator

from art_core.inference.embedded.answer import Answer, finish_reason, tool_call
from art_core.inference.embedded.job import Output, Progress
from art_core.inference.embedded.text import Detokenizer
from art_core.inference.openai_schema import ChatChunk, ChunkChoice, Delta, ToolCallOut
from art_core.inference.reasoning_parsing import Thought
from art_core.inference.tool_parsing import ParsedCall


class ChoiceStream:
    """One choice's pieces."""

    def __init__(self, answer: Answer, index: int, output: Output) -> None:
        self._answer = answer
        self._index = index
        self._output = output
        self._sent = 0
        self._given = 0
        self._held = ""
        self._calls = 0
        self._text = Detokenizer(answer.tokenizer, keep_special=answer.job.keep_special)
        self._parser = answer.parser()
        # What may turn out to be the beginning of a stop text is not given out yet.
        self._hold = max((len(stop) - 1 for stop in answer.job.params.stop), default=0)
        self._forced = answer.forced
        self.finished = False

    def piece(self) -> ChunkChoice | None:
        """What is new since the last piece; None when nothing is."""
        progress = self._output.progress
        ends = progress.finish_reason is not None
        if self.finished or (progress.tokens == self._sent and not ends):
            return None
        sampled = self._output.sampled[self._sent : progress.tokens]
        delta = self._delta(self._new_text(progress), ends)
        self._sent = progress.tokens
        choice: ChunkChoice = {
            "index": self._index,
            "delta": delta,
            "logprobs": self._answer.logprobs(sampled),
            "finish_reason": None,
        }
        if self._answer.wanted.return_token_ids:
            choice["token_ids"] = [s.token for s in sampled]
        if ends:
            self.finished = True
            choice["finish_reason"] = finish_reason(progress.finish_reason, self._calls > 0)
            choice["stop_reason"] = progress.stop_reason
        return choice

    def _new_text(self, progress: Progress) -> str:
        for sampled in self._output.sampled[self._sent : progress.visible]:
            self._held += self._text.push(sampled.token)
        if progress.finish_reason is None:
            end = max(0, len(self._held) - self._hold)
        else:
            self._held += self._text.finish()
            end = len(self._held) if progress.text_end is None else max(0, progress.text_end - self._given)
        text, self._held = self._held[:end], self._held[end:]
        self._given += len(text)
        text, self._forced = self._forced + text, ""
        return text

    def _delta(self, text: str, ends: bool) -> Delta:
        found = [*self._parser.push(text)]
        if ends:
            found.extend(self._parser.finish())
        delta: Delta = {}
        if thoughts := "".join(part.text for part in found if isinstance(part, Thought)):
            delta["reasoning"] = thoughts
        if content := "".join(part for part in found if isinstance(part, str)):
            delta["content"] = content
        calls = [self._call(part) for part in found if isinstance(part, ParsedCall)]
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _call(self, call: ParsedCall) -> ToolCallOut:
        out = tool_call(call)
        out["index"] = self._calls
        self._calls += 1
        return out


class AnswerStream:
    """All of a request's chunks."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [ChoiceStream(answer, i, output) for i, output in enumerate(answer.job.outputs)]
        options = answer.wanted.stream_options
        self._usage = options is not None and options.include_usage

    def first(self) -> Iterator[ChatChunk]:
        """Each choice's role; the very first chunk carries the prompt's tokens."""
        for index in range(len(self._choices)):
            chunk = self._chunk(
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            )
            if index == 0 and self._answer.wanted.return_token_ids:
                chunk["prompt_token_ids"] = list(self._answer.job.prompt)
            yield chunk

    def news(self) -> Iterator[ChatChunk]:
        """What is new in any choice."""
        for choice in self._choices:
            piece = choice.piece()
            if piece is not None:
                yield self._chunk(piece)

    def last(self) -> Iterator[ChatChunk]:
        """The usage, where it was asked for."""
        if self._usage:
            chunk = self._chunk(None)
            chunk["usage"] = self._answer.usage()
            yield chunk

    @property
    def finished(self) -> bool:
        """Whether every choice has given its last piece."""
        return all(choice.finished for choice in self._choices)

    def _chunk(self, choice: ChunkChoice | None) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._answer.id,
            "object": "chat.completion.chunk",
            "created": self._answer.created,
            "model": self._answer.job.version,
            "choices": [] if choice is None else [choice],
        }
        if self._usage:
            chunk["usage"] = None
        return chunk
