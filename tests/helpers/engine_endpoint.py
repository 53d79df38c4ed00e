"""A policy on an engine, without a trainer: what chat models need to call it."""

from contextlib import AbstractContextManager
from pathlib import Path

from art_core.backends.serving import Serving
from art_core.config import RetentionConfig
from art_core.inference.availability import Availability, availability_of
from art_core.inference.engine import Engine
from art_core.recording import NullSink, Sink
from art_core.types import PolicyVersion


class EngineEndpoint:
    """The versions that are published through ``serving``, at the engine's address.

    Args:
        engine: a started engine.
        directory: takes the adapters, as ``checkpoint-<number>/adapter``.
        sink: where rollouts are kept.
        keep: how many of the newest adapters stay on disk.
    """

    def __init__(
        self, engine: Engine, directory: Path, *, name: str = "agent", sink: Sink | None = None, keep: int = 3
    ) -> None:
        self.name = name
        self.api_key = "none"
        self.sink: Sink = sink or NullSink()
        self.engine = engine
        self.directory = directory
        self.serving = Serving(name, engine, directory, RetentionConfig(last=keep))

    @property
    def base_url(self) -> str:
        return self.engine.base_url

    @property
    def availability(self) -> Availability:
        return availability_of(self.engine)

    def current_version(self) -> PolicyVersion:
        return self.serving.current

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        return self.serving.lease(version)

    def adapter_dir(self, number: int) -> Path:
        """Where the adapter of a version lies."""
        return self.directory / f"checkpoint-{number:08d}" / "adapter"

    async def publish(self, number: int) -> None:
        """Serve the adapter that was written there, make it current, and let go of what nobody needs."""
        await self.serving.publish(PolicyVersion(self.name, number), self.adapter_dir(number))
        await self.serving.tidy()
