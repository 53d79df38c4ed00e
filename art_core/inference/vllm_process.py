"""One life of a vLLM server: its process, its address, and what it answers to us.

Invariant: whoever holds a `VLLMProcess` can tell a server that refuses from one that is gone: the first is an
`EngineError` in vLLM's words, the second a `ServerGoneError` with the last lines of the log.

`launch` starts the process; `wait_until_it_answers` returns once it serves; the rest are single requests to a
server that does. Nothing here starts it again: that is the engine's to decide.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.availability import HELD_TOO_LONG
from art_core.inference.engine import EngineHealth
from art_core.inference.processes import ManagedProcess, log_tail
from art_core.inference.vllm_command import InstalledVLLM, server_environment, sleeps
from art_core.inference.vllm_compat import PAUSE, RESUME
from art_core.inference.vllm_faults import find_fault
from art_core.inference.vllm_plugin import OWNER_HEADERS, STATUS_PATH, plugged_in, with_door
from art_core.inference.vllm_start import READY, StartProgress, find_phase

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""How often a starting server is asked whether it answers."""
PHASE_LINES = 100
"""How far back a starting server's log is read for what it does."""
STEER_TIMEOUT = 120.0
"""Seconds that loading an adapter or another act of ours may take."""


class ServerGoneError(EngineError):
    """The server did not answer: it died, hangs, or the connection broke."""


class _Tell(Protocol):
    def __call__(self, phase: str | None, *, ended: bool) -> None: ...


class VLLMProcess:
    """A server that was started.

    Args:
        process: its process.
        root: its address, without ``/v1``.
    """

    def __init__(self, process: ManagedProcess, root: str) -> None:
        self.process = process
        self.root = root
        self.encoding = "standard"

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        installed: InstalledVLLM,
        config: EngineConfig,
        *,
        port: int,
        log_dir: Path,
        on_exit: Callable[[], None],
    ) -> "VLLMProcess":
        """Start the process; it does not answer yet.

        Args:
            arguments: the command line.
            installed: the vLLM to run.
            config: how to serve.
            port: that it listens on.
            log_dir: takes its log file.
            on_exit: called from a thread when it ends without having been closed.

        Raises:
            EngineError: the program cannot be run.
        """
        log = _new_log(log_dir, port)
        logger.info("starting vLLM %s on port %d, log in %s", installed.version, port, log)
        env = server_environment(installed, config, os.environ)
        if config.packed_tokens:
            arguments, env = plugged_in(arguments, env)
        if config.publish == "merged" or sleeps(installed, config):
            arguments, env = with_door(arguments, env)
        process = ManagedProcess(
            arguments,
            env=env,
            log=log,
            on_exit=partial(_report_death, log, on_exit),
        )
        return cls(process, f"http://{_connectable(config.host)}:{port}")

    async def wait_until_it_answers(
        self, name: str, timeout: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        """Return once it serves the model of this name.

        Raises:
            EngineError: it ended, did not answer within ``timeout`` seconds, or is not our server.
        """
        started = time.monotonic()

        def tell(phase: str | None, *, ended: bool) -> None:
            if on_progress is not None:
                tail = self.process.tail(PHASE_LINES)
                on_progress(
                    StartProgress(
                        phase or find_phase(tail),
                        time.monotonic() - started,
                        tail.rpartition("\n")[2],
                        self.process.log,
                        ended,
                    )
                )

        try:
            await self._wait(name, timeout, started, tell)
        except BaseException:
            tell(None, ended=True)
            raise
        tell(READY, ended=True)

    async def _wait(self, name: str, timeout: float, started: float, tell: "_Tell") -> None:
        async with _client(timeout=5.0) as client:
            while True:
                seconds = time.monotonic() - started
                if self.process.exit_status is not None:
                    raise EngineError(
                        f"vLLM {self.process.describe_exit()} after {seconds:.0f} s" + self.why()
                    )
                if await self._serves(client, name):
                    self.encoding = await self._encoding(client)
                    return
                if seconds > timeout:
                    raise EngineError(
                        f"vLLM did not answer within EngineConfig.start_timeout={timeout:g} s" + self.why()
                    )
                tell(None, ended=False)
                await asyncio.sleep(POLL_SECONDS)

    async def _serves(self, client: httpx.AsyncClient, name: str) -> bool:
        try:
            response = await client.get(f"{self.root}/v1/models")
        except httpx.TransportError:
            return False
        if response.status_code != 200:
            return False
        names = _names(response)
        if name not in names:
            raise EngineError(
                f"{self.root} is answered by another server, which serves {sorted(names)}; "
                "leave EngineConfig.port empty to get a free port"
            )
        return True

    async def _encoding(self, client: httpx.AsyncClient) -> str:
        """In which form exact tokens come; a server without our plugin does not know the question."""
        try:
            response = await client.get(f"{self.root}{STATUS_PATH}")
            said = response.json() if response.status_code == 200 else {}
        except (httpx.TransportError, ValueError):
            said = {}
        encoding = str(said.get("encoding", "standard"))
        logger.info("vLLM at %s sends exact tokens %s %s", self.root, encoding, said.get("detail", ""))
        return encoding

    async def names(self) -> dict[str, str]:
        """The models that it says it has, adapters included, and where it loaded each from.

        Raises:
            ServerGoneError: it does not answer.
            EngineError: it answers with an error.
        """
        response = await self._request("GET", "/v1/models", None, "list its models", 10.0)
        return _names(response)

    async def metrics(self) -> str:
        """What it tells Prometheus; empty if nothing.

        Raises:
            ServerGoneError: it does not answer.
        """
        try:
            return (await self._request("GET", "/metrics", None, "tell its metrics", 10.0)).text
        except ServerGoneError:
            raise
        except EngineError:  # switched off
            return ""

    async def steer(
        self, path: str, body: dict[str, Any] | None, what: str, timeout: float | None = STEER_TIMEOUT
    ) -> None:
        """Ask it to do something.

        Args:
            path: of the request, with its query.
            body: of the request, as JSON.
            what: the words that say it, after "vLLM did not".
            timeout: seconds to wait for its answer; None: for as long as it takes.

        Raises:
            ServerGoneError: it does not answer.
            EngineError: it refuses; the message is its own.
        """
        await self._request("POST", path, body, what, timeout)

    async def ask(
        self, path: str, body: dict[str, Any], what: str, timeout: float | None = STEER_TIMEOUT
    ) -> Any:
        """Ask it something; its answer, as JSON. Arguments and errors are those of `steer`."""
        return (await self._request("POST", path, body, what, timeout)).json()

    async def pause(self) -> None:
        """Have it end its requests and hold new ones; raises what `steer` raises."""
        await self.steer(PAUSE, None, "pause", timeout=None)

    async def resume(self) -> None:
        """Have it take requests again; raises what `steer` raises."""
        await self.steer(RESUME, None, "resume")

    async def shut_door(self, patience: float, *, within: float | None = None) -> None:
        """Have it hold new requests before its engine, and return when those inside have ended.

        Args:
            patience: seconds that each new one waits at most.
            within: seconds that those inside may take; None: as long as they do.

        Raises what `steer` raises.
        """
        held = {"seconds": patience, "why": HELD_TOO_LONG}
        await self.steer("/art/version/hold", held, "end its requests", within)

    async def open_door(self) -> None:
        """Let requests in again; raises what `steer` raises."""
        await self.steer("/art/version/release", None, "let requests in")

    async def load(self, name: str, adapter_dir: Path) -> None:
        """Have it load an adapter; one that it has under this name from this directory is left as it is.

        Raises:
            ServerGoneError: it does not answer.
            EngineError: it refuses.
        """
        path = str(adapter_dir.resolve())
        try:
            await self.steer(
                "/v1/load_lora_adapter",
                {"lora_name": name, "lora_path": path},
                f"load adapter {adapter_dir} as {name}",
            )
        except ServerGoneError:
            raise
        except EngineError:
            # Asked for once before, perhaps, and only the answer was lost.
            if (await self.names()).get(name) != path:
                raise

    async def unload(self, name: str) -> None:
        """Have it forget an adapter, if it has it.

        Raises:
            ServerGoneError: it does not answer.
            EngineError: it refuses.
        """
        try:
            await self.steer("/v1/unload_lora_adapter", {"lora_name": name}, f"unload {name}")
        except ServerGoneError:
            raise
        except EngineError:
            if name in await self.names():
                raise

    async def health(self, timeout: float) -> EngineHealth:
        """Whether it answers; if not, what is wrong and the last lines of its log."""
        if self.process.exit_status is not None:
            return EngineHealth(ok=False, detail=f"vLLM {self.process.describe_exit()}" + self.why())
        try:
            async with _client(timeout=timeout) as client:
                response = await client.get(f"{self.root}/health")
        except httpx.TransportError as silent:
            return EngineHealth(
                ok=False, detail=f"vLLM at {self.root} does not answer: {silent!r}" + self.why()
            )
        if response.status_code == 200:
            return EngineHealth(ok=True, encoding=self.encoding)
        return EngineHealth(ok=False, detail=f"vLLM at {self.root} says {response.status_code}" + self.why())

    def why(self) -> str:
        """Cause, advice and last lines, as the rest of an error's message."""
        fault = find_fault(self.process.tail(400), self.process.exit_status)
        cause = f": {fault.line}\n{fault.advice}" if fault else ""
        return f"{cause}\nlast lines of {self.process.log}:\n{self.process.tail() or '(empty)'}"

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, what: str, timeout: float | None
    ) -> httpx.Response:
        if self.process.exit_status is not None:
            raise ServerGoneError(f"vLLM {self.process.describe_exit()}" + self.why())
        try:
            async with _client(timeout=timeout) as client:
                response = await client.request(method, self.root + path, json=body, headers=OWNER_HEADERS)
        except httpx.TransportError as failed:
            raise ServerGoneError(f"vLLM did not {what}: {failed!r}" + self.why()) from failed
        if response.status_code != 200:
            raise EngineError(f"vLLM did not {what}: {_message(response)}")
        return response


def reserved_port(config: EngineConfig) -> socket.socket:
    """A bound socket that keeps the port ours while no server of ours has it.

    vLLM binds with SO_REUSEPORT; a socket that is bound and does not listen gets no connections.

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


def _client(timeout: float | None) -> httpx.AsyncClient:
    # One client per act: acts are rare, and a kept one would belong to a single event loop. The server is
    # ours, so the environment's proxies do not apply.
    # It speaks plain HTTP: certificates, which take 20 ms to load, would be for nothing.
    return httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False)


def _names(response: httpx.Response) -> dict[str, str]:
    return {str(card.get("id")): str(card.get("root")) for card in response.json().get("data", [])}


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code} {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:500]}"


def _new_log(log_dir: Path, port: int) -> Path:
    """A file for one start: two within a second do not share it."""
    stem = f"vllm-{time.strftime('%Y%m%d-%H%M%S')}-{port}"
    path, again = log_dir / f"{stem}.log", 1
    while path.exists():
        again += 1
        path = log_dir / f"{stem}-{again}.log"
    return path


def _report_death(log: Path, on_exit: Callable[[], None], status: int) -> None:
    logger.error("vLLM ended with status %d; last lines of %s:\n%s", status, log, log_tail(log, 5))
    on_exit()


def _connectable(host: str) -> str:
    """The address to connect to a server that listens on ``host``, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
