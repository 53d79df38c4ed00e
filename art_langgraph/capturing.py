"""capture: everything that runs inside it is recorded into one rollout.

Invariant: the rollout that `capture` started has ended when the block is left, failed with the error if
the block raised; what was still on its way was waited for, for a bounded time.
"""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar, Token
from functools import cache
from types import TracebackType
from typing import Any

from langchain_core.tracers.context import register_configure_hook

from art_core.errors import NoPolicyCallsError, words_of
from art_core.inference.gateway import Gateway
from art_core.missing_calls import where_calls_went
from art_core.recording import Rollout, Sink, recording, restore
from art_core.types import Failure, Scenario
from art_langgraph.handler import DRAIN_SECONDS, TrajectoryCallbackHandler
from art_langgraph.identity import place

READER_LEFT = "its reader left: the generator that captured it was closed"
"""The failure of a stream that was not read to its end."""

_ambient: ContextVar[TrajectoryCallbackHandler | None] = ContextVar("art_trajectory_handler", default=None)


@cache
def _hook() -> None:
    """Have LangChain add the handler of the context to every run; once for the process."""
    register_configure_hook(_ambient, inheritable=True)


class capture:
    """A rollout for everything inside ``with capture() as rollout:``, or ``async with``.

    It reaches subgraphs, tools and parallel branches; nobody's ``config`` is touched. Without any policy it
    is a plain tracer: ``rollout.snapshot().spans`` and ``.steps``.

    Args:
        scenario: what is being tried.
        rollout: an existing rollout to record into; it is left to whoever made it to end it.
        sink: where a new rollout is kept.
        gateway: the gateway that calls go through, or its URL; see `TrajectoryCallbackHandler`.
        api_key: of a gateway in another process.
        spans: whether to record spans, too.
        metadata: kept with a new rollout.
        require_policy_calls: fail a new rollout in which no call of a policy was captured.
        drain: seconds to wait at the end for background work.

    Raises:
        NoPolicyCallsError: at the end, with ``require_policy_calls``; it says where the calls went.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        *,
        rollout: Rollout | None = None,
        sink: Sink | None = None,
        gateway: Gateway | str | None = None,
        api_key: str | None = None,
        spans: bool = True,
        metadata: Mapping[str, Any] | None = None,
        require_policy_calls: bool = False,
        drain: float = DRAIN_SECONDS,
    ) -> None:
        self._given = rollout
        self._scenario = scenario
        self._sink = sink
        self._metadata = metadata
        self._require_policy_calls = require_policy_calls
        self._drain = drain
        self._options: dict[str, Any] = {"gateway": gateway, "api_key": api_key, "spans": spans}
        self._rollout: Rollout | None = None

    def __enter__(self) -> Rollout:
        _hook()
        rollout = self._given or Rollout(self._scenario, sink=self._sink, metadata=self._metadata)
        self._rollout = rollout
        self._handler = TrajectoryCallbackHandler(rollout, **self._options)
        self._token: Token[TrajectoryCallbackHandler | None] = _ambient.set(self._handler)
        self._recording = recording(rollout, place=place)
        self._recording.__enter__()
        return rollout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rollout = self._left(kind, error, trace)
        self._handler.drain(rollout, self._drain)
        self._handler.close()
        if (missing := self._missing(rollout, error)) is not None:
            rollout.fail(Failure("no_policy_calls", str(missing)))
            raise missing
        if self._ends(rollout):
            rollout.fail(failure_of(error)) if error is not None else rollout.finish()

    async def __aenter__(self) -> Rollout:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rollout = self._left(kind, error, trace)
        await self._handler.adrain(rollout, self._drain)
        self._handler.close()
        if (missing := self._missing(rollout, error)) is not None:
            await rollout.afail(Failure("no_policy_calls", str(missing)))
            raise missing
        if self._ends(rollout):
            await (rollout.afail(failure_of(error)) if error is not None else rollout.afinish())

    def _left(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Rollout:
        assert self._rollout is not None, "capture was left before it was entered"
        restore(_ambient, self._token, self._handler)
        self._recording.__exit__(kind, error, trace)
        return self._rollout

    def _ends(self, rollout: Rollout) -> bool:
        return self._given is None and not rollout.ended

    def _missing(self, rollout: Rollout, error: BaseException | None) -> NoPolicyCallsError | None:
        if not self._require_policy_calls or error is not None or not self._ends(rollout):
            return None
        if any(step.policy and step.response for step in rollout.steps):
            return None
        return NoPolicyCallsError(where_calls_went(rollout))


def failure_of(error: BaseException) -> Failure:
    """What an exception that ended a rollout makes of it."""
    cause = "exception"
    if isinstance(error, TimeoutError):
        cause = "timeout"
    elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        cause = "cancelled"
    kind = type(error)
    if isinstance(error, GeneratorExit):
        return Failure(cause, READER_LEFT, "builtins.GeneratorExit")
    return Failure(cause, words_of(error), f"{kind.__module__}.{kind.__qualname__}")
