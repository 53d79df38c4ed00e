"""ExternalEngine: a server that somebody else runs, as an engine.

Invariant: what the server can do is found out when the engine starts, and said; what it cannot do is an error
when it is asked for, never something that seems to have worked.

Any OpenAI-compatible server answers; one that returns token ids and logprobs can be trained from; a vLLM that
loads adapters at run time can be published to. Adapters are not sent: the server reads them, so it must find
our checkpoint directory under the same path (a shared file system, or a volume mounted in both places).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from art_core.errors import EngineError
from art_core.inference.engine import EngineHealth
from art_core.inference.external_probe import (
    CANNOT_LOAD,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    Capabilities,
    models,
    probe,
)
from art_core.inference.gateway_transport import is_local
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

STEER_SECONDS = 120.0
"""How long loading an adapter may take."""

HEALTH_SECONDS = 5.0
"""How soon a server must say that it is well."""


class ExternalEngine:
    """Serves a policy from a server that is not ours to start or stop.

    Args:
        base_url: ending in ``/v1``.
        api_key: sent as the bearer token; None sends none.
        served_model: the policy's name; versions are ``<served_model>@<n>``.
        base_model: what the server may call the base model, which is version 0.

    Raises:
        EngineError: the address is not one that ends in ``/v1``.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, served_model: str, base_model: str | None = None
    ) -> None:
        parts = urlsplit(base_url)
        self._base_url = base_url.rstrip("/")
        if parts.scheme not in ("http", "https") or not self._base_url.endswith("/v1"):
            raise EngineError(f"base_url={base_url!r}: expected an http(s) address that ends in /v1")
        self.api_key = api_key
        self._served_model = served_model
        self._wanted = [PolicyVersion(served_model, 0).name, served_model]
        if base_model is not None:
            self._wanted.append(base_model)
        self._base_name: str | None = None
        self._capabilities: Capabilities | None = None
        self._versions: list[PolicyVersion] = []

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``."""
        return self._base_url

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do.

        Raises:
            EngineError: before `start`.
        """
        if self._capabilities is None:
            raise EngineError(f"{self._base_url} was not asked yet what it can do; call start() first")
        return self._capabilities

    @property
    def raw_logprobs(self) -> bool:
        """Whether its log-probabilities are the model's own, or did not prove to be of what is sampled."""
        can = self._capabilities
        return can is not None and can.logprobs and not can.tempered_logprobs

    @property
    def base_name(self) -> str:
        """What the server calls the base model; valid after `start`."""
        return self.wire_name(PolicyVersion(self._served_model, 0))

    def wire_name(self, version: PolicyVersion) -> str:
        """The name to send as ``model``: the server calls the base model as it likes."""
        if version.number == 0 and self._base_name is not None:
            return self._base_name
        return version.name

    async def start(self) -> None:
        """Find out what the server can do, and say it.

        Raises:
            EngineError: it cannot be reached, refuses the key, or does not serve the base model.
        """
        async with self._client() as client:
            self._base_name, self._capabilities = await probe(client, self._base_url, self._wanted)
        can = self._capabilities
        logger.log(logging.WARNING if can.lacks else logging.INFO, "%s", can.describe(self._base_url))

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version from now on; the server reads the adapter from ``adapter_dir``.

        Raises:
            EngineError: it cannot load adapters, does not find this one, or refuses it.
        """
        if version.model != self._served_model:
            raise EngineError(f"{version}: this engine serves versions of {self._served_model!r}")
        if version in self._versions:
            raise EngineError(f"{version} was already published, and is still served; retire it first")
        can = self.capabilities
        if adapter_dir is None:
            if version.number != 0:
                raise EngineError(f"{version} without an adapter: the base model is version 0")
        else:
            if not can.load_adapters:
                raise EngineError(
                    f"{version} cannot be published: {self._base_url} ({can.server}) does not load adapters; "
                    f"{CANNOT_LOAD}. The adapter is in {adapter_dir}"
                )
            await self._load(version, adapter_dir.resolve())
        self._versions.append(version)

    async def _load(self, version: PolicyVersion, adapter_dir: Path) -> None:
        root = (await self._served()).get(version.name)
        if root == str(adapter_dir):
            return  # it outlived an earlier process of ours
        if root is not None:
            raise EngineError(
                f"{version} cannot be published: {self._base_url} serves {root} under that "
                "name, and vLLM keeps cached prefixes by name; unload it and restart the server, or give "
                "the policy another name"
            )
        body = {"lora_name": version.name, "lora_path": str(adapter_dir)}
        try:
            await self._steer(LOAD_ADAPTER, body, f"load {version}")
        except EngineError as refused:
            raise EngineError(
                f"{refused}. The server itself must be able to read {adapter_dir}: share that directory with "
                "it under the same path (LocalBackend(root=...) says where it lies)"
            ) from refused

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version. Requests that the server has accepted end on it.

        Raises:
            EngineError: it is not served, or the server refused.
        """
        if version not in self._versions:
            served = ", ".join(map(str, self._versions)) or "none"
            raise EngineError(f"{version} is not served; served: {served}")
        if version.number != 0 and version.name in await self._served():
            await self._steer(UNLOAD_ADAPTER, {"lora_name": version.name}, f"unload {version}")
        self._versions.remove(version)

    def versions(self) -> Sequence[PolicyVersion]:
        """What is served now, oldest first, without what `health` found the server to have lost."""
        return tuple(self._versions)

    async def pause(self) -> None:
        """Nothing: the machine is not the trainer's, and others may be using the server."""

    async def resume(self) -> None:
        """Nothing, as nothing was paused."""

    async def health(self) -> EngineHealth:
        """Whether the server answers, and still serves what was published to it."""
        try:
            served = await self._served(HEALTH_SECONDS)
        except EngineError as down:
            return EngineHealth(False, str(down))
        lost = [version for version in self._versions if self.wire_name(version) not in served]
        if lost:
            # It was restarted: a later publication of these is not a second one.
            self._versions = [version for version in self._versions if version not in lost]
            return EngineHealth(False, f"{self._base_url} has lost {', '.join(map(str, lost))}")
        return EngineHealth(True)

    async def close(self) -> None:
        """Give the server back as it was found: without the versions that were published to it."""
        if self._capabilities is None:
            return
        self._capabilities = None
        for version in tuple(self._versions):
            try:
                await self.retire(version)
            except EngineError as left:
                logger.warning("%s stays loaded: %s", version, left)
        self._versions.clear()

    # -- HTTP --------------------------------------------------------------------------------------

    async def _served(self, seconds: float = STEER_SECONDS) -> dict[str, str]:
        """What the server has, by name: where each was loaded from."""
        async with self._client() as client:
            cards = await models(client, self._base_url, seconds)
        return {str(card.get("id")): str(card.get("root")) for card in cards}

    async def _steer(self, path: str, body: Mapping[str, Any], what: str) -> None:
        url = self._base_url.removesuffix("/v1") + path
        try:
            async with self._client() as client:
                answer = await client.post(url, json=body, timeout=STEER_SECONDS)
        except httpx.TransportError as failed:
            raise EngineError(f"{self._base_url} did not {what}: {failed!r}") from failed
        if answer.status_code != 200:
            raise EngineError(f"{self._base_url} did not {what}: {answer.status_code} {answer.text[:500]}")

    def _client(self) -> httpx.AsyncClient:
        # One for each act: acts are rare, and a kept client would belong to a single event loop.
        return httpx.AsyncClient(
            headers={} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"},
            verify=self._base_url.startswith("https:"),  # else certificates are loaded for nothing
            trust_env=not is_local(self._base_url),
        )
