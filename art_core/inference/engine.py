"""The Engine protocol: who serves the policy.

Invariant: a version's name answers with that version's weights and no other, from `publish` until
`retire`; a request in flight ends on the version it started with. An engine speaks OpenAI's HTTP
schema at ``base_url`` and returns exact token ids and logprobs when asked (``logprobs: true``,
``return_token_ids: true``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from art_core.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is.

    Attributes:
        ok: whether it answers.
        detail: what a person needs to know when it does not.
        encoding: in which form exact tokens come: ``packed`` or ``standard``.
    """

    ok: bool
    detail: str = ""
    encoding: str = "standard"


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something that an engine did by itself, to be kept in the record.

    Attributes:
        kind: ``engine_restarted``, ``engine_failed``, ``version_republished``, ``version_lost``, ...
        message: for people.
        data: for programs; JSON.
    """

    kind: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


EventListener: TypeAlias = Callable[[EngineEvent], None]
"""Told of an event, from any thread."""


@runtime_checkable
class Eventful(Protocol):
    """An engine that does things by itself and tells of them."""

    on_event: EventListener | None


@runtime_checkable
class Replacing(Protocol):
    """An engine that may have room for one version, whose place the next one takes."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether it has."""
        ...


class Engine(Protocol):
    """Serves policy versions over HTTP."""

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``. Valid after `start`."""
        ...

    async def start(self) -> None:
        """Listen; returns once it answers.

        Raises:
            EngineError: it did not come up; the message holds the cause and the last log lines.
        """
        ...

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version from now on. ``adapter_dir`` is a PEFT adapter directory; None: the base model.

        Raises:
            EngineError: the name is taken by a version that is still served, or loading failed.
        """
        ...

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version, once its requests in flight have ended."""
        ...

    def versions(self) -> Sequence[PolicyVersion]:
        """What is served now, oldest first."""
        ...

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones, to give the machine to the trainer."""
        ...

    async def resume(self) -> None:
        """Take requests again."""
        ...

    async def health(self) -> EngineHealth:
        """Whether it answers."""
        ...

    async def close(self) -> None:
        """Stop; requests in flight are ended. Closing twice does nothing."""
        ...
