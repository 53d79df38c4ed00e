"""The Engine protocol: who serves the policy.

Invariant: a version's name answers with that version's weights and no other, from `publish` until
`retire`; a request in flight ends on the version it started with. An engine speaks OpenAI's HTTP
schema at ``base_url`` and returns exact token ids and logprobs when asked (``logprobs: true``,
``return_token_ids: true``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from art_core.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is.

    Attributes:
        ok: whether it answers.
        detail: what a person needs to know when it does not.
    """

    ok: bool
    detail: str = ""


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
