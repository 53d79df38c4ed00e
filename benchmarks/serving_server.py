"""The servers that `serving.py` measures: a vLLM of its own, one that runs already, one without a model."""

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_command import installed_vllm
from art_core.inference.vllm_start import StartProgress
from art_core.types import PolicyVersion
from benchmarks.children import child

NAME = "bench"
SCRIPT = Path(__file__).with_name("serving.py")
LORA = LoRAConfig(rank=16, alpha=32)


@dataclass
class Server:
    """A server, and the names of what it serves.

    Attributes:
        url: ending in ``/v1``.
        models: by ``base``, ``adapter``, ``merged``: what to ask for.
        engine: ours; None for a server that somebody else started.
        adapter: directory of the adapter; None without engine.
        facts: how it was started, for the record.
    """

    url: str
    models: dict[str, str]
    engine: VLLMEngine | None = None
    adapter: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Without ``/v1``."""
        return self.url.removesuffix("/v1")


@contextmanager
def own_vllm(
    model: str, config: EngineConfig, directory: Path, say: Callable[[str], None], runner: asyncio.Runner
) -> Generator[Server]:
    """Start vLLM with an adapter of random numbers; its facts hold how long that took."""
    adapter = random_adapter(Path(model), directory / "adapter-1")
    phases: dict[str, float] = {}

    def on_progress(progress: StartProgress) -> None:
        if progress.phase not in phases:
            phases[progress.phase] = progress.seconds
            say(f"{progress.seconds:4.0f} s  {progress.phase}")

    engine = VLLMEngine(model, config, LORA, NAME, directory / "logs", on_progress=on_progress)
    started = time.perf_counter()
    runner.run(engine.start())
    try:
        facts: dict[str, Any] = {"seconds_to_ready": time.perf_counter() - started, "phase_began": phases}
        python = config.python or Path(sys.executable)
        facts |= {"vllm": f"vLLM {installed_vllm(python).version}", "model": Path(model).name}
        runner.run(engine.publish(PolicyVersion(NAME, 0), None))
        clock = time.perf_counter()
        runner.run(engine.publish(PolicyVersion(NAME, 1), adapter))
        facts["seconds_to_publish"] = time.perf_counter() - clock
        models = {"base": f"{NAME}@0", "adapter": f"{NAME}@1"}
        if config.publish == "merged":
            models = {"merged": f"{NAME}@1"}
        yield Server(engine.base_url, models, engine, adapter, facts)
    finally:
        runner.run(engine.close())


def serve_fake() -> None:
    """A server without a model, until stdin ends."""
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))  # the fake server is a test's
    from fakes.vllm_server import FakeVLLM

    with FakeVLLM("word " * 400, packed=True) as server:
        print(server.base_url, flush=True)
        sys.stdin.read()


def serve_gateway(url: str, model: str, connections: int) -> None:
    """A gateway in front of a server, until stdin ends."""
    from art_core.inference.endpoint import StaticEndpoint
    from art_core.inference.gateway import Gateway

    with Gateway(StaticEndpoint(url, model), max_connections=connections) as gateway:
        print(gateway.base_url, flush=True)
        sys.stdin.read()


@contextmanager
def gateways(server: Server, connections: int) -> Generator[dict[str, str]]:
    """A gateway, in a process of its own, before each of a server's models: its URL, by target."""
    with ExitStack() as running:
        yield {
            target: running.enter_context(child(SCRIPT, "serve-gateway", server.url, model, str(connections)))
            for target, model in server.models.items()
        }


def random_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Write a PEFT adapter of small random numbers for all projections of a Llama or Qwen2 model."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv, inner = head * config.get("num_key_value_heads", heads), config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (hidden, heads * head),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads * head, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    numbers = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (into, out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = numbers.standard_normal((LORA.rank, into), dtype=np.float32) / math.sqrt(into)
            b = numbers.standard_normal((out, LORA.rank), dtype=np.float32) * 0.01
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": LORA.rank,
        "lora_alpha": LORA.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


# -- what a machine says of itself -------------------------------------------------------------------------


def gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU, MiB; empty without."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line]
    return [{"name": name, "used_mib": int(used), "total_mib": int(total)} for name, used, total in rows]


def used_mib() -> int | None:
    """Memory in use on the first GPU that this process may use, MiB; None without."""
    found = gpus()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return found[int(first) if first.isdecimal() else 0]["used_mib"] if found else None


def encoding(root: str) -> dict[str, Any]:
    """In which form the server sends exact tokens."""
    try:
        answer = httpx.get(f"{root}/art/tokens", timeout=10, trust_env=False)
        return answer.json() if answer.status_code == 200 else {"encoding": "standard"}
    except (httpx.HTTPError, ValueError) as silent:
        return {"encoding": "unknown", "detail": repr(silent)}
