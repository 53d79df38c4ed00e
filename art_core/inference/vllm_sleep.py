"""Sleep: a vLLM server gives its GPU's memory to the trainer, takes it back, and shows that it is the same.

Invariant: a canary is computed, never remembered: vLLM does not read its prefix cache for requests that ask
for prompt logprobs, and each has a cache salt of its own.

Level 1 of vLLM's sleep mode keeps the weights in main memory and drops the KV cache. Adapters that slept
have come back changed without any error (vLLM issue 53888; seen on an H200: logprobs off by 0.59), which only
their answers tell. The canary is a fixed prompt whose logprobs are read in two ways, because they run
different kernels: those of the prompt (prefill), and those of one token forced again and again (decode).
`remember` reads it for each version before the server sleeps, `changes` compares after it woke.
"""

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.config import EngineConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.vllm_command import is_loopback
from art_core.inference.vllm_compat import SLEEP, TOKENIZE, WAKE
from art_core.inference.vllm_process import VLLMProcess
from art_core.types import PolicyVersion

TOLERANCE = 0.02
"""Mean absolute difference of logprobs, in nats per token, up to which a canary is what it was.

Above what bfloat16 kernels that add in another order make of the same weights, below half of what server and
trainer differ by with the same adapter (0.043 on an H200)."""

MOVE_TIMEOUT = 600.0
"""Seconds that moving the weights to main memory or back may take: 22 GiB took 10."""

CANARY = (
    "A miner carried a yellow bird into the dark each morning. While it sang, the air was good. When it fell "
    "silent, everyone climbed back to the light, counted heads, and asked what had changed since yesterday."
)
DECODED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """What a canary said.

    Attributes:
        prefill: logprobs of the prompt's tokens but the first  [prompt_tokens - 1].
        decode: logprobs of the forced tokens  [DECODED_TOKENS].
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def difference(self, other: "Reading") -> float:
        """The larger of both mean absolute differences, in nats per token; infinite for other lengths."""
        return max(_mean_difference(self.prefill, other.prefill), _mean_difference(self.decode, other.decode))


@dataclass(frozen=True, slots=True)
class Change:
    """A version that is not what it was.

    Attributes:
        version: which; 0 is the base model.
        difference: of its canary's logprobs, in nats per token.
    """

    version: PolicyVersion
    difference: float

    def __str__(self) -> str:
        return f"{self.version} (by {self.difference:.3g} nats per token)"


class SleepCycle:
    """What a server said before it was put to sleep, and whether it sleeps.

    Args:
        config: how the server is run.

    Raises:
        ConfigError: it listens where others can reach it, and vLLM offers sleep only with endpoints that
            must stay private.
    """

    def __init__(self, config: EngineConfig) -> None:
        if not is_loopback(config.host):
            raise ConfigError(
                f"EngineConfig.colocate=True with host={config.host!r}: vLLM sleeps only with its "
                "development endpoints open, which no other machine may reach; listen on 127.0.0.1 behind a "
                "gateway, or give vLLM a GPU of its own and leave colocate out"
            )
        self._longest = config.max_model_len - DECODED_TOKENS - 1
        self._prompt: list[int] = []
        self._before: dict[PolicyVersion, Reading] = {}
        self._asleep = False

    @property
    def asleep(self) -> bool:
        """Whether the server has been told to sleep and not yet to wake."""
        return self._asleep

    async def remember(self, server: VLLMProcess, versions: Iterable[PolicyVersion]) -> None:
        """Read the canaries of a server that takes requests.

        Raises:
            EngineError: it does not answer them.
        """
        self._before = {version: await self.read(server, version) for version in versions}

    async def sleep(self, server: VLLMProcess) -> None:
        """Have an idle server give its memory away.

        Raises:
            EngineError: it refuses.
        """
        # In flight nothing is left: pausing waited for it. Sleeping would abort it.
        await server.steer(SLEEP, None, "go to sleep", MOVE_TIMEOUT)
        self._asleep = True

    async def wake(self, server: VLLMProcess) -> None:
        """Have it take its memory back; it answers what was queued meanwhile.

        Raises:
            EngineError: it does not wake, most likely because its memory is not free.
        """
        # Before it does: if it dies over it, it is to be restarted, and one that is awake takes it well.
        self._asleep = False
        await server.steer(WAKE, None, "wake up", MOVE_TIMEOUT)

    async def changes(self, server: VLLMProcess, versions: Iterable[PolicyVersion]) -> list[Change]:
        """Which of these versions answer otherwise than before.

        Raises:
            EngineError: the server does not answer.
        """
        found: list[Change] = []
        for version in versions:
            before = self._before.get(version)
            if before is None:  # published since, from its files
                continue
            difference = (await self.read(server, version)).difference(before)
            if not difference <= TOLERANCE:  # also when it is not a number
                found.append(Change(version, difference))
        return found

    async def read(self, server: VLLMProcess, version: PolicyVersion) -> Reading:
        """One canary.

        Raises:
            EngineError: the server does not answer it as vLLM does.
        """
        if not self._prompt:
            asked = {"model": version.name, "prompt": CANARY}
            answer = await server.ask(TOKENIZE, asked, "tokenize the canary")
            self._prompt = [int(token) for token in answer["tokens"]][: self._longest]
        body = {
            "model": version.name,
            "prompt": self._prompt,
            "prompt_logprobs": 0,
            "logprobs": 0,
            "max_tokens": DECODED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": self._prompt[-1:],
            "cache_salt": uuid.uuid4().hex,
        }
        answer = await server.ask("/v1/completions", body, f"answer the canary of {version}")
        try:
            return _reading(answer["choices"][0])
        except (LookupError, TypeError, ValueError, AttributeError) as other:
            raise EngineError(f"{version}: vLLM's answer to the canary has no logprobs: {other!r}") from other


def _reading(choice: dict[str, Any]) -> Reading:
    prompt: Sequence[dict[str, dict[str, float]] | None] = choice["prompt_logprobs"]
    entries = [entry for entry in prompt if entry]
    return Reading(
        tuple(float(next(iter(entry.values()))["logprob"]) for entry in entries),
        tuple(float(value) for value in choice["logprobs"]["token_logprobs"]),
    )


def _mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    if len(some) != len(others) or not some:
        return math.inf
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / len(some)
