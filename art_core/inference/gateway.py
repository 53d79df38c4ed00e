"""The gateway: an OpenAI-compatible reverse proxy that keeps every completion with its exact tokens.

Invariant: whatever goes through it is answered as the server behind it would answer, and what was sampled
can be had in process (``gateway.completions.take(key)``), over HTTP (``GET /captures/<key>``), or as steps
of a rollout (``/rollouts/<id>/v1/...``).

Any client works unchanged: only its base URL points here. It listens on a thread and event loop of its own.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import uvicorn
from prometheus_client import CollectorRegistry

from art_core.errors import ConfigError, EngineError
from art_core.inference.endpoint import PolicyEndpoint
from art_core.inference.gateway_app import GatewayApp
from art_core.inference.gateway_log import CompletionLog
from art_core.inference.gateway_metrics import GatewayMetrics
from art_core.inference.gateway_proxy import Proxy
from art_core.inference.gateway_routing import Replica, Router
from art_core.inference.gateway_sessions import Sessions
from art_core.inference.gateway_upstream import Upstream
from art_core.plain_http import SERVER_KEPT_SECONDS
from art_core.recording import Rollout, Sink

_BACKLOG = 4096
_STOP_SECONDS = 5


class Gateway:
    """The proxy, started and stopped; also a context manager.

    Args:
        upstream: a policy's endpoint, or the base URLs of one or more servers of the same policy; None, with
            ``router``, passes names of models on as they are.
        host: address to listen on; loopback unless ``api_key`` is set and you know why not.
        port: port to listen on; 0 for any free one.
        max_connections: the most calls upstream at a time; further ones wait their turn.
        completions: where completions are kept until they are asked for.
        sink: where rollouts that are created over HTTP are kept; None: the endpoint's sink, or nowhere.
        api_key: demanded of every client as the bearer token; None demands none.
        router: the servers, where they are somebody else's to watch over; None: those of ``upstream``.
        patience: seconds that a call waits for a replica to come up, when somebody watches over them.

    Attributes:
        metrics: what ``/metrics`` shows beside the gateway's own counts; register collectors there.
    """

    def __init__(
        self,
        upstream: PolicyEndpoint | str | Sequence[str] | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_connections: int = 256,
        completions: CompletionLog | None = None,
        sink: Sink | None = None,
        api_key: str | None = None,
        router: Router | None = None,
        patience: float = 0.0,
    ) -> None:
        if isinstance(upstream, str):
            upstream = [upstream]
        self._endpoint = None if isinstance(upstream, Sequence) else upstream
        self._router = router or _router_over(upstream)
        self._patience = patience
        self._host = host
        self._port = port
        self._max_connections = max_connections
        self._api_key = api_key
        self.completions = CompletionLog() if completions is None else completions
        if sink is None and self._endpoint is not None:
            sink = self._endpoint.sink
        self.metrics = CollectorRegistry()
        self._sessions = Sessions(sink)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen; returns once it answers.

        Raises:
            EngineError: the address cannot be listened on.
        """
        if self._thread is not None:
            return self
        listening = self._listen()
        upstream = Upstream(
            self._router,
            self._endpoint,
            max_connections=self._max_connections,
            patience=self._patience,
            keep_key=self._api_key is None,
        )
        proxy = Proxy(upstream, self.completions, GatewayMetrics(upstream, self.completions, self.metrics))
        app = GatewayApp(proxy, self._sessions, api_key=self._api_key)
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="critical",  # a stream that the server cut ends without its end: no error of ours
            backlog=_BACKLOG,
            timeout_keep_alive=SERVER_KEPT_SECONDS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        server = self._server = uvicorn.Server(config)

        async def serve() -> None:
            try:
                await server.serve([listening])
            finally:
                await upstream.close()

        def run() -> None:
            with asyncio.Runner(
                loop_factory=config.get_loop_factory()
            ) as runner:  # uvloop where it is installed
                runner.run(serve())

        self._thread = threading.Thread(target=run, name="art-gateway", daemon=True)
        self._thread.start()
        self.completions.url = self.url
        return self

    def _listen(self) -> socket.socket:
        """A socket that takes connections from now on; they wait until the server is up."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # The protocol is named because asyncio sends small packets at once (TCP_NODELAY) only where it is.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
            listening.listen(_BACKLOG)
        except OSError as taken:
            listening.close()
            raise EngineError(
                f"the gateway cannot listen on {self._host}:{self._port} ({taken.strerror}); "
                "choose another port, or 0 for any"
            ) from taken
        self._port = listening.getsockname()[1]
        return listening

    def close(self) -> None:
        """Stop; calls under way are ended. Closing twice does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self.completions.url = None
            self._thread.join(_STOP_SECONDS + 5)
            self._server = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what users ask ----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The gateway's root. Valid after `start`."""
        return f"http://{self._host}:{self._port}"

    @property
    def base_url(self) -> str:
        """What a client's base URL must be."""
        return f"{self.url}/v1"

    def register(self, rollout: Rollout) -> str:
        """Record what comes under a prefix into a rollout of this process, until it ends.

        Returns:
            The base URL for its clients.
        """
        self._sessions.register(rollout)
        return f"{self.url}/rollouts/{rollout.id}/v1"


def _router_over(upstream: PolicyEndpoint | Sequence[str] | None) -> Router:
    if upstream is None or (isinstance(upstream, Sequence) and not upstream):
        raise ConfigError("Gateway: upstream names no server; give a policy, or base URLs that end in /v1")
    urls = list(upstream) if isinstance(upstream, Sequence) else [upstream.base_url]
    return Router([Replica(str(number), url.rstrip("/")) for number, url in enumerate(urls)])
