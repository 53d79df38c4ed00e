"""TrajectoryCallbackHandler: records what any LangGraph graph does, without a change to the graph.

Invariant: it only observes. It never raises into the graph and never hides a fault of its own: faults are
counted on the rollout and said once. Every LLM call becomes steps exactly once, whichever way it came:

- a `ChatART` records by itself; the handler adds the span;
- a call through a gateway is joined with the completion that the gateway kept, tokens and all;
- any other call, and an answer of an LLM cache, becomes a step of text that says why it has no tokens.

Events come in the context of what they tell of (``run_inline``), from many threads and tasks at once.
"""

import asyncio
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from art_core.inference.gateway import Gateway
from art_core.recording import Rollout
from art_core.types import Step
from art_langgraph.attribution import forget, hear, keep
from art_langgraph.calls import (
    OpenCall,
    base_url_of,
    chat_request,
    current_loop,
    current_task,
    is_cache_hit,
    key_of_error,
    key_of_result,
    model_of,
    said,
    text_request,
)
from art_langgraph.chat_model import RECORDS_ITSELF
from art_langgraph.identity import identify
from art_langgraph.joining import GatewayJoin, record
from art_langgraph.run_watch import CACHE_HIT
from art_langgraph.span_handler import SpanHandler, observing
from art_langgraph.under_way import CANCELLED, STILL_RUNNING, calls_under_way, problem_of

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01

DRAIN_SECONDS = 2.0
"""How long the end of a rollout waits for background work."""

FETCH_SECONDS = 30.0
"""How much longer it waits for the completions, being fetched, of calls that have ended."""


class TrajectoryCallbackHandler(SpanHandler):
    """Records LLM calls as steps and everything else as spans.

    Installed by `capture` for whatever runs inside it, or passed by hand in
    ``config={"callbacks": [handler]}``; call `drain` before the rollout ends.

    Args:
        rollout: where everything is recorded; None: the rollout that is current where an event happens.
        gateway: the gateway that calls go through, or its URL where it runs in another process. Need not
            be given for one of this process, nor where the models' base URL is the gateway's own address.
        api_key: of a gateway in another process.
        spans: whether to record spans, too.
    """

    def __init__(
        self,
        rollout: Rollout | None = None,
        *,
        gateway: Gateway | str | None = None,
        api_key: str | None = None,
        spans: bool = True,
    ) -> None:
        super().__init__(rollout, spans=spans)
        self._join = GatewayJoin(gateway, api_key=api_key)
        self._lock = threading.Lock()
        self._calls: dict[UUID, OpenCall] = {}
        self._late: dict[UUID, Rollout] = {}

    # -- LLM calls ---------------------------------------------------------------------------------

    @observing
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
        """A chat model is asked."""
        params: Mapping[str, Any] = kwargs.get("invocation_params") or {}
        request = functools.partial(chat_request, messages[0], params)
        self._llm_start(serialized, request, params, run_id, parent_run_id, tags, metadata, kwargs)

    @observing
    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A model that completes text is asked."""
        params: Mapping[str, Any] = kwargs.get("invocation_params") or {}
        request = functools.partial(text_request, prompts[0], params)
        self._llm_start(serialized, request, params, run_id, parent_run_id, tags, metadata, kwargs)

    def _llm_start(
        self,
        serialized: Mapping[str, Any] | None,
        request: Callable[[], dict[str, Any]],
        params: Mapping[str, Any],
        run_id: UUID,
        parent_run_id: UUID | None,
        tags: list[str] | None,
        metadata: dict[str, Any] | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        records_itself = params.get("_type") == RECORDS_ITSELF
        rollout = self.rollout_for(run_id, parent_run_id, tags, metadata)
        if rollout is None:
            if not records_itself:  # a ChatART counts its own
                keep(None, model_of(params), _nothing)
            return
        if records_itself:
            hear(run_id, rollout)
            if not self.keeps_spans:
                return
        asked = request()
        name = kwargs.get("name") or (serialized or {}).get("name") or model_of(params)
        self.start_span("llm", str(name), rollout, asked, run_id, parent_run_id, tags, metadata)
        if records_itself:
            return
        identity = identify(metadata, tags=tags, run_id=run_id, parent_run_id=parent_run_id, rollout=rollout)
        call = OpenCall(
            run_id=run_id,
            rollout=rollout,
            identity=identity,
            request=asked,
            model=model_of(params),
            base_url=base_url_of(serialized),
            task=_task(),
            loop=current_loop(),
        )
        self._join.opened(call)
        with self._lock:
            self._calls[run_id] = call

    @observing
    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """A part of an answer has come."""
        call = self._calls.get(run_id)
        if call is not None:
            call.token(token, chunk)

    @observing
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """An answer is there."""
        forget(run_id)
        if self.keeps_spans:
            self.tracker.end(run_id, said(response))
        call = self._ended(run_id)
        if call is None:
            return
        with self._join.closing(call):
            if is_cache_hit(response):
                record(call, lambda: call.answered(response, CACHE_HIT))
            elif (key := key_of_result(response) or call.key) is None:
                record(call, lambda: call.answered(response, call.no_tokens()))
            else:
                self._join.completion(call, key, lambda why: call.answered(response, why))

    @observing
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A call has raised: the server did not answer, or what it answered could not be used."""
        forget(run_id)
        self.tracker.fail(run_id, error)
        call = self._ended(run_id)
        if call is None:
            return
        with self._join.closing(call):
            problem = problem_of(error)
            key = key_of_error(error, kwargs.get("response")) or call.key
            if key is not None:
                self._join.completion(call, key, lambda _: call.failed(problem))
            elif call.streamed:
                self._join.unread(call, problem)
            else:
                record(call, lambda: call.failed(problem))

    # -- the end of a rollout ----------------------------------------------------------------------

    def drain(self, rollout: Rollout, timeout: float = DRAIN_SECONDS) -> None:
        """Wait for what is still on its way, for at most ``timeout`` seconds, and close the rest.

        For completions that are being fetched from a gateway in another process it waits longer. Calls
        that were cancelled, and calls of background tasks that go on after that, become failed steps that
        say so. Call it before the rollout ends.
        """
        deadline = time.monotonic() + timeout
        while self._waits(rollout, deadline, blocking=True):
            time.sleep(_POLL_SECONDS)
        self._close(rollout)

    async def adrain(self, rollout: Rollout, timeout: float = DRAIN_SECONDS) -> None:
        """`drain`, while the event loop goes on."""
        deadline = time.monotonic() + timeout
        while self._waits(rollout, deadline, blocking=False):
            await asyncio.sleep(_POLL_SECONDS)
        self._close(rollout)

    def close(self) -> None:
        """Close the connections to gateways in other processes."""
        self._join.close()

    def _waits(self, rollout: Rollout, deadline: float, *, blocking: bool) -> bool:
        """Whether something of the rollout is still on its way, and waited for."""
        now = time.monotonic()
        if self._join.fetching(rollout):
            return now < deadline + FETCH_SECONDS
        if self._join.pending(rollout) or now >= deadline:
            return now < deadline
        # Who blocks an event loop must not wait for what runs on it.
        here = current_loop() if blocking else None
        with self._lock:
            calls = [call for call in self._calls.values() if call.rollout is rollout]
        return any(
            not call.abandoned and (here is None or call.loop is not here)
            for call in (*calls, *calls_under_way(rollout))
        )

    def _close(self, rollout: Rollout) -> None:
        self._join.give_up(rollout)
        with self._lock:
            left = [call for call in self._calls.values() if call.rollout is rollout]
            for call in left:
                del self._calls[call.run_id]
                if not call.abandoned:
                    self._late[call.run_id] = rollout
        for call in left:
            with self._join.closing(call):
                if call.abandoned:
                    rollout.count_fault("cancelled_calls")
                    record(call, lambda call=call: call.failed(CANCELLED))
                else:
                    rollout.count_fault("unfinished_calls")
                    record(call, lambda call=call: call.failed(STILL_RUNNING))
        for call in calls_under_way(rollout):
            call.close()
        self.tracker.close(rollout)

    def _ended(self, run_id: UUID) -> OpenCall | None:
        with self._lock:
            call = self._calls.pop(run_id, None)
            late = self._late.pop(run_id, None)
        if late is not None:
            late.count_fault("late_calls")
            logger.warning("rollout %s had ended when a call of a background task did", late.id)
        return call


def _task() -> "weakref.ref[asyncio.Task[Any]] | None":
    task = current_task()
    return weakref.ref(task) if task is not None else None


def _nothing(_: str) -> Sequence[Step]:
    return ()
