"""``model.chat.completions``: OpenAI's client, each call of which becomes a step of a trajectory.

Invariant: what the caller gets is what OpenAI's client gives; what is recorded is what the server sent.

A call belongs to the trajectory named by ``trajectory_id``, else to the current one of this context.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAI

from art_core.capture import Call, StreamAssembler, failed_step, request_extras, steps_from
from art_core.errors import RolloutTooLongError
from art_core.recording import ROLLOUT_HEADER, Rollout, current_rollout
from art_core.types import PolicyVersion, Step

if TYPE_CHECKING:
    from art_core.model import TrainableModel

logger = logging.getLogger(__name__)


@dataclass
class _Turn:
    """One call under way: what was asked, of whom, for which trajectory."""

    rollout: Rollout | None
    request: dict[str, Any]
    version: PolicyVersion
    started_at: float
    clock: float

    def wire(self) -> dict[str, Any]:
        """The request as it is sent: the version's name, and what capture needs."""
        extras = request_extras(self.request)
        wire = {**self.request, "model": self.version.name}
        if "logprobs" in extras:
            wire["logprobs"] = extras.pop("logprobs")
        if self.rollout is not None:
            wire["extra_headers"] = {
                **(self.request.get("extra_headers") or {}),
                ROLLOUT_HEADER: self.rollout.id,
            }
        if extras:
            wire["extra_body"] = {**extras, **(self.request.get("extra_body") or {})}
        return wire

    def steps(self, body: Mapping[str, Any]) -> tuple[Step, ...]:
        """The answer as steps; none when no trajectory is open."""
        return () if self.rollout is None else steps_from(self._call(self.rollout), body)

    def failed(self, error: BaseException) -> tuple[Step, ...]:
        """The failure as a step."""
        if self.rollout is None:
            return ()
        return (failed_step(self._call(self.rollout), f"{type(error).__name__}: {error}"),)

    def _call(self, rollout: Rollout) -> Call:
        return Call(
            request={k: v for k, v in self.request.items() if k not in ("extra_body", "extra_headers")},
            rollout_id=rollout.id,
            policy=self.version,
            started_at=self.started_at,
            duration=time.perf_counter() - self.clock,
        )


class Completions:
    """``model.chat.completions``."""

    def __init__(self, model: "TrainableModel") -> None:
        self._model = model
        self._sync: OpenAI | None = None
        # An HTTP client belongs to its loop, and must not outlive it.
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            weakref.WeakKeyDictionary()
        )
        self._warned = False

    def create(self, *, trajectory_id: str | None = None, **request: Any) -> Any:
        """Ask the model, as ``openai.OpenAI().chat.completions.create`` does.

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
        if self._sync is None:
            self._sync = OpenAI(base_url=self._model.base_url, api_key=self._model.api_key)
        if request.get("stream"):
            return self._stream(self._sync, trajectory_id, request)
        with self._turn(trajectory_id, request) as turn:
            try:
                raw = self._sync.chat.completions.with_raw_response.create(**turn.wire())
            except Exception as error:
                self._record(turn, turn.failed(error))
                raise
            self._record(turn, turn.steps(raw.http_response.json()))
            return raw.parse()

    async def acreate(self, *, trajectory_id: str | None = None, **request: Any) -> Any:
        """Ask the model; see `create`. With ``stream=True``, an async iterator of chunks."""
        client = self._async_client()
        if request.get("stream"):
            return self._astream(client, trajectory_id, request)
        with self._turn(trajectory_id, request) as turn:
            try:
                raw = await client.chat.completions.with_raw_response.create(**turn.wire())
            except BaseException as error:
                await self._arecord(turn, turn.failed(error))
                raise
            await self._arecord(turn, turn.steps(raw.http_response.json()))
            return raw.parse()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _async_client(self) -> AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if loop not in self._async:
            self._async[loop] = AsyncOpenAI(base_url=self._model.base_url, api_key=self._model.api_key)
        return self._async[loop]

    def _stream(self, client: OpenAI, trajectory_id: str | None, request: dict[str, Any]) -> Iterator[Any]:
        with self._turn(trajectory_id, request) as turn:
            assembler = StreamAssembler()
            try:
                for chunk in client.chat.completions.create(**turn.wire()):
                    assembler.feed(chunk.model_dump(exclude_unset=True))
                    yield chunk
            except BaseException as error:  # also a consumer that stops reading: the step is not whole
                self._record(turn, turn.failed(error))
                raise
            self._record(turn, turn.steps(assembler.body()))

    async def _astream(
        self, client: AsyncOpenAI, trajectory_id: str | None, request: dict[str, Any]
    ) -> AsyncIterator[Any]:
        with self._turn(trajectory_id, request) as turn:
            assembler = StreamAssembler()
            try:
                async for chunk in await client.chat.completions.create(**turn.wire()):
                    assembler.feed(chunk.model_dump(exclude_unset=True))
                    yield chunk
            except BaseException as error:
                await self._arecord(turn, turn.failed(error))
                raise
            await self._arecord(turn, turn.steps(assembler.body()))

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
            yield _Turn(rollout, named, version, time.time(), time.perf_counter())

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
