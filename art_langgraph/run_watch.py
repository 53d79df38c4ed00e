"""Which run a call of a chat model belongs to, on the paths where LangChain does not say.

Invariant: what `RunWatch.take` gives is the run whose call is being made in this context, and is given once.

LangChain hands the run manager to ``_generate``, but not to ``_stream`` (``stream``, and ``invoke`` when a
callback wants tokens). It does tell every handler of the run right before, in the same context: a handler
among the model's own callbacks notes it there, also where a node silences callbacks. A run that ends
without having been taken was answered by an LLM cache.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult

from art_core.recording import new_id
from art_core.types import Message, Step
from art_langgraph.attribution import keep, rollout_of
from art_langgraph.identity import Run, identity_of

CACHE_HIT = "cache hit: the policy was not asked"


@dataclass(slots=True)
class _Watched:
    """A run, as a handler is told of it."""

    run_id: UUID
    parent_run_id: UUID | None
    tags: list[str]
    metadata: dict[str, Any]
    messages: list[BaseMessage]
    model: str
    taken: bool = False


_watched: ContextVar[_Watched | None] = ContextVar("art_watched_run", default=None)


class RunWatch(BaseCallbackHandler):
    """Notes the run of the call that is about to be made. Holds nothing, so models may share one."""

    run_inline = True  # else async calls would not see what is noted here

    @staticmethod
    def take(run_manager: Run | None) -> Run | None:
        """The run of the call that is being made here."""
        watched = _watched.get()
        _watched.set(None)
        if watched is not None:
            watched.taken = True  # async callers made the call in a copy of their context
        return watched if run_manager is None else run_manager

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note the run."""
        model = str((kwargs.get("invocation_params") or {}).get("model"))
        _watched.set(_Watched(run_id, parent_run_id, tags or [], metadata or {}, messages[0], model))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the run if no call was made for it."""
        watched = _watched.get()
        _watched.set(None)
        if watched is not None and watched.run_id == run_id and not watched.taken:
            keep(
                rollout_of(watched),
                watched.model,
                lambda rollout_id: (_cached(watched, response, rollout_id),),
            )


def _cached(watched: _Watched, response: LLMResult, rollout_id: str) -> Step:
    generation = response.generations[0][0] if response.generations and response.generations[0] else None
    answer = generation.message if isinstance(generation, ChatGeneration) else None
    messages = cast(list[Message], convert_to_openai_messages(watched.messages))
    return Step(
        id=new_id("s"),
        rollout_id=rollout_id,
        messages=tuple(messages),
        response=None if answer is None else cast(Message, convert_to_openai_messages(answer)),
        model=watched.model,
        identity=identity_of(watched, rollout_of(watched)),
        started_at=time.time(),
        duration=0.0,
        untrainable=CACHE_HIT,
    )
