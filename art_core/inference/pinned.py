"""One version of a policy, as an endpoint of its own.

Invariant: while it is open, its version is served and not retired; calls through it go to that version,
whatever is published meanwhile.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Self

from art_core.inference.availability import Availability, availability_of
from art_core.inference.endpoint import PolicyEndpoint, raw_logprobs_of, served_name
from art_core.recording import Sink
from art_core.sync import run_sync
from art_core.types import PolicyVersion


class PinnedEndpoint:
    """What `TrainableModel.aserve` gives: ``ChatART(endpoint)`` asks this version.

    Also a context manager, sync and async, which closes it.

    Args:
        endpoint: where the policy answers.
        version: the version, which is served and held.
        close: lets it go.
    """

    def __init__(
        self, endpoint: PolicyEndpoint, version: PolicyVersion, close: Callable[[], Awaitable[None]]
    ) -> None:
        self._endpoint = endpoint
        self._close = close
        self._open = True
        self.version = version

    @property
    def name(self) -> str:  # noqa: D102 - the protocol says it
        return self._endpoint.name

    @property
    def base_url(self) -> str:  # noqa: D102
        return self._endpoint.base_url

    @property
    def api_key(self) -> str:  # noqa: D102
        return self._endpoint.api_key

    @property
    def sink(self) -> Sink:  # noqa: D102
        return self._endpoint.sink

    @property
    def raw_logprobs(self) -> bool:  # noqa: D102
        return raw_logprobs_of(self._endpoint)

    @property
    def availability(self) -> Availability:  # noqa: D102
        return availability_of(self._endpoint)

    def wire_name(self, version: PolicyVersion) -> str:  # noqa: D102
        return served_name(self._endpoint, version)

    def current_version(self) -> PolicyVersion:  # noqa: D102
        return self.version

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:  # noqa: D102
        return self._endpoint.lease(version or self.version)

    async def aclose(self) -> None:
        """Let the version go: it is retired unless it is needed otherwise. Closing twice does nothing."""
        if self._open:
            self._open = False
            await self._close()

    def close(self) -> None:
        """Let the version go; see `aclose`."""
        run_sync(self.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
