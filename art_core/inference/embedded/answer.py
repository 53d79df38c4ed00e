"""From sampled tokens to OpenAI's answer, whole.

Invariant: whatever happens to the text (stop texts, tool calls, special tokens), every sampled token
appears once in ``token_ids`` and in ``logprobs``, in order.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from art_core.inference.embedded.job import Job, Output
from art_core.inference.embedded.parsing import MessageParser
from art_core.inference.embedded.sampling import Sampled
from art_core.inference.embedded.spelling import Speller
from art_core.inference.openai_schema import (
    ChatRequest,
    ChatResponse,
    Choice,
    ChoiceLogprobs,
    MessageOut,
    TokenLogprob,
    ToolCallOut,
    TopLogprob,
    Usage,
)
from art_core.inference.reasoning_parsing import Thought
from art_core.inference.tool_parsing import ParsedCall


class Answer:
    """One request's answer.

    Args:
        wanted: the request.
        job: what decodes it.
        tokenizer: the server thread's.
        changed: set whenever the job has something new.
        spell: of the same tokenizer.
        parser: makes what reads one choice's text.
        forced: how the prompt lets the assistant's message begin; belongs to its text.
    """

    def __init__(
        self,
        wanted: ChatRequest,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
        changed: asyncio.Event,
        *,
        spell: Speller,
        parser: Callable[[], MessageParser],
        forced: str = "",
    ) -> None:
        self.wanted = wanted
        self.job = job
        self.tokenizer = tokenizer
        self.changed = changed
        self.parser = parser
        self.forced = forced
        self._spell = spell
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def response(self) -> ChatResponse:
        """The whole answer, once the job is done."""
        response: ChatResponse = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.job.version,
            "choices": [self._choice(i, output) for i, output in enumerate(self.job.outputs)],
            "usage": self.usage(),
        }
        if self.wanted.return_token_ids:
            response["prompt_token_ids"] = list(self.job.prompt)
        return response

    def usage(self) -> Usage:
        """Token counts so far; an end token counts, as it was sampled."""
        prompt = len(self.job.prompt)
        completion = sum(output.progress.tokens for output in self.job.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def logprobs(self, sampled: Sequence[Sampled]) -> ChoiceLogprobs | None:
        """One entry per token, where they were asked for."""
        if not self.wanted.logprobs:
            return None
        return {"content": [self._logprob(s) for s in sampled]}

    def _choice(self, index: int, output: Output) -> Choice:
        progress = output.progress
        ids = [s.token for s in output.sampled]
        text = self.tokenizer.decode(ids[: progress.visible], skip_special_tokens=not self.job.keep_special)
        assert isinstance(text, str)
        text = self.forced + text[: progress.text_end]
        parser = self.parser()
        parts = [*parser.push(text), *parser.finish()]
        calls = [part for part in parts if isinstance(part, ParsedCall)]
        content = "".join(part for part in parts if isinstance(part, str))
        message: MessageOut = {"role": "assistant", "content": (content or None) if calls else content}
        if thoughts := "".join(part.text for part in parts if isinstance(part, Thought)):
            message["reasoning"] = thoughts
        if calls:
            message["tool_calls"] = [tool_call(call) for call in calls]
        choice: Choice = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(output.sampled),
            "finish_reason": finish_reason(progress.finish_reason, bool(calls)),
            "stop_reason": progress.stop_reason,
        }
        if self.wanted.return_token_ids:
            choice["token_ids"] = ids
        return choice

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        text, spelled = self._spell(sampled.token)
        return {
            "token": text,
            "logprob": sampled.logprob,
            "bytes": list(spelled),
            "top_logprobs": [self._top(token, logprob) for token, logprob in sampled.top],
        }

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, spelled = self._spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def finish_reason(reason: str | None, called: bool) -> str:
    """OpenAI's: a completion that ended by itself after a call says so."""
    return "tool_calls" if called and reason == "stop" else reason or "stop"


def tool_call(call: ParsedCall) -> ToolCallOut:
    """A call in OpenAI's shape, with an id of its own."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
