"""What a server that somebody else runs can do: asked once, with requests that change nothing.

Invariant: a capability is claimed only if the server showed it; what is missing is said with what follows
from it and what would mend it.

Every question is a request that a user could send: one token of a completion, and GETs of routes. A route
that takes only POST says so (405) without doing anything, which tells it from one that is not there (404).
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx

from art_core.capture import read_completion
from art_core.errors import CaptureError, EngineError
from art_core.streaming import DONE, EventDecoder, StreamAssembler

logger = logging.getLogger(__name__)

PROBE_SECONDS = 120.0
"""How long one question may take: a server that has just started may compile first."""

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server can do.

    Attributes:
        models: the names that it serves.
        server: who it is, as far as it says: ``vLLM 0.32.0``, ``unknown``.
        token_ids: it returns the exact ids of prompt and completion.
        logprobs: it returns the sampled tokens' log-probabilities.
        tempered_logprobs: these are of the distribution that was sampled from, temperature included, and
            not the model's own.
        stream_token_ids: it does so in streams too.
        tools: it takes requests with tools.
        load_adapters: it loads LoRA adapters at run time.
        untrainable: why its answers cannot be trained on, in the words of the record; None when they can.
    """

    models: tuple[str, ...]
    server: str = "unknown"
    token_ids: bool = False
    logprobs: bool = False
    tempered_logprobs: bool = False
    stream_token_ids: bool = False
    tools: bool = False
    load_adapters: bool = False
    untrainable: str | None = None

    def describe(self, base_url: str) -> str:
        """One message: what it is, what it can do, what follows from what it cannot."""
        can = [what for what, shown in self._all().items() if shown]
        lines = [
            f"{base_url}: {self.server}, serves {', '.join(self.models)}; can: {', '.join(can) or 'nothing'}"
        ]
        lines += [f"  cannot {what}: {_MEANS[what]}" for what in self.lacks]
        return "\n".join(lines)

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it cannot do, in words."""
        return tuple(what for what, shown in self._all().items() if not shown)

    def _all(self) -> dict[str, bool]:
        tempered = {"return logprobs at other temperatures than 1": self.tempered_logprobs}
        return {
            "return token ids": self.token_ids,
            "return logprobs": self.logprobs,
            **(tempered if self.logprobs else {}),
            "stream token ids": self.stream_token_ids,
            "take tools": self.tools,
            "load adapters": self.load_adapters,
        }


CANNOT_LOAD = (
    "start vLLM with --enable-lora --max-lora-rank <rank> and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
    "environment, on a file system where it finds our adapters under the same path"
)
"""The way out for who cannot publish."""

_MEANS = {
    "return token ids": "steps are recorded with trainable=False (vLLM from 0.10.2 on does, when asked with "
    "return_token_ids)",
    "return logprobs": "steps are recorded with trainable=False (the server must take logprobs=true)",
    "return logprobs at other temperatures than 1": "steps that are sampled at another temperature are "
    "trained without them, and nothing corrects for stale rollouts (vLLM: --logprobs-mode "
    "processed_logprobs, so that logprobs are of what was sampled)",
    "stream token ids": "streamed calls are recorded with trainable=False",
    "take tools": "requests with tools are refused (vLLM: --enable-auto-tool-choice --tool-call-parser "
    "<name>)",
    "load adapters": f"a trained version cannot be published; {CANNOT_LOAD}",
}


async def probe(client: httpx.AsyncClient, base_url: str, wanted: Sequence[str]) -> tuple[str, Capabilities]:
    """Ask a server what it can do.

    Args:
        client: sends the bearer token, if there is one.
        base_url: ending in ``/v1``.
        wanted: names that the base model may have, the likeliest first.

    Returns:
        the base model's name there, and what the server can do.

    Raises:
        EngineError: it cannot be reached, refuses the key, does not speak OpenAI's schema, or serves several
            models and none of the wanted ones.
    """
    cards = await models(client, base_url)
    names = tuple(str(card.get("id")) for card in cards)
    bases = [str(card.get("id")) for card in cards if not card.get("parent")]
    model = next((name for name in wanted if name in names), bases[0] if len(bases) == 1 else None)
    if model is None:
        raise EngineError(
            f"{base_url} serves {', '.join(names) or 'no model'}, and none is the base model: serve it as "
            f"one of {', '.join(wanted)} (vLLM: --served-model-name)"
        )
    card = next(card for card in cards if card.get("id") == model)
    whole, streamed, tempered, tools, server, load = await asyncio.gather(
        _exact(client, base_url, model, stream=False),
        _exact(client, base_url, model, stream=True),
        _tempers(client, base_url, model),
        _takes_tools(client, base_url, model),
        _server(client, base_url, card),
        _has_route(client, base_url, LOAD_ADAPTER),
    )
    return model, Capabilities(
        models=names,
        server=server,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        tempered_logprobs=whole.logprobs and tempered,
        stream_token_ids=streamed.token_ids and streamed.logprobs,
        tools=tools,
        load_adapters=load,
        untrainable=whole.untrainable,
    )


async def models(
    client: httpx.AsyncClient, base_url: str, seconds: float = 30.0
) -> Sequence[Mapping[str, Any]]:
    """The cards of what a server serves.

    Raises:
        EngineError: it cannot be reached, refuses the key, or does not speak OpenAI's schema.
    """
    try:
        answer = await client.get(f"{base_url}/models", timeout=seconds)
    except httpx.TransportError as down:
        raise EngineError(
            f"{base_url} does not answer ({type(down).__name__}: {down}); it must end in /v1 and be "
            "reachable from this machine"
        ) from down
    if answer.status_code in (401, 403):
        raise EngineError(f"{base_url} refuses the key ({answer.status_code}): set EngineConfig.api_key")
    try:
        cards: Any = answer.json()["data"]
        return [cast(Mapping[str, Any], card) for card in cards if isinstance(card, Mapping)]
    except (ValueError, KeyError, TypeError) as foreign:
        raise EngineError(
            f"{base_url}/models answers {answer.status_code} with {answer.text[:200]!r}: no "
            "OpenAI-compatible server; base_url must end in /v1"
        ) from foreign


@dataclass(frozen=True, slots=True)
class _Exact:
    token_ids: bool
    logprobs: bool
    untrainable: str | None


async def _exact(client: httpx.AsyncClient, base_url: str, model: str, *, stream: bool) -> _Exact:
    """Whether one sampled token comes with its ids and its log-probability."""
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": stream,
    }  # fmt: skip
    problem = ""
    # A server may refuse one of the two by name, and still do the other.
    for extras in ({"logprobs": True, "return_token_ids": True}, {"logprobs": True}, {}):
        try:
            answer = await client.post(
                f"{base_url}/chat/completions", json={**asked, **extras}, timeout=PROBE_SECONDS
            )
            if answer.status_code != 200:
                problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                continue
            body: Any
            if stream:
                assembler, events = StreamAssembler(), EventDecoder()
                for event in (*events.feed(answer.content), *events.close()):
                    if event != DONE:
                        assembler.feed(json.loads(event))
                body = assembler.body()
            else:
                body = answer.json()
            (choice, *_) = read_completion(body)
            raw = cast(Mapping[str, Any], body["choices"][0])
        except (httpx.TransportError, CaptureError, ValueError, KeyError, IndexError) as unreadable:
            problem = f"{type(unreadable).__name__}: {unreadable}"
            continue
        content: Any = (raw.get("logprobs") or {}).get("content")
        exact = choice.tokens is not None
        return _Exact(
            token_ids=exact or bool(raw.get("token_ids")),
            logprobs=exact or bool(content),
            untrainable=choice.untrainable,
        )
    if stream:
        return _Exact(False, False, problem)
    raise EngineError(f"{base_url} does not answer a chat completion of {model!r}: {problem}")


async def _tempers(client: httpx.AsyncClient, base_url: str, model: str) -> bool:
    """Whether logprobs depend on the temperature: the likeliest token's is lower at 2 than at 1."""
    asked = {
        "model": model, "messages": [{"role": "user", "content": "Say any word."}], "max_tokens": 1,
        "logprobs": True, "top_logprobs": 2,  # vLLM's first one is the sampled token, the likeliest or not
    }  # fmt: skip

    async def likeliest(temperature: float) -> float:
        answer = await client.post(
            f"{base_url}/chat/completions", json={**asked, "temperature": temperature}, timeout=PROBE_SECONDS
        )
        tops = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return max(float(top["logprob"]) for top in tops)

    try:
        return await likeliest(1) - await likeliest(2) > TEMPERED
    except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError) as untold:
        logger.info("%s does not tell the likeliest token's logprob: %r", base_url, untold)
        return False


TEMPERED = 0.1
"""Nats by which two temperatures' logprobs must differ: more than batches and kernels make of one."""


async def _takes_tools(client: httpx.AsyncClient, base_url: str, model: str) -> bool:
    asked = {
        "model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": [_TOOL],
    }  # fmt: skip
    try:
        answer = await client.post(f"{base_url}/chat/completions", json=asked, timeout=PROBE_SECONDS)
    except httpx.TransportError as down:
        logger.info("%s: asked with tools it did not answer: %r", base_url, down)
        return False
    return answer.status_code == 200


async def _server(client: httpx.AsyncClient, base_url: str, card: Mapping[str, Any]) -> str:
    owner = str(card.get("owned_by") or "")
    try:
        answer = await client.get(base_url.removesuffix("/v1") + "/version", timeout=10.0)
        version: Any = answer.json().get("version") if answer.status_code == 200 else None
    except (httpx.TransportError, ValueError, AttributeError):
        version = None
    if owner == "vllm" or (version and not owner):
        return f"vLLM {version or '(unknown version)'}"
    return owner or "unknown"


async def _has_route(client: httpx.AsyncClient, base_url: str, path: str) -> bool:
    try:
        answer = await client.get(base_url.removesuffix("/v1") + path, timeout=10.0)
    except httpx.TransportError:
        return False
    return answer.status_code == 405
