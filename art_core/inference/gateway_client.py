"""Completions of a gateway in another process, fetched by key.

Invariant: a completion is fetched at most once and read whole, or the error says which gateway did not
give it; fetching never blocks who asks.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from art_core.errors import CaptureError
from art_core.inference.gateway_log import Completion, RecordedElsewhereError

_CONNECTIONS = 8
_SECONDS = 10.0


class GatewayClient:
    """A gateway, seen from afar. Threads are started when first needed.

    Args:
        url: the gateway's root, with or without ``/v1``.
        api_key: sent as the bearer token where the gateway wants one.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        address = httpx.URL(self.url)
        self._http = httpx.Client(
            headers=headers,
            # Loading the certificates takes 19 ms, for every rollout, and plain HTTP asks for none.
            verify=address.scheme == "https",
            timeout=_SECONDS,
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            trust_env=address.host not in ("127.0.0.1", "localhost", "::1"),
        )
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="art-gateway-client")

    def take(self, key: str) -> "Future[Completion]":
        """Fetch a completion.

        The future raises `CaptureError`: there is none under this key, or the gateway cannot be reached.
        """
        return self._threads.submit(self._read, key)

    def close(self) -> None:
        """Take no more requests, and close the connections once those under way have ended."""
        self._threads.submit(self._http.close)
        self._threads.shutdown(wait=False)

    def _read(self, key: str) -> Completion:
        try:
            answer = self._get(f"{self.url}/captures/{key}")
        except httpx.HTTPError as down:
            raise CaptureError(
                f"the gateway at {self.url} did not answer ({type(down).__name__}: {down}); "
                "its completions cannot be joined"
            ) from down
        if answer.status_code == 409:
            raise RecordedElsewhereError(answer.text)
        if answer.status_code != 200:
            raise CaptureError(
                f"the gateway at {self.url} answered {answer.status_code}: {answer.text[:300]}"
            )
        return Completion.from_json(answer.content)

    def _get(self, url: str) -> httpx.Response:
        try:
            return self._http.get(url)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            # The gateway closed an idle connection in the moment in which it was used again.
            return self._http.get(url)
