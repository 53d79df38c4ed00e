"""A model's parts, made as its settings ask: the policy, the trainer, the engine.

Invariant: nothing is started, and nothing is loaded that this process does not need.
"""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from art_core.backends.placement import Placement, place
from art_core.config import EngineConfig, ParallelConfig, TrainableModelConfig
from art_core.errors import ConfigError
from art_core.inference.devices import replica_configs
from art_core.inference.engine import Engine
from art_core.inference.gpu_share import limit_trainer, trainer_share
from art_core.inference.model_families import read_template
from art_core.inference.replicas import ReplicaSet

if TYPE_CHECKING:
    from art_core.training.full_policy import FullPolicy
    from art_core.training.grpo import Trainer
    from art_core.training.launch import TrainerProcesses
    from art_core.training.peft_policy import PeftPolicy


def engine_kind(config: EngineConfig) -> str:
    """What ``auto`` stands for on this machine."""
    if config.kind != "auto":
        return config.kind
    import torch

    return "vllm" if torch.cuda.is_available() and find_spec("vllm") else "embedded"


def check_weights(
    config: TrainableModelConfig, engine: EngineConfig, parallel: ParallelConfig | None
) -> None:
    """Whether a model whose weights are all trained can be trained and served so; adapters always can.

    Raises:
        ConfigError: it cannot; what would is said.
    """
    if config.lora is not None:
        return
    way_out = "or train an adapter (leave lora out)"
    if config.train_config.policy == "unsloth":
        raise ConfigError(
            f"lora=None with policy='unsloth': all weights are trained by policy='peft' alone, {way_out}"
        )
    if parallel is not None and parallel.strategy == "fsdp2":
        raise ConfigError(
            "lora=None with strategy='fsdp2': it shards frozen weights, of which there are none; use "
            f"strategy='ddp', {way_out}"
        )
    kind = engine_kind(engine)
    if kind == "external":
        raise ConfigError(
            "lora=None with kind='external': such a server takes adapters, not whole models; use "
            f"kind='vllm' with publish='merged', or kind='embedded', {way_out}"
        )
    if kind == "vllm" and engine.publish != "merged":
        raise ConfigError(
            f"lora=None with publish={engine.publish!r}: a version is then a whole model, which takes the "
            f"place of the one before: give LocalBackend(publish='merged'), {way_out}"
        )


def load_policy(
    config: TrainableModelConfig, engine: EngineConfig, device: str | None = None
) -> "PeftPolicy | FullPolicy":
    """The base model with what is trained of it; ``device`` None: on the GPU, if there is one.

    Its tokenizer renders messages by `EngineConfig.chat_template`, where one is named. The embedded engine,
    fine-tuning and trainer processes all use this tokenizer, and vLLM is given the same file, so what is
    trained is what is served.

    Raises:
        ConfigError: the model or the template cannot be read, or the settings contradict each other.
    """
    template = None if engine.chat_template is None else read_template(engine.chat_template)
    policy = _load_policy(config, engine, device)
    if template is not None:
        policy.tokenizer.chat_template = template
    return policy


def _load_policy(
    config: TrainableModelConfig, engine: EngineConfig, device: str | None
) -> "PeftPolicy | FullPolicy":
    import torch

    from art_core.training.peft_policy import PeftPolicy

    dtype = "float32" if engine.deterministic and engine.dtype == "auto" else engine.dtype
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    train = config.train_config
    if config.lora is None:
        from art_core.training.full_policy import FullPolicy

        return FullPolicy.load(config.base_model, dtype=dtype, device=device, kernels=train.kernels)
    if train.policy == "unsloth":
        from art_core.training.unsloth_policy import UnslothPolicy

        if engine_kind(engine) == "embedded":
            raise ConfigError(
                "policy='unsloth' trains a model that vLLM serves; the embedded engine shares the trainer's "
                "model and decodes with a cache that Unsloth's has not: give kind='vllm' or policy='peft'"
            )
        return UnslothPolicy.load(
            config.base_model,
            config.lora,
            dtype=dtype,
            device=device,
            seed=config.seed,
            load_in_4bit=train.load_in_4bit,
        )
    return PeftPolicy.load(
        config.base_model,
        config.lora,
        dtype=dtype,
        device=device,
        seed=config.seed,
        kernels=train.kernels,
        adapter_compute=train.adapter_compute,
    )


def load_rank_policy(
    config: TrainableModelConfig, engine: EngineConfig, share: float | None, device: str
) -> "PeftPolicy | FullPolicy":
    """`load_policy` in a trainer process; ``share``: the most of its GPU's memory that it may take."""
    if share is not None:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, torch.cuda.current_device())
    return load_policy(config, engine, device)


def make_placement(parallel: ParallelConfig | None, engine: EngineConfig) -> Placement | None:
    """Where trainer processes run; None without any.

    Raises:
        ConfigError: there are too few GPUs, or vLLM would be asked to make room for processes that stay.
    """
    if parallel is None:
        return None
    if engine.colocate:
        raise ConfigError(
            "EngineConfig.colocate=True with trainer processes (parallel=...): those hold their memory "
            "between steps, so vLLM could not take it back; leave one of the two out"
        )
    return place(parallel, engine, engine_kind(engine), visible_devices())


def make_trainer(
    policy: "PeftPolicy | FullPolicy | None",
    config: TrainableModelConfig,
    engine: EngineConfig,
    placement: Placement | None,
    root: Path,
) -> "Trainer | TrainerProcesses":
    """A trainer of the policy in this process, or processes that load their own and train it together."""
    if placement is None:
        from art_core.training.grpo import Trainer

        return Trainer(policy or load_policy(config, engine), config.train_config, seed=config.seed)
    from art_core.training.launch import TrainerProcesses

    vllm = engine_kind(engine) == "vllm"
    share = trainer_share(engine) if vllm and not placement.apart else None
    return TrainerProcesses(
        partial(load_rank_policy, config, engine, share),
        config.lora,
        config.train_config,
        placement.parallel,
        seed=config.seed,
        log_dir=root / config.project / config.name / "logs",
    )


def make_engine(
    policy: "PeftPolicy | FullPolicy | None", config: TrainableModelConfig, engine: EngineConfig, root: Path
) -> Engine:
    """The engine that the settings ask for; nothing is started."""
    engines = _engines(policy, config, engine, root)
    if len(engines) == 1 and not (engine.gateway or engine.kind == "external"):
        return engines[0]
    return ReplicaSet(
        engines,
        host=engine.host,
        port=engine.port or 0,
        connections=max(256, 2 * engine.max_batch),  # the server never runs out of waiting requests
        patience=engine.start_timeout,
        replaces=engine.publish == "merged",
    )


def _engines(
    policy: "PeftPolicy | FullPolicy | None", config: TrainableModelConfig, engine: EngineConfig, root: Path
) -> list[Engine]:
    """One for each replica."""
    kind = engine_kind(engine)
    if kind == "external":
        from art_core.inference.external import ExternalEngine

        return [
            ExternalEngine(url, engine.api_key, served_model=config.name, base_model=config.base_model)
            for url in engine.base_urls
        ]
    each = replica_configs(engine, visible_devices())
    if kind == "embedded":
        from art_core.inference.embedded import EmbeddedEngine

        if len(each) > 1:
            raise ConfigError(
                f"replicas={len(each)}: the embedded engine serves the very model that is trained, of which "
                "there is one; replicas need kind='vllm' (not found here, or no GPU) or kind='external'"
            )
        return [EmbeddedEngine(policy or load_policy(config, engine), each[0], served_model=config.name)]
    from art_core.inference.vllm import VLLMEngine
    from art_core.inference.vllm_start import StartDisplay

    if policy is not None:
        for one in each:
            limit_trainer(one, visible_devices())
    home = root / config.project / config.name
    several = len(each) > 1
    return [
        VLLMEngine(
            config.base_model,
            one,
            config.lora,
            served_model=config.name,
            log_dir=(home / f"replica-{number}" if several else home) / "logs",
            on_progress=StartDisplay(f"starting {config.name}" + (f", replica {number}" if several else "")),
        )
        for number, one in enumerate(each)
    ]


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would list them."""
    import torch

    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
