"""The engine that needs no GPU and no second process: it serves the very model that is trained.

Invariant: a version is a frozen snapshot of the adapter; what the trainer does afterwards never
changes what a version answers.

`publish` with ``adapter_dir=None`` freezes the training adapter as it is at that moment, which is the
base model's behaviour before the first update (LoRA starts at zero). Nothing is written or loaded, so
publishing costs milliseconds.
"""

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.embedded.api import build_app
from art_core.inference.embedded.parsing import forms_of
from art_core.inference.embedded.scheduler import Scheduler
from art_core.inference.embedded.server import ServerThread
from art_core.inference.embedded.versions import ServedVersions
from art_core.inference.engine import EngineHealth
from art_core.training.policy import Policy
from art_core.types import PolicyVersion

STOP_SECONDS = 2.0


class EmbeddedEngine:
    """Serves a policy's snapshots over HTTP from threads of this process.

    Args:
        policy: the model; the engine holds ``policy.lock`` while it decodes, a quarter of a second at a
            time. A trainer calls `pause` first and has the machine to itself.
        config: how to serve; ``max_model_len`` is lowered to what the model can do.
        served_model: the name before ``@<n>``.

    Raises:
        ConfigError: the model has layers that cannot be decoded here, or a parser is asked for that is not
            here.
    """

    def __init__(self, policy: Policy, config: EngineConfig, *, served_model: str) -> None:
        self._policy = policy
        longest = policy.context_length
        if longest is not None and longest < config.max_model_len:
            # Beyond it the model would answer, but not as the model that it is.
            config = config.replace(max_model_len=longest)
        self._config = config
        self._forms = forms_of(policy.base_model, _template(policy), config)
        self._versions = ServedVersions(served_model)
        # Fast tokenizers must not be used by two threads at once: one for the server, one for the loop.
        self._tokenizer = copy.deepcopy(policy.tokenizer)
        self._scheduler = Scheduler(policy, copy.deepcopy(policy.tokenizer), config)
        self._server: ServerThread | None = None
        self._closed = False

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``.

        Raises:
            EngineError: the engine was not started.
        """
        if self._server is None:
            raise EngineError("the embedded engine has no address before start()")
        return f"{self._server.url}/v1"

    async def start(self) -> None:
        """Listen; returns once it answers.

        Raises:
            EngineError: the port is in use, or the engine was closed.
        """
        if self._closed:
            raise EngineError("the embedded engine is closed and cannot be started again; make a new one")
        if self._server is not None:
            return
        app = build_app(
            self._tokenizer,
            self._policy.end_token_ids,
            self._config,
            self._versions,
            self._scheduler,
            self._forms,
        )
        server = ServerThread(app, self._config.host, self._config.port)
        self._scheduler.start()
        await server.start(self._config.start_timeout)
        self._server = server

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version: a PEFT directory's adapter, or the training adapter as it is now (None).

        Raises:
            EngineError: the version belongs to another model, or its name is taken.
            CheckpointError: the directory holds no adapter that fits.
        """
        if version.model != self._versions.model:
            raise EngineError(
                f"this engine serves versions of {self._versions.model!r}, not {version.name!r}"
            )
        await asyncio.to_thread(self._policy.snapshot, version.name, adapter_dir)
        self._versions.add(version)

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version, once its requests in flight have ended.

        Requests that `pause` holds are in flight too: resume before waiting for this.
        """
        if not self._versions.remove(version):
            return
        await asyncio.to_thread(self._scheduler.drain, version.name)
        await asyncio.to_thread(self._policy.drop, version.name)

    def versions(self) -> Sequence[PolicyVersion]:
        """What is served now, oldest first."""
        return self._versions.list()

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones, to give the machine to the trainer."""
        await asyncio.to_thread(self._scheduler.pause)

    async def resume(self) -> None:
        """Take requests again."""
        self._scheduler.resume()

    async def health(self) -> EngineHealth:
        """Whether it answers."""
        if self._server is None or self._closed:
            return EngineHealth(False, "the embedded engine is not running")
        if not self._server.alive:
            return EngineHealth(False, "the embedded engine's HTTP thread has ended")
        if not self._scheduler.alive:
            return EngineHealth(False, "the embedded engine's decoding thread has ended")
        return EngineHealth(True)

    async def close(self) -> None:
        """Stop; requests in flight end with an error. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._scheduler.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop, STOP_SECONDS)
        for version in self._versions.list():
            self._versions.remove(version)
            await asyncio.to_thread(self._policy.drop, version.name)


def _template(policy: Policy) -> str | None:
    template = policy.tokenizer.chat_template
    return template if isinstance(template, str) else None
