"""Availability of a server that another process watches over, by asking the server itself.

Invariant: after a failure nothing is sent again before the server answers and serves the model that is asked
for.

When it answers at once, a dropped connection, or an answer that knew nothing of the model, may mean that it
was restarted before anybody looked: then the request is sent again. Any other failure, such as a timeout, is
the client's own affair.
"""

import asyncio
import logging
import time
from collections.abc import Generator
from typing import Any

import httpx

from art_core.errors import EngineError

logger = logging.getLogger(__name__)

PROBE_SECONDS = 0.5
"""How often a server that is down is asked again."""
ANSWER_SECONDS = 5.0
"""How long it may take to say which models it serves."""


class ProbedAvailability:
    """For clients in another process than the engine: they know its address, and that it comes back.

    Args:
        base_url: ending in ``/v1``.
        model: the name that is asked for.
        api_key: sent as the bearer token.
        patience: seconds to wait for it to come back.
    """

    def __init__(self, base_url: str, model: str, *, api_key: str, patience: float) -> None:
        self._url = f"{base_url}/models"
        self._model = model
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._patience = patience

    def ready(self) -> int:
        """Requests can always be tried."""
        return 0

    async def aready(self) -> int:
        """Requests can always be tried."""
        return 0

    def lost(self, life: int, *, looks_restarted: bool = False) -> bool:
        """Wait until the server answers; whether it may have been restarted: the request can be sent again.

        Raises:
            EngineError: it does not come back in time.
        """
        steps = self._steps(looks_restarted)
        next(steps)
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False, headers=self._headers) as client:
            while True:
                try:
                    well = self._serves(client.get(self._url))
                except httpx.TransportError:
                    well = False
                try:
                    steps.send(well)
                except StopIteration as verdict:
                    return verdict.value
                time.sleep(PROBE_SECONDS)

    async def alost(self, life: int, *, looks_restarted: bool = False) -> bool:
        """The same for tasks."""
        steps = self._steps(looks_restarted)
        next(steps)
        async with httpx.AsyncClient(
            timeout=ANSWER_SECONDS, trust_env=False, headers=self._headers
        ) as client:
            while True:
                try:
                    well = self._serves(await client.get(self._url))
                except httpx.TransportError:
                    well = False
                try:
                    steps.send(well)
                except StopIteration as verdict:
                    return verdict.value
                await asyncio.sleep(PROBE_SECONDS)

    def _serves(self, answer: httpx.Response) -> bool:
        try:
            cards: Any = answer.json()["data"]
            return answer.status_code == 200 and any(card["id"] == self._model for card in cards)
        except (ValueError, LookupError, TypeError):
            return False

    def _steps(self, looks_restarted: bool) -> Generator[None, bool, bool]:
        """Is sent what each probe found; returns whether the server was away, or may have been."""
        deadline = time.monotonic() + self._patience
        if (yield):
            return looks_restarted
        logger.info("%s does not answer for %s; waiting up to %g s", self._url, self._model, self._patience)
        while not (yield):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._url} did not serve {self._model} again within {self._patience:g} s; its owner's "
                    "log and events say why"
                )
        return True
