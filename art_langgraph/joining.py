"""Joining a call with the completion that a gateway kept of it.

Invariant: a call whose key is known is recorded exactly once: with the completion's tokens, or as text
that says why they could not be had; the graph never waits for it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from art_core.errors import CaptureError
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_client import GatewayClient
from art_core.inference.gateway_log import Completion, CompletionLog, RecordedElsewhereError
from art_core.recording import Rollout
from art_core.types import Step
from art_langgraph.attribution import keep
from art_langgraph.calls import OpenCall

logger = logging.getLogger(__name__)

Otherwise = Callable[[str], Sequence[Step]]
"""The steps of a call without its completion, for a reason."""


def record(call: OpenCall, steps: Callable[[], Sequence[Step]]) -> None:
    """Record the steps of a call into its rollout; faults are counted there."""
    keep(call.rollout, call.model, lambda _: steps())


class GatewayJoin:
    """Finds completions by key. Thread-safe.

    Args:
        gateway: the gateway, or its URL where it runs in another process; None: a key says which gateway
            of this process it belongs to, and else the model's base URL is asked.
        api_key: of a gateway in another process.
    """

    def __init__(self, gateway: Gateway | str | None, *, api_key: str | None) -> None:
        self._log = gateway.completions if isinstance(gateway, Gateway) else None
        self._url = gateway if isinstance(gateway, str) else None
        self._api_key = api_key
        self._lock = threading.Lock()
        self._fetches: dict[Future[Completion], Rollout] = {}
        self._clients: dict[str, GatewayClient] = {}
        self._warned = False

    def completion(self, call: OpenCall, key: str, otherwise: Otherwise) -> None:
        """Record the completion under a key; at once when it is in this process."""
        log = self._log or CompletionLog.of(key)
        if log is not None:
            found: Future[Completion] = Future()
            try:
                found.set_result(log.take(key))
            except CaptureError as missing:
                found.set_exception(missing)
            self._found(call, otherwise, found)
            return
        url = self._url or call.base_url
        if url is None:
            missing = CaptureError(f"completion {key} is kept by a gateway whose address is not known")
            self._unjoined(call, missing, otherwise)
            return
        fetch = self._client(url).take(key)
        with self._lock:
            self._fetches[fetch] = call.rollout
        fetch.add_done_callback(partial(self._found, call, otherwise))

    def alike(self, call: OpenCall) -> Completion | None:
        """A completion of this process by what was said.

        A streamed answer that OpenAI's client could not parse ends without the chunk that carries the key.
        """
        messages, text = call.request.get("messages", ()), "".join(call.streamed)
        for log in (self._log,) if self._log is not None else CompletionLog.living():
            # The gateway's clock starts a moment after the call's.
            if (found := log.take_alike(messages, text, since=call.started_at)) is not None:
                return found
        return None

    def pending(self, rollout: Rollout) -> bool:
        """Whether completions of a rollout are still being fetched."""
        with self._lock:
            return any(owner is rollout for owner in self._fetches.values())

    def give_up(self, rollout: Rollout) -> None:
        """Stop fetching for a rollout; what has not begun is recorded as text now."""
        with self._lock:
            fetches = [fetch for fetch, owner in self._fetches.items() if owner is rollout]
        for fetch in fetches:
            fetch.cancel()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _found(self, call: OpenCall, otherwise: Otherwise, found: "Future[Completion]") -> None:
        try:
            completion = found.result()
        except RecordedElsewhereError:
            call.rollout.count_fault("recorded_by_prefix")
        except CaptureError as missing:
            self._unjoined(call, missing, otherwise)
        except CancelledError:
            self._unjoined(
                call, CaptureError("the gateway had not answered when the rollout ended"), otherwise
            )
        else:
            record(call, lambda: completion.steps(call.rollout.id, call.identity))
        finally:
            with self._lock:
                self._fetches.pop(found, None)

    def _unjoined(self, call: OpenCall, missing: CaptureError, otherwise: Otherwise) -> None:
        call.rollout.count_fault("unjoined_completions")
        if not self._warned:
            self._warned = True
            logger.warning("a call could not be joined with its tokens: %s (said once)", missing)
        record(call, lambda: otherwise(f"no token ids: {missing}"))

    def _client(self, url: str) -> GatewayClient:
        with self._lock:
            if url not in self._clients:
                self._clients[url] = GatewayClient(url, api_key=self._api_key)
            return self._clients[url]
