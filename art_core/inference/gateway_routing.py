"""Which replica answers a call: replicas, their states, and the choice between them.

Invariant: calls with one routing key go to one replica, as long as it is up, serves the version and is not
much busier than the others; so what a rollout has said before is in that replica's prefix cache.

Whoever knows how the replicas are (`ReplicaSet`, or the gateway's own probes) sets their states; the gateway
asks `Router.choose` for each call and counts it in and out.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, cast

from art_core.types import PolicyVersion

SPREAD = 1.25
"""How many times its fair share of the calls a replica may have before its calls go elsewhere."""

ALWAYS_TAKEN = 4
"""Calls that a replica has room for, whatever the others do: so few cost each other nothing."""


class ReplicaState(StrEnum):
    """Whether calls go to a replica."""

    UP = "up"
    """It answers."""
    DRAINING = "draining"
    """It answers what it has, and gets no new calls."""
    DOWN = "down"
    """It did not answer; it is asked again until it does."""


@dataclass(eq=False, slots=True)
class Replica:
    """One server.

    Attributes:
        name: what people and metrics call it.
        base_url: ending in ``/v1``.
        api_key: sent as the bearer token; None: what the policy's endpoint or the client sends.
        state: whether calls go to it.
        versions: the policy versions that it serves; None when that is not known, and it is asked for any.
        detail: why it is not up.
        lost: whether it will not come back.
        busy: calls under way.
        since: Unix time of its last change of state.
    """

    name: str
    base_url: str
    api_key: str | None = None
    state: ReplicaState = ReplicaState.UP
    versions: frozenset[PolicyVersion] | None = None
    detail: str = ""
    lost: bool = False
    busy: int = 0
    since: float = field(default_factory=time.time)

    def serves(self, version: PolicyVersion | None) -> bool:
        """Whether a call for this version can be answered here."""
        return version is None or self.versions is None or version in self.versions


class Router:
    """Chooses replicas. Thread-safe.

    A key's replicas are ranked by rendezvous hashing (Thaler and Ravishankar 1998), so one that goes away
    takes only its own keys elsewhere, and gets them back; the first of them whose load is bounded takes the
    call (Mirrokni, Thorup and Zadimoghaddam 2016, arXiv:1608.01350).

    Args:
        replicas: at least one.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self.on_suspect: Callable[[Replica], None] = _nothing
        """Told when calls found a replica down, from whatever thread made them."""
        self._lock = threading.Lock()

    def choose(
        self, version: PolicyVersion | None, key: Callable[[], str], tried: Collection[Replica] = ()
    ) -> Replica | None:
        """The replica for a call; None when none that is up can take it.

        Args:
            version: the policy version that is asked for; None for models that are not policies of ours.
            key: makes the routing key; called only where there is a choice.
            tried: replicas that have failed this call already.
        """
        if len(self.replicas) == 1:  # there is no choice, and this is done for every call
            (only,) = self.replicas
            return only if only.state is ReplicaState.UP and only not in tried else None
        if not any(replica.serves(version) for replica in self.replicas):
            version = None  # whoever is asked says that it does not know it
        able = [
            replica
            for replica in self.replicas
            if replica.state is ReplicaState.UP and replica.serves(version) and replica not in tried
        ]
        if len(able) < 2:
            return able[0] if able else None
        room = max(ALWAYS_TAKEN, math.ceil(SPREAD * (sum(r.busy for r in able) + 1) / len(able)))
        asked = key().encode()
        free = [replica for replica in able if replica.busy < room]
        return max(free, key=lambda replica: blake2b(asked, key=replica.name.encode()[:64]).digest())

    def last_resort(self, tried: Collection[Replica]) -> Replica | None:
        """The least busy replica that is not draining and was not tried, up or not."""
        left = [r for r in self.replicas if r.state is not ReplicaState.DRAINING and r not in tried]
        return min(left, key=lambda replica: replica.busy, default=None)

    def began(self, replica: Replica) -> None:
        """A call is under way."""
        with self._lock:
            replica.busy += 1

    def ended(self, replica: Replica) -> None:
        """A call that `began` is no more under way."""
        with self._lock:
            replica.busy -= 1

    def set_state(self, replica: Replica, state: ReplicaState, detail: str = "") -> bool:
        """Change a state; False when it was so already."""
        with self._lock:
            replica.detail = detail
            if replica.state is state:
                return False
            replica.state = state
            replica.since = time.time()
            return True

    def suspect(self, replica: Replica, reason: str) -> None:
        """A call found it down: it gets no more until somebody has found it up."""
        with self._lock:
            if replica.state is not ReplicaState.UP:
                return
            replica.state, replica.detail, replica.since = ReplicaState.DOWN, reason, time.time()
        self.on_suspect(replica)


def _nothing(_: Replica) -> None:
    pass


def routing_key(request: Mapping[str, Any]) -> str:
    """What calls that share a prefix have in common: how their conversation begins.

    OpenAI's ``prompt_cache_key`` says it outright; otherwise it is everything up to the first message of the
    user, so that all turns of a conversation, and all rollouts of one scenario, go to one replica.
    """
    given = request.get("prompt_cache_key")
    if isinstance(given, str) and given:
        return given
    messages: Any = request.get("messages")
    if not isinstance(messages, list):
        return str(request.get("prompt"))[:1024]
    said: list[str] = []
    for message in cast(list[Any], messages):
        said.append(str(message))
        if isinstance(message, Mapping) and cast(Mapping[str, Any], message).get("role") == "user":
            break
    return "".join(said)
