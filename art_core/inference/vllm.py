"""vLLM as an engine: a managed server process and its run-time LoRA endpoints.

Invariant: a version's name answers with that version's weights from `publish` until `retire`, and is
never given to other weights while this server lives (vLLM's prefix cache may be keyed by that name).

The server is a child process with a log file. It dies with us, and its death is an error that quotes the
log. Clients talk to it directly at ``base_url``; this class only starts, steers and stops it.
"""

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.engine import EngineHealth
from art_core.inference.processes import ManagedProcess, log_tail
from art_core.inference.vllm_command import (
    InstalledVLLM,
    installed_vllm,
    is_loopback,
    lora_slot_rank,
    server_arguments,
    server_environment,
    serving_parsers,
)
from art_core.inference.vllm_faults import find_fault
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""How often a starting server is asked whether it answers."""
STEER_TIMEOUT = 120.0
"""Seconds that loading an adapter or another act of ours may take."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a starting server is.

    Attributes:
        seconds: since it was started.
        last_line: the newest line of its log.
        log: where the whole log is.
    """

    seconds: float
    last_line: str
    log: Path


class VLLMEngine:
    """Serves one base model and the adapters that are trained on it.

    Args:
        base_model: a model hub name or a directory.
        config: how to serve; ``config.python`` may name another environment's interpreter.
        lora: the adapters' shape; room for them is made at the start.
        served_model: the policy's name; versions are ``<served_model>@<n>``.
        log_dir: where each start leaves its log file.
        on_progress: told again and again while the server starts; vLLM takes from half a minute to several.

    Raises:
        ConfigError: a setting that vLLM cannot honour.
    """

    def __init__(
        self,
        base_model: str,
        config: EngineConfig,
        lora: LoRAConfig,
        served_model: str,
        log_dir: Path,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> None:
        if config.deterministic:
            raise ConfigError(
                "EngineConfig.deterministic: only the embedded engine decodes batch-invariantly; "
                "use kind='embedded', or leave it out"
            )
        self._slot_rank = lora_slot_rank(lora.rank)
        self._base_model = base_model
        self._config = config
        self._lora = lora
        self._served_model = served_model
        self._log_dir = log_dir
        self._on_progress = on_progress
        self._process: ManagedProcess | None = None
        self._root: str | None = None
        self._versions: list[PolicyVersion] = []
        self._used: set[PolicyVersion] = set()

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``.

        Raises:
            EngineError: before `start`.
        """
        if self._root is None:
            raise EngineError("vLLM has not been started; call start() first")
        return f"{self._root}/v1"

    @property
    def log_path(self) -> Path | None:
        """The log of the server that runs now, or ran last; None before the first start."""
        return self._process.log if self._process else None

    async def start(self) -> None:
        """Start the server; returns once it answers.

        Raises:
            EngineError: vLLM is not installed, the port is taken, or the server did not come up within
                ``config.start_timeout``; the message holds the cause and the log's last lines.
        """
        if self._root is not None:
            raise EngineError(f"vLLM already runs at {self._root}; close() it before starting again")
        installed = await asyncio.to_thread(installed_vllm, self._config.python or Path(sys.executable))
        with _reserved_port(self._config) as reserved:
            port = reserved.getsockname()[1]
            self._process = await asyncio.to_thread(self._launch, installed, port)
            root = f"http://{_connectable(self._config.host)}:{port}"
            try:
                await self._wait_until_it_answers(self._process, root)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(self._process.close))
                raise
        self._root = root

    def _launch(self, installed: InstalledVLLM, port: int) -> ManagedProcess:
        parsers = serving_parsers(installed, self._base_model, self._config)
        logger.info("%s: %s", self._base_model, parsers.why)
        arguments = server_arguments(
            installed,
            base_model=self._base_model,
            served_model=self._served_model,
            config=self._config,
            lora=self._lora,
            port=port,
            parsers=parsers,
        )
        log = self._log_dir / f"vllm-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log"
        logger.info("starting vLLM %s on port %d, log in %s", installed.version, port, log)
        return ManagedProcess(
            arguments,
            env=server_environment(installed, self._config, os.environ),
            log=log,
            on_exit=partial(_report_death, log),
        )

    async def _wait_until_it_answers(self, process: ManagedProcess, root: str) -> None:
        started = time.monotonic()
        async with _client(timeout=5.0) as client:
            while True:
                seconds = time.monotonic() - started
                if process.exit_status is not None:
                    raise EngineError(f"vLLM {process.describe_exit()} after {seconds:.0f} s" + _why(process))
                if await self._answers(client, root):
                    return
                if seconds > self._config.start_timeout:
                    raise EngineError(
                        f"vLLM did not answer within EngineConfig.start_timeout="
                        f"{self._config.start_timeout:g} s" + _why(process)
                    )
                if self._on_progress is not None:
                    self._on_progress(StartProgress(seconds, process.tail(1), process.log))
                await asyncio.sleep(POLL_SECONDS)

    async def _answers(self, client: httpx.AsyncClient, root: str) -> bool:
        try:
            response = await client.get(f"{root}/v1/models")
        except httpx.TransportError:
            return False
        if response.status_code != 200:
            return False
        names = {str(card.get("id")) for card in response.json().get("data", [])}
        if PolicyVersion(self._served_model, 0).name not in names:
            raise EngineError(
                f"{root} is answered by another server, which serves {sorted(names)}; "
                "leave EngineConfig.port empty to get a free port"
            )
        return True

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version from now on.

        Args:
            version: of this engine's model; each number once.
            adapter_dir: a PEFT adapter directory that stays as it is until the version is retired; None:
                the base model, which vLLM serves as version 0.

        Raises:
            EngineError: the version belongs to another model, was already used, or loading failed.
        """
        if version.model != self._served_model:
            raise EngineError(f"{version}: this engine serves versions of {self._served_model!r}")
        if version in self._used:
            raise EngineError(
                f"{version} was already published; vLLM may keep cached prefixes under a name, so new "
                "weights need a new version number"
            )
        if adapter_dir is None:
            if version.number != 0:
                raise EngineError(
                    f"{version} without an adapter: vLLM serves the base model as version 0 only"
                )
            self._running()
        elif version.number == 0:
            raise EngineError(
                f"{version} is the base model's name on vLLM; publish {adapter_dir} as version 1 or later"
            )
        else:
            self._check_adapter(version, adapter_dir)
            await self._steer(
                "/v1/load_lora_adapter",
                {"lora_name": version.name, "lora_path": str(adapter_dir.resolve())},
                f"load adapter {adapter_dir} as {version}",
            )
        self._used.add(version)
        self._versions.append(version)

    def _check_adapter(self, version: PolicyVersion, adapter_dir: Path) -> None:
        try:
            settings = json.loads((adapter_dir / "adapter_config.json").read_text())
        except (OSError, ValueError) as unreadable:
            raise EngineError(
                f"{version}: {adapter_dir} is not a PEFT adapter directory: {unreadable}"
            ) from unreadable
        if (rank := settings.get("r", 0)) > self._slot_rank:
            raise EngineError(
                f"{version}: {adapter_dir} has rank {rank}, but vLLM was started with room for rank "
                f"{self._slot_rank}; start the engine with LoRAConfig(rank={rank})"
            )

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version. Requests that vLLM has accepted end on it; the base model's name stays.

        Raises:
            EngineError: the version is not served, or vLLM refused.
        """
        if version not in self._versions:
            raise EngineError(
                f"{version} is not served; served: {', '.join(map(str, self._versions)) or 'none'}"
            )
        if version.number != 0:
            await self._steer("/v1/unload_lora_adapter", {"lora_name": version.name}, f"unload {version}")
        self._versions.remove(version)

    def versions(self) -> Sequence[PolicyVersion]:
        """What is served now, oldest first."""
        return tuple(self._versions)

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones in vLLM's queue until `resume`.

        On an address that other machines can reach this does nothing: vLLM offers it only together with
        endpoints that must stay private.
        """
        if self._can_pause():
            await self._steer("/pause?mode=wait&clear_cache=false", None, "pause", timeout=None)

    async def resume(self) -> None:
        """Take requests again."""
        if self._can_pause():
            await self._steer("/resume", None, "resume")

    def _can_pause(self) -> bool:
        if is_loopback(self._config.host):
            return True
        logger.info("vLLM listens on %s: requests are not held", self._config.host)
        return False

    async def health(self) -> EngineHealth:
        """Whether the server answers; if not, how it ended and the last lines of its log."""
        try:
            root, process = self._running()
        except EngineError as gone:
            return EngineHealth(ok=False, detail=str(gone))
        try:
            async with _client(timeout=10.0) as client:
                response = await client.get(f"{root}/health")
        except httpx.TransportError as silent:
            return EngineHealth(
                ok=False, detail=f"vLLM at {root} does not answer: {silent!r}" + _why(process)
            )
        if response.status_code == 200:
            return EngineHealth(ok=True)
        return EngineHealth(ok=False, detail=f"vLLM at {root} says {response.status_code}" + _why(process))

    async def close(self) -> None:
        """Stop the server and all its processes. Closing twice does nothing; it can be started again."""
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self._root = None
        self._versions.clear()
        self._used.clear()

    def _running(self) -> tuple[str, ManagedProcess]:
        if self._root is None or self._process is None:
            raise EngineError("vLLM is not running; call start() first")
        if self._process.exit_status is not None:
            raise EngineError(f"vLLM {self._process.describe_exit()}" + _why(self._process))
        return self._root, self._process

    async def _steer(
        self, path: str, body: dict[str, Any] | None, what: str, timeout: float | None = STEER_TIMEOUT
    ) -> None:
        root, process = self._running()
        try:
            async with _client(timeout=timeout) as client:
                response = await client.post(root + path, json=body)
        except httpx.TransportError as failed:
            self._running()
            raise EngineError(f"vLLM did not {what}: {failed!r}" + _why(process)) from failed
        if response.status_code != 200:
            raise EngineError(f"vLLM did not {what}: {_message(response)}")


def _client(timeout: float | None) -> httpx.AsyncClient:
    # One client per act: acts are rare, and a kept one would belong to a single event loop. The server is
    # ours, so the environment's proxies do not apply.
    return httpx.AsyncClient(timeout=timeout, trust_env=False)


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code} {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:500]}"


def _why(process: ManagedProcess) -> str:
    """Cause, advice and last lines, as the rest of an error's message."""
    fault = find_fault(process.tail(400), process.exit_status)
    cause = f": {fault.line}\n{fault.advice}" if fault else ""
    return f"{cause}\nlast lines of {process.log}:\n{process.tail() or '(empty)'}"


def _report_death(log: Path, status: int) -> None:
    logger.error("vLLM ended with status %d; last lines of %s:\n%s", status, log, log_tail(log, 5))


def _connectable(host: str) -> str:
    """The address to connect to a server that listens on ``host``, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _reserved_port(config: EngineConfig) -> socket.socket:
    """A bound socket that keeps the port ours while vLLM, which binds with SO_REUSEPORT, gets ready.

    Raises:
        EngineError: the configured port is in use.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        # Asked for alone first: SO_REUSEPORT would share the port with a server that set it too.
        with socket.socket(family) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((config.host, config.port or 0))
        reserved = socket.socket(family)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((config.host, config.port or 0))
    except OSError as taken:
        raise EngineError(
            f"port {config.port} of {config.host} cannot be used: {taken.strerror}; end what listens there, "
            "or leave EngineConfig.port empty to get a free one"
        ) from taken
    return reserved
