"""Joining a call with the completion that a gateway kept of it.

Invariant: a call whose key is known is recorded exactly once: with the completion's tokens, or as text
that says why they could not be had; the graph never waits for it.
"""

import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID
from weakref import WeakSet

from art_core.errors import CaptureError
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_client import GatewayClient
from art_core.inference.gateway_log import (
    Completion,
    CompletionLog,
    RecordedElsewhereError,
    conversation_digest,
)
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


_joins: "WeakSet[GatewayJoin]" = WeakSet()
_joins_lock = threading.Lock()


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
        self._open: dict[UUID, OpenCall] = {}
        self._unread: list[tuple[OpenCall, str]] = []
        self._clients: dict[str, GatewayClient] = {}
        self._warned = False
        with _joins_lock:
            _joins.add(self)

    def opened(self, call: OpenCall) -> None:
        """A call has started: it may come with a key, until `closing` is left."""
        with self._lock:
            self._open[call.run_id] = call

    @contextmanager
    def closing(self, call: OpenCall) -> Generator[None]:
        """A call has ended, and comes for its completion inside, if it does."""
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(call.run_id, None)

    def expects(self, conversation: str) -> float:
        """When the first call of this conversation began that may still come with its key; else infinity.

        Args:
            conversation: `conversation_digest` of its messages.
        """
        with self._lock:
            calls = tuple(self._open.values())
        began = (
            call.started_at
            for call in calls
            if conversation_digest(call.request.get("messages", ())) == conversation
        )
        return min(began, default=math.inf)

    def completion(self, call: OpenCall, key: str, otherwise: Otherwise) -> None:
        """Record the completion under a key; at once when it is in this process."""
        log = CompletionLog.of(key) if self._log is None else self._log
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

    def unread(self, call: OpenCall, problem: str) -> None:
        """A streamed answer could not be read to its end, where the key is; look for it by what was said.

        The gateway may still be reading it, so the answer is looked for until the rollout ends.
        """
        if self._log is None and CompletionLog.at(call.base_url) is None:
            record(call, lambda: call.failed(problem))
            return
        with self._lock:
            self._unread.append((call, problem))

    def fetching(self, rollout: Rollout) -> bool:
        """Whether completions of a rollout, whose keys are known, have been asked for and have not come."""
        with self._lock:
            return any(owner is rollout for owner in self._fetches.values())

    def pending(self, rollout: Rollout) -> bool:
        """Whether completions of streams that broke off are still to come; takes those that are there."""
        with self._lock:
            unread = [entry for entry in self._unread if entry[0].rollout is rollout]
        waiting = False
        for entry in unread:
            if (found := self._alike(entry[0])) is not None:
                self._settle(entry, found)
            else:
                waiting = True
        return waiting

    def give_up(self, rollout: Rollout) -> None:
        """Record for a rollout, without their tokens, the calls whose completions have not come."""
        with self._lock:
            fetches = [fetch for fetch, owner in self._fetches.items() if owner is rollout]
            unread = [entry for entry in self._unread if entry[0].rollout is rollout]
        for fetch in fetches:
            fetch.cancel()
        for entry in unread:
            self._settle(entry, None)

    def _settle(self, entry: tuple[OpenCall, str], found: Completion | None) -> None:
        call, problem = entry
        with self._lock:
            if entry not in self._unread:
                return
            self._unread.remove(entry)
        if found is None or found.error is not None:
            record(call, lambda: call.failed(problem))
        else:
            record(call, lambda: found.steps(call.rollout.id, call.identity))

    def _alike(self, call: OpenCall) -> Completion | None:
        log = CompletionLog.at(call.base_url) if self._log is None else self._log
        messages: Any = call.request.get("messages", ())
        if log is None:
            return None
        conversation = conversation_digest(messages)
        with _joins_lock:
            joins = tuple(_joins)
        others = min((join.expects(conversation) for join in joins), default=math.inf)
        text = "".join(call.streamed)
        return log.take_alike(messages, text, since=call.started_at, whole_before=others)

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
