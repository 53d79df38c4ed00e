"""Where a policy answers, and which version of it answers now.

Invariant: a version that is leased is not retired.

Chat models hold an endpoint, never a version: which version a call goes to is decided when the call
is made.
"""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from art_core.errors import EngineError
from art_core.inference.availability import ALWAYS, Availability
from art_core.inference.probing import ProbedAvailability
from art_core.recording import NullSink, Sink
from art_core.types import PolicyVersion


class PolicyEndpoint(Protocol):
    """What a chat model needs to call a policy and to record what it said."""

    @property
    def name(self) -> str:
        """The policy's name, without a version."""
        ...

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible server, ending in ``/v1``."""
        ...

    @property
    def api_key(self) -> str:
        """Sent as the bearer token; any text where the server asks for none."""
        ...

    @property
    def sink(self) -> Sink:
        """Where rollouts of this policy are kept."""
        ...

    def current_version(self) -> PolicyVersion:
        """The newest version that is served."""
        ...

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        """Hold a version (None: the current one) for the length of a call or of a rollout."""
        ...


@runtime_checkable
class NamesVersions(Protocol):
    """An endpoint whose server may know a version by another name."""

    def wire_name(self, version: PolicyVersion) -> str:
        """The name to send as ``model``."""
        ...


class VersionLeases:
    """Counts who uses which version, so that none is retired under a running call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[PolicyVersion] = Counter()
        self._closed: set[PolicyVersion] = set()

    def open(self, version: PolicyVersion) -> None:
        """It is served: it can be leased."""
        with self._lock:
            self._closed.discard(version)

    def close(self, version: PolicyVersion) -> bool:
        """Lease it to nobody any more; False, and nothing changes, while somebody holds it."""
        with self._lock:
            if self._held[version]:
                return False
            del self._held[version]
            self._closed.add(version)
            return True

    @contextmanager
    def lease(self, version: PolicyVersion) -> Generator[PolicyVersion]:
        """Hold a version inside the block.

        Raises:
            EngineError: it was served once, and is not any more.
        """
        with self._lock:
            if version in self._closed:
                raise EngineError(
                    f"{version} is not served any more: a newer version has taken its place; "
                    f"model.aserve({version.number}) serves it again"
                )
            self._held[version] += 1
        try:
            yield version
        finally:
            with self._lock:
                self._held[version] -= 1
                if not self._held[version]:
                    del self._held[version]

    def held(self, version: PolicyVersion) -> int:
        """How many hold it now."""
        with self._lock:
            return self._held[version]


class StaticEndpoint:
    """A server that somebody else runs: a fixed address and a fixed version.

    Args:
        base_url: ending in ``/v1``.
        model: the name to send; ``<model>@<n>`` is read as a version, any other name as version 0 of it.
        api_key: sent as the bearer token.
        sink: where rollouts are kept.
        temperature: for calls that name none of their own; None: the server's default.
        patience: seconds that calls wait for the server to come back when it does not answer; for one that
            somebody restarts when it dies.
        raw_logprobs: whether its log-probabilities are the model's own, before temperature (stock vLLM's
            are); steps that were sampled at other temperatures than 1 are then trained without them.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "none",
        sink: Sink | None = None,
        temperature: float | None = None,
        patience: float = 0.0,
        raw_logprobs: bool = False,
    ) -> None:
        self.base_url = base_url
        self.temperature = temperature
        self.raw_logprobs = raw_logprobs
        self.availability: Availability = (
            ProbedAvailability(base_url, model, api_key=api_key, patience=patience) if patience else ALWAYS
        )
        self.api_key = api_key
        self.sink: Sink = sink or NullSink()
        self._served_name = model
        self._version = PolicyVersion.parse(model) or PolicyVersion(model, 0)
        self._leases = VersionLeases()

    @property
    def name(self) -> str:  # noqa: D102 - the protocol says it
        return self._version.model

    def wire_name(self, version: PolicyVersion) -> str:  # noqa: D102
        return self._served_name

    def current_version(self) -> PolicyVersion:  # noqa: D102
        return self._version

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:  # noqa: D102
        return self._leases.lease(version or self._version)


def served_name(endpoint: PolicyEndpoint, version: PolicyVersion) -> str:
    """The name to send as ``model``: servers that somebody else runs may know a policy by another name."""
    return endpoint.wire_name(version) if isinstance(endpoint, NamesVersions) else version.name


def temperature_of(endpoint: PolicyEndpoint) -> float | None:
    """What calls that name no temperature of their own are to ask for; None: nothing.

    Endpoints whose temperature can be turned while a run goes on have it as ``temperature``.
    """
    turned: float | None = getattr(endpoint, "temperature", None)
    return turned


def raw_logprobs_of(server: Any) -> bool:
    """Whether an endpoint's or engine's log-probabilities are known to be the model's own: see `Step`.

    Those that know have it as ``raw_logprobs``.
    """
    raw: bool = getattr(server, "raw_logprobs", False)
    return raw
