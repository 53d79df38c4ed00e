"""vLLM on several GPUs: one server over two, and two replicas of which one is killed under load."""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from art_core.backends.making import make_engine
from art_core.config import EngineConfig, LoRAConfig, TrainableModelConfig
from art_core.inference.engine import Engine
from art_core.inference.gateway_routing import ReplicaState
from art_core.inference.replicas import ReplicaSet
from art_core.plain_http import HttpError, HttpPool, request_bytes
from art_core.types import PolicyVersion
from benchmarks.environment import told
from benchmarks.two_gpus_together import model_directory

LORA = LoRAConfig(rank=16, alpha=32)
TOKENS = (64, 192)
"""Least and most tokens of an answer: of one length they would all end, and be counted, at the same time."""
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor_parallel": {"tensor_parallel_size": 2},
    "replicas": {"replicas": 2},
}
PATIENCE = 400.0
"""Seconds for a killed server to be back."""


async def measure_serving(args: argparse.Namespace, sheet: Any) -> None:
    """Each way of serving: throughput, and a publication under load; replicas also lose a server."""
    name = "tiny" if args.small else args.model
    directory = Path(name) if Path(name).is_dir() else model_directory(args, name)
    adapters = write_adapters(directory, args.scratch / "adapters" / directory.name, args)
    if args.small:
        sheet.add({"part": "serving", "name": "replicas", **await two_embedded(args, directory, adapters)})
        return
    for what in args.what:
        try:
            run = await measure(args, what, directory, adapters)
        except Exception as failed:
            run = {"error": told(failed)}
        sheet.add({"part": "serving", "name": what, **run})


async def measure(
    args: argparse.Namespace, what: str, directory: Path, adapters: list[Path]
) -> dict[str, Any]:
    """Start, load, publish under load, and kill."""
    model = TrainableModelConfig(base_model=str(directory), project="serving", name=what, lora=LORA)
    config = EngineConfig(
        kind="vllm",
        max_model_len=2048,
        gpu_memory_utilization=args.gpu_memory,
        max_batch=256,
        python=args.vllm_python,
        **CONFIGS[what],
    )
    engine = make_engine(None, model, config, args.scratch / "serving")
    began = time.perf_counter()
    await engine.start()
    try:
        run = {"ready_seconds": time.perf_counter() - began, "model": directory.name}
        run |= await under_load(engine, what, adapters, args)
        if isinstance(engine, ReplicaSet):
            run |= await killed(engine, PolicyVersion(what, 2), args)
        return run
    finally:
        await engine.close()


async def under_load(
    engine: Engine, name: str, adapters: list[Path], args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second on version 1, and what publishing version 2 meanwhile takes."""
    first, second = PolicyVersion(name, 1), PolicyVersion(name, 2)
    await engine.publish(first, adapters[0])
    async with Load(engine, first, args.concurrency) as load:
        await load.answered(args.concurrency)  # warm
        rate = await load.rate(args.seconds)
        began = time.perf_counter()
        await engine.publish(second, adapters[1])
        published = time.perf_counter() - began
        during = await load.rate(args.seconds / 4)
        load.version = second
        await load.answered(2 * args.concurrency)
    return {
        "tokens_per_second": rate,
        "concurrency": args.concurrency,
        "publish_seconds": published,
        "tokens_per_second_after_publishing": during,
        "requests": load.done,
        "failed": load.failed,
        "failures": load.failures,
        "answered_by": dict(load.by_version),
    }


async def killed(engine: ReplicaSet, version: PolicyVersion, args: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL to one replica's server while all is under load; nothing may be lost."""
    victim: Any = engine.engines[0]
    async with Load(engine, version, args.concurrency) as load:
        await load.answered(args.concurrency)
        before = await load.rate(args.seconds / 2)
        os.kill(victim.pid, signal.SIGKILL)
        began = time.perf_counter()
        one = await load.rate(args.seconds / 2)
        await until(lambda: not up(engine, 0), PATIENCE)
        await until(lambda: up(engine, 0), PATIENCE)
        back = time.perf_counter() - began
        after = await load.rate(args.seconds / 2)
    return {
        "kill": {
            "tokens_per_second_before": before,
            "tokens_per_second_with_one": one,
            "back_after_seconds": back,
            "tokens_per_second_after": after,
            "requests": load.done,
            "failed": load.failed,
            "failures": load.failures,
            "longest_seconds": load.longest,
        }
    }


def wanted(number: int, asked: int) -> int:
    """Tokens of a caller's request, counted from 1: the same in every run, spread evenly over `TOKENS`."""
    least, most = TOKENS
    golden = (5**0.5 - 1) / 2
    return least + int((most - least + 1) * ((number * golden + asked * golden * golden) % 1))


def up(engine: ReplicaSet, number: int) -> bool:
    return engine.replicas[number].state is ReplicaState.UP


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for something that others do.

    Raises:
        TimeoutError: it did not come about.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


@dataclass
class Load:
    """So many requests under way at any moment, until the block ends; then the last ones are waited for."""

    engine: Any
    version: PolicyVersion
    concurrency: int
    small: bool = False
    done: int = 0
    failed: int = 0
    tokens: int = 0
    longest: float = 0.0
    failures: list[str] = field(default_factory=list)
    by_version: dict[str, int] = field(default_factory=dict)

    async def __aenter__(self) -> "Load":
        # httpx looks at every connection for each request: with hundreds of them it is what is measured.
        self._pool = HttpPool()
        url = urlsplit(f"{self.engine.base_url}/chat/completions")
        self._place = (url.hostname or "", url.port or 80)
        self._path = url.path.encode()
        self._headers = [(b"host", url.netloc.encode()), (b"content-type", b"application/json")]
        self._going = True
        self._asking = [asyncio.create_task(self._ask(i)) for i in range(self.concurrency)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._going = False
        await asyncio.gather(*self._asking)
        self._pool.close()

    async def _ask(self, number: int) -> None:
        asked = 0
        while self._going:
            version = self.version
            name = self.engine.wire_name(version) if hasattr(self.engine, "wire_name") else version.name
            asked += 1
            body = {
                "model": name,
                "messages": [{"role": "user", "content": f"{number} {asked} " + "tell me more " * 20}],
                "max_tokens": wanted(number, asked),
                "temperature": 1.0,
                **({} if self.small else {"ignore_eos": True}),
            }
            began = time.perf_counter()
            try:
                # Not in one statement with the sum, which would be read before others add to it.
                tokens = await self._post(body)
                self.tokens += tokens
            except (HttpError, KeyError, ValueError) as lost:
                self.failed += 1
                self.failures = [*self.failures, f"{type(lost).__name__}: {lost}"[:300]][:5]
                await asyncio.sleep(0.1)  # a server that refuses at once must not be flooded
            self.longest = max(self.longest, time.perf_counter() - began)
            self.done += 1
            self.by_version[version.name] = self.by_version.get(version.name, 0) + 1

    async def _post(self, body: dict[str, Any]) -> int:
        """Ask once; returns the tokens of the answer."""
        content = json.dumps(body).encode()
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        request = request_bytes("POST", self._path, headers, content)
        answer = await self._pool.send(self._place, request, read_timeout=PATIENCE)
        answer.timeout = PATIENCE
        said = await answer.read()
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {said[:200]!r}")
        return json.loads(said)["usage"]["completion_tokens"]

    async def answered(self, more: int) -> None:
        """Wait until so many more have been answered."""
        target = self.done + more
        await until(lambda: self.done >= target, PATIENCE)

    async def rate(self, seconds: float) -> float:
        """Tokens a second over the next seconds."""
        tokens, began = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - began)


def write_adapters(directory: Path, root: Path, args: argparse.Namespace) -> list[Path]:
    """Two random adapters of the model."""
    from art_core.training.peft_policy import PeftPolicy

    found = [root / str(number) for number in (1, 2)]
    if all((path / "adapter_config.json").exists() for path in found):
        return found
    dtype = "float32" if args.small else "bfloat16"
    policy = PeftPolicy.load(str(directory), LORA, dtype=dtype)
    for number, path in enumerate(found):
        torch.manual_seed(number)
        for parameter in policy.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        policy.save_weights(path)
    return found


async def two_embedded(args: argparse.Namespace, directory: Path, adapters: list[Path]) -> dict[str, Any]:
    """The CPU form: two embedded engines behind the gateway; a publication to both under load."""
    from art_core.inference.embedded import EmbeddedEngine
    from art_core.training.peft_policy import PeftPolicy

    config = EngineConfig(kind="embedded", dtype="float32", max_model_len=512)
    policies = [PeftPolicy.load(str(directory), LORA, dtype="float32") for _ in range(2)]
    engine = ReplicaSet([EmbeddedEngine(policy, config, served_model="m") for policy in policies])
    await engine.start()
    try:
        first, second = PolicyVersion("m", 1), PolicyVersion("m", 2)
        await engine.publish(first, adapters[0])
        load = Load(engine, first, 4, small=True)
        async with load:
            await load.answered(4)
            began = time.perf_counter()
            await engine.publish(second, adapters[1])
            published = time.perf_counter() - began
            load.version = second
            await load.answered(8)
        return {
            "publish_seconds": published,
            "requests": load.done,
            "failed": load.failed,
            "failures": load.failures,
            "answered_by": dict(load.by_version),
        }
    finally:
        await engine.close()
