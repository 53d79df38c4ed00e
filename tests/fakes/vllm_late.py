"""A fake vLLM that has just begun: in the first request it does not know its model, though it lists it."""

from typing import Any

from fakes.vllm_server import FakeVLLM


class LateVLLM(FakeVLLM):
    """The server."""

    async def _respond(self, method: str, path: str, *rest: Any) -> None:
        listed, early = self.models, path.endswith("completions") and not self.requests
        self.models = ["another"] if early else listed
        try:
            await super()._respond(method, path, *rest)
        finally:
            self.models = listed
