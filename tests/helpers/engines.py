"""The engines that the conformance suite can be run against, and what is known of each.

An engine is known by its address and the name that requests use. Everything else helps a test to know more:
the tokenizer says what a prompt's ids must be, the trainer's model what each token's log-probability is, the
engine object lets it publish versions. `LACKS` says what an engine leaves out, and why.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall
from helpers import parrot
from helpers.parrot import FREE, Family, Script
from helpers.real_vllm import share_the_machine

from art_core.config import EngineConfig, LoRAConfig
from art_core.types import PolicyVersion

Feature = Literal[
    "adapters",
    "forced calls",
    "known ids",
    "malformed calls in streams",
    "one call",
    "reasoning",
    "refusals",
    "sampling",
    "slots",
    "stop tokens",
    "token bytes",
    "top logprobs",
    "trainer",
    "turns",
    "unknown parameters",
]
"""What an engine may lack."""

LORA = LoRAConfig(rank=4, alpha=8)
SLOTS = 16
"""Sequences that an engine of ours decodes together; more have to wait."""
CONTEXT = 1024
"""Tokens of prompt and completion together in an engine of ours."""

_SCRIPTED = "its answers are scripted: nothing is sampled"
_NO_MODEL = "there is no model behind it"
LACKS: dict[str, dict[Feature, str]] = {
    "embedded": {},
    "fake": {
        "adapters": _NO_MODEL,
        "forced calls": _SCRIPTED,
        "known ids": "its tokens are the text's bytes",
        "one call": _SCRIPTED,
        "refusals": "it takes every request, so that a test of ours sees what a client sent",
        "sampling": _SCRIPTED,
        "slots": "it answers any number of requests at once",
        "stop tokens": _SCRIPTED,
        "token bytes": "its end token is spelled by none",
        "top logprobs": _NO_MODEL,
        "trainer": _NO_MODEL,
        "unknown parameters": "vLLM ignores parameters that it does not know, and so does its stand-in",
    },
    "vllm": {
        "malformed calls in streams": "vLLM streams a call before it knows whether it is one",
        "turns": "vLLM serves first come, first served: all choices of a request that came earlier",
        "token bytes": "vLLM gives the bytes of U+FFFD for a token that is a part of a character",
        "unknown parameters": "vLLM ignores parameters that it does not know, with a warning in its log",
    },
    "url": {
        "adapters": "only its address is known",
        "known ids": "only its address is known",
        "malformed calls in streams": "engines of others may stream a call before it is known to be one",
        "slots": "only its address is known",
        "token bytes": "engines of others may give the bytes of U+FFFD",
        "trainer": "only its address is known",
        "turns": "engines of others may serve first come, first served",
        "unknown parameters": "engines of others may ignore them",
    },
}


@dataclass(frozen=True)
class Tolerance:
    """How far an engine's log-probabilities may lie from the trainer's: |difference| in nats.

    Attributes:
        mean: over all tokens.
        p99: of 99 in 100 tokens.
        most: of any.
    """

    mean: float
    p99: float
    most: float


FLOAT32 = Tolerance(1e-3, 1e-3, 1e-3)
BFLOAT16 = Tolerance(0.08, 0.4, 1.5)
"""Two bfloat16 forward passes in different kernels; an H200 showed 0.043, 0.19 and 0.56 on SmolLM2-135M."""

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, so that synchronous tests can use an engine's coroutines on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-under-test", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Let a coroutine run; returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class Adapters:
    """Publishing random adapters, which the trainer's model knows too.

    Attributes:
        spread: standard deviation of their weights. The larger it is, the more two bfloat16 forward passes
            differ: SmolLM2-135M's by 0.02 to 0.04 nats a token at 0.05 and by 0.09 to 0.21 at 0.1,
            Qwen2.5-Coder-0.5B's by 0.03 to 0.04 at 0.03 and by 7 at 0.05. Two adapters differ by ten times as
            much at 0.05 and 0.03.
    """

    engine: Any
    policy: Any
    loop: LoopThread
    folder: Path
    model: str
    spread: float = 0.1
    number: int = 0

    def publish(self) -> str:
        """Publish the next version, an adapter that changes what is said; returns its name."""
        import torch

        self.number += 1
        version = PolicyVersion(self.model, self.number)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.number)
            for parameter in self.policy.trainable_parameters():
                torch.nn.init.normal_(parameter.data, std=self.spread)
        directory = self.folder / str(self.number)
        self.policy.save_weights(directory)
        self.loop.run(self.engine.publish(version, directory))
        with suppress_taken():
            self.policy.snapshot(version.name, directory)
        return version.name

    def retire(self, name: str) -> Any:
        """Begin to retire a version; returns a future."""
        return self.loop.start(self.engine.retire(PolicyVersion.parse(name)))


@contextmanager
def suppress_taken() -> Iterator[None]:
    """The embedded engine and the trainer share one policy: the snapshot is there already."""
    from art_core.errors import EngineError

    with suppress(EngineError):
        yield


@dataclass
class EngineUnderTest:
    """One engine.

    Attributes:
        name: for messages.
        base_url: ending in ``/v1``.
        model: the name that requests use.
        scripted: whether it says scripts' replies when asked; else it is made to by constrained decoding.
        lacks: what it leaves out, and why.
        tokenizer: its model's, where known.
        logprobs: what the trainer's forward pass says of (version, prompt, completion) at a temperature,
            where known.
        tolerance: how near that must be.
        adapters: for publishing, where possible.
        context: most tokens of prompt and completion.
        slots: how many sequences run at once.
        family: whose template it has, where known.
    """

    name: str
    base_url: str
    model: str
    scripted: bool = True
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    tokenizer: Any = None
    logprobs: Callable[[str, Sequence[int], Sequence[int], float], list[float]] | None = None
    tolerance: Tolerance = FLOAT32
    adapters: Adapters | None = None
    context: int = CONTEXT
    slots: int = SLOTS
    family: Family | None = None

    def need(self, *features: Feature) -> None:
        """Skip the test, with the reason, where the engine lacks something."""
        for feature in features:
            if feature in self.lacks:
                pytest.skip(f"{self.name} lacks {feature}: {self.lacks[feature]}")

    def request(self, script: Script, **more: Any) -> dict[str, Any]:
        """A request that is answered with a script's reply."""
        asked = parrot.spoken_to(self.family, script)
        body = {"model": self.model, **asked.request, "max_tokens": 256, **more}
        if script is FREE:
            body |= {"temperature": 1, "ignore_eos": True, **more}
        elif not self.scripted:
            # As a grammar: vLLM 0.26 writes a choice's line breaks into its grammar as they are, and fails.
            body["structured_outputs"] = {
                "grammar": f"root ::= {json.dumps(script.reply, ensure_ascii=False)}"
            }
        return body

    def prompt(self, script: Script) -> list[int]:
        """What a script's prompt must be: its ids by transformers alone."""
        return parrot.render(self.tokenizer, parrot.spoken_to(self.family, script))

    def post(self, body: Mapping[str, Any], *, timeout: float = 120) -> httpx.Response:
        """Ask, and wait for the whole answer."""
        return httpx.post(f"{self.base_url}/chat/completions", json=body, timeout=timeout)

    def ask(self, script: Script, **more: Any) -> dict[str, Any]:
        """A script's answer, which must be one."""
        answer = self.post(self.request(script, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()


# -- launching --------------------------------------------------------------------------------------------


@contextmanager
def embedded(family: Family, folder: Path, **settings: Any) -> Iterator[EngineUnderTest]:
    """An embedded engine in float32 on a model that has learnt the scripts."""
    from helpers.embedded import forward_logprobs

    from art_core.inference.embedded import EmbeddedEngine
    from art_core.training.peft_policy import PeftPolicy

    policy = PeftPolicy.load(str(parrot.parrot(family)), LORA, dtype="float32")
    settings = {"dtype": "float32", "max_model_len": CONTEXT, "max_batch": SLOTS, **settings}
    engine = EmbeddedEngine(policy, EngineConfig(**settings), served_model="agent")
    loop = LoopThread()
    loop.run(engine.start())
    try:
        loop.run(engine.publish(PolicyVersion("agent", 0), None))
        yield EngineUnderTest(
            name=f"embedded ({family})",
            base_url=engine.base_url,
            model="agent@0",
            lacks=LACKS["embedded"] | _by_family(family),
            tokenizer=parrot.parrot_tokenizer(family),
            logprobs=partial(forward_logprobs, policy),
            adapters=Adapters(engine, policy, loop, folder, "agent"),
            slots=engine._config.max_batch,
            family=family,
        )
    finally:
        loop.run(engine.close())
        loop.close()


def _by_family(family: Family | None) -> dict[Feature, str]:
    return {} if family == "qwen3" else {"reasoning": "its model does not think"}


@contextmanager
def vllm(model: Path | None, folder: Path, python: Path | None, dtype: str) -> Iterator[EngineUnderTest]:
    """A vLLM of ours, on the CPU or on CUDA; without a model, on Qwen3's parrot."""
    from helpers.embedded import forward_logprobs

    from art_core.inference.vllm import VLLMEngine
    from art_core.training.peft_policy import PeftPolicy

    share_the_machine()
    directory = model or parrot.parrot("qwen3")
    family: Family | None = "qwen3" if model is None else None
    config = EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=CONTEXT,
        max_batch=SLOTS,
        python=python,
        start_timeout=900,
        extra_args=("--reasoning-parser", "qwen3") if model is None else (),
    )
    policy = PeftPolicy.load(str(directory), LORA, dtype=dtype)  # type: ignore[arg-type]
    policy.snapshot("agent@0")
    engine = VLLMEngine(str(directory), config, LORA, "agent", folder)
    loop = LoopThread()
    try:
        loop.run(engine.start())
        loop.run(engine.publish(PolicyVersion("agent", 0), None))
        yield EngineUnderTest(
            name=f"vllm ({directory.name})",
            base_url=engine.base_url,
            model="agent@0",
            scripted=model is None,
            lacks=LACKS["vllm"] | _by_family(family),
            tokenizer=policy.tokenizer,
            logprobs=partial(forward_logprobs, policy),
            tolerance=FLOAT32 if dtype == "float32" else BFLOAT16,
            adapters=Adapters(engine, policy, loop, folder, "agent", spread=_spread(policy, dtype)),
            family=family,
        )
    finally:
        loop.run(engine.close())
        loop.close()


def _spread(policy: Any, dtype: str) -> float:
    """Weights of adapters that change what is said, by more than kernels differ by (`Adapters`)."""
    return 0.1 if dtype == "float32" else 26 / policy.model.config.hidden_size


def _scripted_reply(script: Script) -> Reply:
    """A script's reply as the stand-in's parsers would take it apart."""
    text = script.reply
    reasoning = None
    if text.startswith("<think>"):
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    if script is parrot.MALFORMED:
        return Reply(text, reasoning=reasoning)
    content, *calls = text.split("<tool_call>")
    made = []
    for body in calls:
        name, _, arguments = body.partition('"name": "')[2].partition('", "arguments": ')
        made.append(ToolCall(name, arguments.partition("}\n</tool_call>")[0]))
    return Reply(content.rstrip("\n") if made else content, tuple(made), reasoning)


@contextmanager
def fake() -> Iterator[EngineUnderTest]:
    """The stand-in for vLLM that other tests use: it must answer as the real ones do."""
    known = {(s.messages[-1]["content"], bool(s.template)): s for s in parrot.PLAIN + parrot.THINKING}

    def answer(request: dict[str, Any]) -> Reply:
        asked = request["messages"][-1]["content"]
        script = known.get((asked, bool(request.get("chat_template_kwargs"))))
        if asked == FREE.messages[-1]["content"]:
            return Reply("words " * 400)
        assert script is not None, f"no script for {asked!r}"
        return _scripted_reply(script)

    with FakeVLLM(answer, models=["agent@0"]) as server:
        yield EngineUnderTest(name="fake", base_url=server.base_url, model="agent@0", lacks=LACKS["fake"])


@contextmanager
def running(base_url: str | None, model: str | None) -> Iterator[EngineUnderTest]:
    """An engine that somebody else runs; it must be able to constrain what is said, as vLLM can."""
    if not base_url or not model:
        raise pytest.UsageError("--engine url needs --base-url and --served-model")
    yield EngineUnderTest(name=base_url, base_url=base_url, model=model, scripted=False, lacks=LACKS["url"])
