"""A uvicorn server in a thread, on a port of ours.

Invariant: after `start` the port answers; after `stop` it is free.
"""

import asyncio
import socket
import threading

import uvicorn
from fastapi import FastAPI

from art_core.errors import EngineError
from art_core.plain_http import SERVER_KEPT_SECONDS


class ServerThread:
    """Serves an ASGI application until stopped.

    Args:
        app: what to serve.
        host: address to listen on.
        port: None for any free one.
    """

    def __init__(self, app: FastAPI, host: str, port: int | None) -> None:
        self._host = host
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=SERVER_KEPT_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="embedded-http", daemon=True)

    @property
    def url(self) -> str:
        """The root address."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def start(self, timeout: float) -> None:
        """Listen.

        Raises:
            EngineError: it did not begin within ``timeout`` seconds.
        """
        self._thread.start()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while not self._server.started:
            if not self._thread.is_alive() or loop.time() > end:
                raise EngineError(f"the embedded engine's HTTP server did not start on {self.url}")
            await asyncio.sleep(0.005)

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        """End open connections after at most ``timeout`` seconds, and free the port."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout)
            self._server.force_exit = True
            self._thread.join(timeout)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
        listener.listen(2048)
    except OSError as busy:
        listener.close()
        raise EngineError(
            f"cannot listen on {host}:{port or 'any port'} ({busy.strerror}); another program may use the "
            "port: end it, set another EngineConfig.port, or leave it out to take any free one"
        ) from busy
    return listener
