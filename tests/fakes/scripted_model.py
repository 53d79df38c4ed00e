"""A model that says what a test has written: a script, and what vLLM's sampling limits do to its replies."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fakes.replies import END, Reply, Script, Scripted, ToolCall, as_reply, decode, encode, logprob


class ScriptedModel:
    """The model.

    Args:
        reply: a text, a `Reply`, a list of answers to give in order (then `LookupError`), or a function of
            the request. A list of replies from the function makes the choices of ``n``.
        null_logprobs: positions whose logprob is None.
        nan_logprobs: positions whose logprob is NaN.
    """

    def __init__(
        self, reply: Scripted | Script, null_logprobs: Sequence[int] = (), nan_logprobs: Sequence[int] = ()
    ) -> None:
        self.null_logprobs = tuple(null_logprobs)
        self.nan_logprobs = tuple(nan_logprobs)
        self.script(reply)

    def script(self, reply: Scripted | Script) -> None:
        """Answer like this from now on."""
        self._script = self._as_script(reply)

    @staticmethod
    def _as_script(reply: Scripted | Script) -> Script:
        if callable(reply):
            return reply
        if isinstance(reply, list):
            queue = list(reply)
            lock = threading.Lock()

            def next_one(request: dict[str, Any]) -> Scripted:
                with lock:
                    if not queue:
                        raise LookupError("the script has no more answers")
                    return queue.pop(0)

            return next_one
        return lambda request: reply

    def choices(self, request: dict[str, Any]) -> list[Reply]:
        """The replies to a request, as many as its ``n``."""
        scripted = self._script(request)
        one = isinstance(scripted, str | Reply | ToolCall)
        replies = [scripted] if one else list(scripted)  # type: ignore[list-item]
        count = int(request.get("n") or 1)
        if len(replies) < count:
            replies = [replies[i % len(replies)] for i in range(count)]
        return [self._limited(as_reply(r), request) for r in replies[:count]]

    def _limited(self, reply: Reply, request: Mapping[str, Any]) -> Reply:
        """The reply after ``stop`` and ``max_tokens``, with its ids, logprobs and finish reason settled."""
        stops = request.get("stop") or ()
        for stop in (stops,) if isinstance(stops, str) else stops:
            if stop in reply.text:
                reply = replace(reply, text=reply.text.split(stop)[0], tool_calls=())
        ids = reply.tokens if reply.tokens is not None else (*encode(reply.rendered), END)
        finish = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if limit and len(ids) > limit:
            ids, finish = ids[:limit], "length"
            text, thought = decode(ids), None
            if reply.reasoning is not None:
                thought, _, text = text.removeprefix("<think>").partition("</think>")
            reply = replace(reply, text=text, tool_calls=(), reasoning=thought)
        values = reply.logprobs
        if values is None:
            values = tuple(
                None if i in self.null_logprobs else math.nan if i in self.nan_logprobs else logprob(t, i)
                for i, t in enumerate(ids)
            )
        return replace(reply, tokens=ids, logprobs=values, finish_reason=finish)
