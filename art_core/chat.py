"""``model.chat.completions``: OpenAI's client, each call of which becomes a step of a trajectory.

Invariant: what the caller gets is what OpenAI's client gives; what is recorded is what the server sent.

A call belongs to the trajectory named by ``trajectory_id``, else to the current one of this context. Inside a
graph that is captured, its step says which node made it.
"""

import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAI

from art_core.capture import Call, failed_step, steps_from
from art_core.errors import CaptureError, RolloutTooLongError
from art_core.inference.availability import availability_of
from art_core.inference.endpoint import raw_logprobs_of
from art_core.recording import ROLLOUT_HEADER, Rollout, current_rollout, identity_here
from art_core.tap import Exchange, async_keeping_client, keeping_client
from art_core.types import PolicyVersion, Step, StepIdentity

if TYPE_CHECKING:
    from art_core.model import TrainableModel

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Most connections to open at once, in one event loop and over all threads; further calls wait for one."""


@dataclass
class _Turn:
    """One call under way: what was asked, of whom, for which trajectory."""

    rollout: Rollout | None
    request: dict[str, Any]
    version: PolicyVersion
    exchange: Exchange
    started_at: float
    clock: float
    raw_logprobs: bool
    identity: StepIdentity

    @property
    def wire(self) -> dict[str, Any]:
        """The request, bound to its exchange, in which the answer is kept."""
        place = {} if self.rollout is None else {ROLLOUT_HEADER: self.rollout.id}
        headers = {**(self.request.get("extra_headers") or {}), **self.exchange.headers, **place}
        return {**self.request, "extra_headers": headers}

    def steps(self, error: BaseException | None = None) -> tuple[Step, ...]:
        """What the call came to; nothing when no trajectory is open, or no request was sent."""
        exchange = self.exchange
        if self.rollout is None or exchange.request is None:
            return ()
        call = Call(
            request=exchange.request,
            rollout_id=self.rollout.id,
            policy=self.version,
            identity=self.identity,
            started_at=self.started_at,
            duration=(exchange.ended_at or time.perf_counter()) - self.clock,
            time_to_first_token=exchange.time_to_first_token(self.clock),
            raw_logprobs=self.raw_logprobs,
        )
        problem = exchange.problem
        if exchange.answer is not None:
            try:
                return steps_from(call, exchange.answer)
            except CaptureError as unreadable:
                problem = str(unreadable)
        if problem is None:
            problem = "no answer came" if error is None else f"{type(error).__name__}: {error}"
        return (failed_step(call, problem),)


class Completions:
    """``model.chat.completions``."""

    def __init__(self, model: "TrainableModel") -> None:
        self._model = model
        self._warned = False

    def create(self, *, trajectory_id: str | None = None, **request: Any) -> Any:
        """Ask the model, as ``openai.OpenAI().chat.completions.create`` does.

        While the server is being restarted the call waits for it.

        Args:
            trajectory_id: which trajectory it belongs to; None: the current one.
            request: OpenAI's parameters. ``model`` may be left out.

        Returns:
            a ``ChatCompletion``, or an iterator of chunks with ``stream=True``.

        Raises:
            UnknownTrajectoryError: the trajectory is unknown or has ended.
            RolloutTooLongError: it has made ``rollout_length`` calls.
            openai.APIError: the server refused.
        """
        if request.get("stream"):
            return self._stream(trajectory_id, request)
        with self._turn(trajectory_id, request) as turn:
            try:
                answer = self._sync.chat.completions.create(**turn.wire)
            except BaseException as error:
                self._record(turn, turn.steps(error))
                raise
            self._record(turn, turn.steps())
            return answer

    async def acreate(self, *, trajectory_id: str | None = None, **request: Any) -> Any:
        """Ask the model; see `create`. With ``stream=True``, an async iterator of chunks."""
        if request.get("stream"):
            return self._astream(trajectory_id, request)
        with self._turn(trajectory_id, request) as turn:
            try:
                answer = await self._async.chat.completions.create(**turn.wire)
            except BaseException as error:
                await self._arecord(turn, turn.steps(error))
                raise
            await self._arecord(turn, turn.steps())
            return answer

    async def aclose(self) -> None:
        """Forget the address; connections are shared, and end with their event loops."""
        self.__dict__.pop("_sync", None)
        self.__dict__.pop("_async", None)

    @cached_property
    def _sync(self) -> OpenAI:
        http: Any = keeping_client(MAX_CONNECTIONS)  # of whichever httpx the SDK stands on
        return OpenAI(base_url=self._model.base_url, api_key=self._model.api_key, http_client=http)

    @cached_property
    def _async(self) -> AsyncOpenAI:
        http: Any = async_keeping_client(MAX_CONNECTIONS)
        return AsyncOpenAI(base_url=self._model.base_url, api_key=self._model.api_key, http_client=http)

    def _stream(self, trajectory_id: str | None, request: dict[str, Any]) -> Iterator[Any]:
        with self._turn(trajectory_id, request) as turn:
            try:
                with self._sync.chat.completions.create(**turn.wire) as chunks:
                    yield from chunks
            except BaseException as error:  # also a consumer that stops reading: the step is not whole
                self._record(turn, turn.steps(error))
                raise
            self._record(turn, turn.steps())

    async def _astream(self, trajectory_id: str | None, request: dict[str, Any]) -> AsyncIterator[Any]:
        with self._turn(trajectory_id, request) as turn:
            try:
                async with await self._async.chat.completions.create(**turn.wire) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except BaseException as error:
                await self._arecord(turn, turn.steps(error))
                raise
            await self._arecord(turn, turn.steps())

    @contextmanager
    def _turn(self, trajectory_id: str | None, request: dict[str, Any]) -> Generator[_Turn]:
        rollout = current_rollout() if trajectory_id is None else self._model.rollout(trajectory_id)
        if rollout is None and not self._warned:
            self._warned = True
            logger.warning(
                "model %s was called outside of any trajectory: the call is answered but not recorded; "
                "start_trajectory() first, or pass trajectory_id",
                self._model.name,
            )
        limit = rollout.max_calls if rollout is not None else None
        if rollout is not None and limit is not None and rollout.count_call() > limit:
            raise RolloutTooLongError(
                f"trajectory {rollout.id} has made {limit} calls already, its model's rollout_length"
            )
        named = {"model": self._model.name, **request}
        asked = PolicyVersion.parse(str(named["model"]))
        with self._model.lease(asked) as version:
            exchange = Exchange(
                self._model.base_url,
                model=self._model.wire_name(version),
                api_key=self._model.api_key,
                server=availability_of(self._model),
            )
            raw = raw_logprobs_of(self._model)
            identity = identity_here() if rollout is current_rollout() else StepIdentity()
            clock = time.perf_counter()
            yield _Turn(rollout, named, version, exchange, time.time(), clock, raw, identity)

    def _record(self, turn: _Turn, steps: tuple[Step, ...]) -> None:
        for step in steps:
            assert turn.rollout is not None
            turn.rollout.record(step)

    async def _arecord(self, turn: _Turn, steps: tuple[Step, ...]) -> None:
        for step in steps:
            assert turn.rollout is not None
            await turn.rollout.arecord(step)


class Chat:
    """``model.chat``."""

    def __init__(self, model: "TrainableModel") -> None:
        self.completions = Completions(model)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.completions.aclose()
