"""Sleep: a vLLM server gives its GPU's memory to the trainer, takes it back, and shows that it is the same.

Invariant: a canary is computed, never remembered: vLLM does not read its prefix cache for requests that ask
for prompt logprobs, and each has a cache salt of its own.

Level 1 of vLLM's sleep mode keeps the weights in main memory and drops the KV cache. Adapters that slept
have come back changed without any error (vLLM issue 53888; seen on an H200: logprobs off by 0.59), which only
their answers tell. The canary is a fixed prompt whose logprobs are read in two ways, because they run
different kernels: those of the prompt (prefill), and those of one token forced again and again (decode).
`remember` reads it a few times for each version before the server sleeps for the first time with it, `check`
reads it again whenever it woke; what the readings mean is decided in `art_core.inference.vllm_canary`.
(A version's weights never change, so what it said first holds for all of the server's life. Reading it again
each time would cost time, and make of a change too small to be seen the measure of the next.)
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art_core.config import EngineConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.vllm_canary import READINGS, TRIES, Check, Reading, Reference, best
from art_core.inference.vllm_command import is_loopback
from art_core.inference.vllm_compat import SLEEP, TOKENIZE, WAKE
from art_core.inference.vllm_process import VLLMProcess
from art_core.types import PolicyVersion

MOVE_TIMEOUT = 600.0
"""Seconds that moving the weights to main memory or back may take: 22 GiB took 10."""

CANARY = (
    "A miner carried a yellow bird into the dark each morning. While it sang, the air was good. When it fell "
    "silent, everyone climbed back to the light, counted heads, and asked what had changed since yesterday."
)
DECODED_TOKENS = 8
FORCE = 50
"""Bias of the forced token: enough against any logits, and little enough for float32 to tell others apart."""


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
        self._before: dict[PolicyVersion, Reference] = {}
        self._of: VLLMProcess | None = None
        self._asleep = False

    @property
    def asleep(self) -> bool:
        """Whether the server has been told to sleep and not yet to wake."""
        return self._asleep

    @property
    def before(self) -> Mapping[PolicyVersion, Reference]:
        """What each version said when it was remembered."""
        return self._before

    async def remember(
        self, server: VLLMProcess, base: PolicyVersion, adapters: Iterable[PolicyVersion]
    ) -> None:
        """Read the canaries of a server that takes requests, of those versions that it has not told yet.

        Args:
            server: which.
            base: the version that the base model answers as.
            adapters: the other versions.

        Raises:
            EngineError: it does not answer them.
        """
        told = self._before if self._of is server and base in self._before else {}
        alone = told.get(base) or Reference.of(base, await self._read_often(server, base))
        found = {base: alone}
        for version in adapters:
            found[version] = told.get(version) or Reference.of(
                version, await self._read_often(server, version), alone.reading
            )
        self._before, self._of = found, server

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

    async def check(self, server: VLLMProcess, versions: Iterable[PolicyVersion]) -> list[Check]:
        """How these versions answer now; those that were not remembered are left out.

        Raises:
            EngineError: the server does not answer.
        """
        found: list[Check] = []
        for version in versions:
            before = self._before.get(version)
            if before is None:  # published since, from its files
                continue
            tried: list[Check] = []
            for _ in range(TRIES):
                tried.append(before.check(await self.read(server, version)))
                if not tried[-1].changed:
                    break
            found.append(best(tried))
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
        forced = self._prompt[-1]
        other = next((token for token in reversed(self._prompt) if token != forced), forced ^ 1)
        body = {
            "model": version.name,
            "prompt": self._prompt,
            "prompt_logprobs": 0,
            # Of the forced token, which is certain, and of the other one, which says what the model thinks.
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "max_tokens": DECODED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": [forced, other],
            "logit_bias": {str(forced): FORCE},
            "cache_salt": uuid.uuid4().hex,
        }
        answer = await server.ask("/v1/completions", body, f"answer the canary of {version}")
        try:
            return _reading(answer["choices"][0], other)
        except (LookupError, TypeError, ValueError, AttributeError) as other:
            raise EngineError(f"{version}: vLLM's answer to the canary has no logprobs: {other!r}") from other

    async def _read_often(self, server: VLLMProcess, version: PolicyVersion) -> list[Reading]:
        return [await self.read(server, version) for _ in range(READINGS)]


def _reading(choice: dict[str, Any], other: int) -> Reading:
    prompt: Sequence[dict[str, dict[str, float]] | None] = choice["prompt_logprobs"]
    entries = [entry for entry in prompt if entry]
    return Reading(
        tuple(float(next(iter(entry.values()))["logprob"]) for entry in entries),
        tuple(float(top[f"token_id:{other}"]) for top in choice["logprobs"]["top_logprobs"]),
    )
