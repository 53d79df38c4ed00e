"""What tests of the gateway share: a policy that moves, a client that leaves, waiting."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from fakes.vllm_server import FakeVLLM

from art_core.inference.endpoint import VersionLeases
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_log import Completion
from art_core.recording import NullSink, Sink
from art_core.types import PolicyVersion, Step, StepIdentity

HI = [{"role": "user", "content": "hi"}]


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def only_step(completion: Completion) -> Step:
    (step,) = completion.steps("t-1", StepIdentity())
    return step


class MovingPolicy:
    """An endpoint whose current version the test moves."""

    name = "agent"
    api_key = "server-key"
    sink: Sink = NullSink()

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.number = 0
        self.leases = VersionLeases()

    def current_version(self) -> PolicyVersion:
        return PolicyVersion(self.name, self.number)

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        return self.leases.lease(version or self.current_version())


async def leave(gateway: Gateway, server: FakeVLLM) -> None:
    """Ask, and go away once the server has the request."""
    async with httpx.AsyncClient(timeout=60) as client:
        asked = client.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
        call = asyncio.create_task(asked)
        await asyncio.to_thread(until, lambda: server.bodies)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
