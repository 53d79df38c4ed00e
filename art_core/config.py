"""Every knob, typed, documented and validated. A setting that nothing reads has no place here.

Invariant: an unknown or out-of-range setting is refused with its name, before any work starts.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from art_core.errors import ConfigError

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
AdvantageName = Literal["mean", "std", "leave_one_out"]
BaselineName = Literal["node", "agent", "turn", "prompt"]
Averaging = Literal["rollout", "token", "constant"]
LevelName = Literal["token", "sequence"]
DTypeName = Literal["auto", "float32", "bfloat16"]
Strategy = Literal["ddp", "fsdp2"]
PathName = Literal["auto", "tree", "packed", "padded"]
PolicyName = Literal["peft", "unsloth"]
KernelsName = Literal["auto", "fused", "modules"]
ComputeName = Literal["auto", "model", "float32"]

AVERAGING: dict[LossName, Averaging] = {
    "grpo": "rollout",
    "dr_grpo": "constant",
    "dapo": "token",
    "gspo": "rollout",
    "cispo": "token",
}
"""How each loss's paper averages over tokens."""

CLIP_RANGE: dict[LossName, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.2, 4.0),
}
"""How far the ratio may fall below 1 and rise above it, by each loss's paper.

CISPO has no lower clip, and MiniMax-M1 does not say how high its upper one is: 5 is ScaleRL's (Khatri et al.
2025, arXiv:2510.13786).
"""


class Settings(BaseModel):
    """Base of all settings: frozen, nothing unknown; mistakes are `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as invalid:
            raise ConfigError(_explain(type(self), invalid)) from None

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, validated again."""
        return type(self)(**{**{k: getattr(self, k) for k in type(self).model_fields}, **changes})


def _explain(settings: type[BaseModel], invalid: ValidationError) -> str:
    lines: list[str] = []
    for error in invalid.errors():
        name = ".".join(str(part) for part in error["loc"]) or settings.__name__
        if error["type"] == "extra_forbidden":
            known = ", ".join(sorted(settings.model_fields))
            lines.append(f"{name}: no such setting; known: {known}")
        else:
            lines.append(f"{name}={error['input']!r}: {error['msg']}")
    return f"{settings.__name__}: " + "; ".join(lines)


class LoRAConfig(Settings):
    """The adapter that is trained (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1, le=512, description="rank of the update; 8 to 32 is usual")
    alpha: int = Field(default=32, ge=1, description="scale numerator: the update is alpha / rank * B A")
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="on the adapter's input in supervised steps; never in policy losses",
    )
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear", description="names of the layers to adapt, or PEFT's 'all-linear'"
    )


class GuardrailConfig(Settings):
    """What training must not do unnoticed; None switches a guardrail off."""

    max_kl: float | None = Field(
        default=1.0,
        gt=0,
        description="refuse an update whose mean KL(old, new) in nats, from the policy that sampled, is more",
    )
    max_norm_growth: float | None = Field(
        default=30.0,
        gt=1,
        description="refuse an update whose gradient norm is this many times the usual one",
    )
    max_clip_fraction: float | None = Field(
        default=0.5, gt=0, le=1, description="trouble: share of tokens whose ratio was clipped"
    )
    max_entropy_growth: float | None = Field(
        default=5.0, gt=1, description="trouble: entropy as a multiple of the first one (or of 0.1 nats)"
    )
    max_reward_drop: float | None = Field(
        default=0.5,
        gt=0,
        description="trouble: share of what the running mean reward had gained that it has lost again",
    )
    patience: int = Field(
        default=3, ge=1, description="calls in trouble, one after the other, that halve the learning rate"
    )
    calm: int = Field(
        default=10, ge=1, description="calls without trouble after which a lowered rate is doubled"
    )
    spread_patience: int | None = Field(
        default=10,
        ge=1,
        description="calls without any group whose rewards differ, after which training stops",
    )


class ReplayConfig(Settings):
    """Earlier groups that are trained again, with their importance weights.

    (Prioritised by spread and age; after Schaul et al. 2016, arXiv:1511.05952.)
    """

    groups: int = Field(default=2, ge=1, description="earlier groups that join each call of train")
    capacity: int = Field(default=64, ge=1, description="groups that are kept")
    max_age: int = Field(default=4, ge=1, description="versions after which a group is forgotten")
    half_life: float = Field(
        default=2.0, gt=0, description="versions after which a group is half as likely to be drawn"
    )


class RetentionConfig(Settings):
    """Which checkpoints stay on disk. Those of versions that are served always do."""

    last: int = Field(
        default=3, ge=2, description="newest ones; the current version and the one before are served"
    )
    best: int = Field(default=0, ge=0, description="those whose rollouts had the highest metric")
    metric: str = Field(
        default="reward_mean", description="what 'best' compares; a name of TrainReport.metrics"
    )
    every: int | None = Field(
        default=None, ge=1, description="also each version whose number this divides; None: no others"
    )


class TrainConfig(Settings):
    """How one call of ``train`` turns groups into an update."""

    learning_rate: float = Field(default=1e-5, gt=0, description="AdamW's peak learning rate")
    loss: LossName = Field(default="grpo", description="which policy loss")
    clip_low: float | None = Field(
        default=None, gt=0, lt=1, description="ratio is clipped below 1 - clip_low; None: the loss's own"
    )
    clip_high: float | None = Field(
        default=None, gt=0, description="ratio is clipped above 1 + clip_high; None: the loss's own"
    )
    importance_level: LevelName | None = Field(
        default=None,
        description="what the clipped ratio is of: each token, or a step's whole answer; None: the loss's "
        "own (gspo: sequence, others: token)",
    )
    loss_scale: Averaging | None = Field(
        default=None,
        description="tokens weigh the same over the whole update (token), or within their rollout "
        "(rollout), or a sum is divided by a constant (constant); None: as the loss's paper has it",
    )
    loss_length: int | None = Field(
        default=None,
        ge=1,
        description="tokens of a rollout that 'constant' divides by; None: those of the longest one",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of KL to the base model in the loss (k3)")
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="KL to the base model in nats that kl_coef is moved towards, from update to update; "
        "None: kl_coef stays",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="entropy in nats below which the bonus grows, update by update, and above which it "
        "shrinks; entropy_coef is its first weight; None: entropy_coef stays",
    )
    mask_truncated: bool = Field(
        default=False, description="leave answers out that max_tokens cut; their rollouts keep their rewards"
    )
    train_superseded: bool = Field(
        default=False, description="also train node executions that a retry or a resume replaced"
    )
    advantage: AdvantageName = Field(
        default="mean",
        description="reward minus the group's mean, that divided by the standard deviation, or reward "
        "minus the mean of the others",
    )
    baseline_per: BaselineName | None = Field(
        default=None,
        description="compare steps of the same node, agent, turn or prompt with each other; None: whole "
        "rollouts, or nodes where steps differ in what they are worth",
    )
    gamma: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="discount of later rewards: a step is worth what was earned from it on; None: a step "
        "is worth its own, its node's or its rollout's reward",
    )
    groups_per_update: int | None = Field(
        default=None, ge=1, description="groups in one optimizer step; None: all that were given"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the groups of one call")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient norm above which it is scaled down")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay")
    warmup_updates: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    total_updates: int | None = Field(
        default=None, ge=1, description="length of the linear decay to a tenth; None: constant after warm-up"
    )
    importance_cap: float | None = Field(
        default=2.0,
        gt=0,
        description="largest importance weight server/trainer, 2 for tokens, 3 to 5 for sequences; None: "
        "no correction",
    )
    importance_beyond: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="a weight above the cap is cut to it, or its tokens are left out of the update",
    )
    importance_floor: float | None = Field(
        default=None, gt=0, le=1, description="mask: weights below this are left out too; None: none are"
    )
    mismatch_level: LevelName = Field(
        default="token", description="importance weights of each token, or of a step's whole answer"
    )
    sft_weight: float = Field(
        default=0.0, ge=0, description="weight of the imitation loss that is mixed into each update"
    )
    sft_batch: int = Field(
        default=8, ge=1, description="answers of the given data set that each update imitates"
    )
    sft_own_best: int = Field(
        default=0, ge=0, description="best rollouts of each group that are imitated too (rejection sampling)"
    )
    policy: PolicyName = Field(
        default="peft",
        description="what runs the model in training: PEFT on transformers, with kernels and token trees of "
        "ours; or Unsloth, over rows",
    )
    path: PathName = Field(
        default="auto",
        description="how rollouts go before the model: as one token tree, as packed rows, as padded rows; "
        "auto: the fastest that is right, as measured once on the machine",
    )
    kernels: KernelsName = Field(
        default="auto",
        description="peft: fused kernels, or the modules of transformers and PEFT; auto: fused on CUDA for "
        "the models that they know",
    )
    adapter_compute: ComputeName = Field(
        default="auto",
        description="type in which fused kernels compute adapters, whose weights are float32: the "
        "model's, or float32; auto: the model's",
    )
    load_in_4bit: bool = Field(
        default=False,
        description="unsloth: 4-bit base weights (QLoRA); the server's are not, so that log-probabilities "
        "differ more",
    )
    token_budget: int | Literal["auto"] = Field(
        default="auto",
        description="most tokens in one forward pass; lowered by itself when memory runs out; auto: what "
        "fits on the GPU, as measured once; 1024 on a CPU",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="keep only the layers' inputs of a pass and compute the rest again: less memory, a "
        "third more time; auto: when smaller passes would not help",
    )
    optimizer_offload: bool = Field(
        default=False, description="keep the optimizer's state in the host's memory, and step there"
    )
    max_sample_tokens: int | None = Field(
        default=None,
        ge=2,
        description="prompt and answer of a step together; longer ones are over-long; None: what the model "
        "attends over",
    )
    overlong: Literal["error", "drop", "truncate"] = Field(
        default="error",
        description="over-long steps are an error, are left out, or lose the end of their answer",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="versions that a rollout may be behind the policy in training; older ones are left out; "
        "None: any number",
    )
    replay: ReplayConfig | None = Field(default=None, description="train earlier groups again; None: never")
    guardrails: GuardrailConfig = Field(
        default_factory=GuardrailConfig,
        description="when updates are refused and training is slowed or ended",
    )

    @field_validator("token_budget")
    @classmethod
    def _large_enough(cls, budget: int | str) -> int | str:
        if isinstance(budget, int) and budget < 16:
            raise ValueError("at least 16 tokens must fit into a pass")
        return budget

    @model_validator(mode="after")
    def _read_by_something(self) -> Self:
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target moves kl_coef by shares of it: give kl_coef > 0 to start from")
        if self.importance_floor is not None and self.importance_beyond != "mask":
            raise ValueError("importance_floor masks: it needs importance_beyond='mask'")
        if self.loss_length is not None and self.averaging != "constant":
            raise ValueError(
                f"loss_length is for loss_scale='constant'; loss={self.loss!r} averages by {self.averaging!r}"
            )
        if self.load_in_4bit and self.policy != "unsloth":
            raise ValueError("load_in_4bit is Unsloth's: give policy='unsloth'")
        if self.policy == "unsloth" and self.path == "tree":
            raise ValueError("Unsloth's attention takes rows: give path='packed', 'padded' or 'auto'")
        if self.sft_own_best and not self.sft_weight:
            raise ValueError("sft_own_best needs sft_weight > 0")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it: as given, or as the loss's paper has it."""
        low, high = CLIP_RANGE[self.loss]
        return self.clip_low or low, self.clip_high or high

    @property
    def averaging(self) -> Averaging:
        """How tokens are averaged: by ``loss_scale``, or as the loss's paper has it."""
        return self.loss_scale or AVERAGING[self.loss]

    @property
    def ratio_level(self) -> LevelName:
        """What the clipped ratio is of: by ``importance_level``, or as the loss's paper has it."""
        return self.importance_level or ("sequence" if self.loss == "gspo" else "token")


class ParallelConfig(Settings):
    """Processes that train, apart from the one that asks for it."""

    processes: int = Field(default=1, ge=1, le=64, description="how many; each has a GPU where there are any")
    strategy: Strategy = Field(
        default="ddp",
        description="every process holds the model (ddp), or its layers' frozen weights are spread (fsdp2)",
    )
    devices: tuple[int, ...] | None = Field(
        default=None, description="GPUs, numbered as this process sees them; None: the first ones"
    )
    timeout: float = Field(
        default=600.0, gt=0, description="seconds that one process waits for another before all are ended"
    )

    @model_validator(mode="after")
    def _one_device_each(self) -> Self:
        if self.devices is not None and len(set(self.devices)) != self.processes:
            raise ValueError(
                f"processes={self.processes} need as many different devices; given: {self.devices}"
            )
        return self


class EngineConfig(Settings):
    """How the policy is served."""

    kind: Literal["auto", "embedded", "vllm", "external"] = Field(
        default="auto",
        description="auto: vLLM where CUDA and vLLM are present, else embedded; external: servers that "
        "somebody else runs, at base_url",
    )
    base_url: str | tuple[str, ...] | None = Field(
        default=None, description="external: where it answers, ending in /v1; several for several replicas"
    )
    api_key: str | None = Field(default=None, repr=False, description="external: sent as the bearer token")
    replicas: int = Field(
        default=1, ge=1, description="vLLM: servers to start, with a gateway in front that shares them out"
    )
    gateway: bool = Field(
        default=False,
        description="put a gateway in front, so that stock clients are captured and metrics are served; "
        "several replicas, and servers of somebody else's, always have one",
    )
    devices: tuple[str, ...] | None = Field(
        default=None,
        description="vLLM: CUDA_VISIBLE_DEVICES of each replica, such as ('0,1', '2,3'); None: one replica "
        "has all, several have tensor_parallel_size * data_parallel_size each",
    )
    dtype: DTypeName = Field(
        default="auto", description="weights' type; auto: bfloat16, float32 if deterministic"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; loopback unless you know why not"
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="port to listen on; None: any free one"
    )
    max_model_len: int = Field(
        default=4096, ge=16, description="most tokens of prompt and completion together"
    )
    max_batch: int = Field(default=64, ge=1, description="most sequences decoded together")
    gpu_memory_utilization: float = Field(
        default=0.3, gt=0, le=1, description="share of the GPU that vLLM takes"
    )
    colocate: bool = Field(
        default=False,
        description="vLLM: it sleeps while the trainer trains on the same GPU, so that each has the whole "
        "GPU in its turn; False: both stay, the trainer in what gpu_memory_utilization leaves",
    )
    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="vLLM: versions are adapters beside the base model, several at a time, or (merged) full "
        "weights that take the place of the version before: no cost per token, one at a time",
    )
    prefix_cache_tokens: int = Field(
        default=65536,
        ge=0,
        description="embedded: most tokens whose keys and values are in memory, those of running requests "
        "and the prefix cache together; never less than max_model_len, so that one request fits",
    )
    deterministic: bool = Field(
        default=False,
        description="embedded: batch-invariant decoding, so a seed gives the same tokens twice (slower)",
    )
    enforce_eager: bool = Field(
        default=False, description="vLLM: no CUDA graphs, quicker to start, slower after"
    )
    max_loras: int = Field(
        default=4, ge=1, description="vLLM: versions answering at one moment; at least staleness + 2"
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="vLLM: most versions served side by side; None: 4 * max_loras"
    )
    max_lora_rank: int | None = Field(
        default=None, ge=1, description="vLLM: room for adapters up to this rank; None: LoRAConfig.rank"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="vLLM: GPUs that share each layer, for a model too large for one"
    )
    data_parallel_size: int = Field(
        default=1, ge=1, description="vLLM: copies of the model that share the requests of one server"
    )
    chat_template: Path | None = Field(
        default=None, description="vLLM: a file to render messages with; None: the model's own template"
    )
    tool_call_parser: str | None = Field(
        default="auto",
        description="what reads tool calls out of answers; auto: by model (embedded: always hermes); None: "
        "requests with tools are refused",
    )
    reasoning_parser: str | None = Field(
        default="auto",
        description="what splits reasoning from content; auto: by model; None: it stays in the content",
    )
    start_timeout: float = Field(default=600.0, gt=0, description="seconds until a server must answer")
    hang_timeout: float = Field(
        default=30.0, gt=0, description="vLLM: seconds without an answer after which it counts as dead"
    )
    stall_timeout: float = Field(
        default=300.0,
        gt=0,
        description="vLLM: seconds without an engine step while requests run, likewise",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="vLLM: how often it is restarted when it dies, in restart_window"
    )
    restart_window: float = Field(
        default=3600.0, gt=0, description="vLLM: seconds after which a restart is forgotten"
    )
    python: Path | None = Field(default=None, description="vLLM: interpreter of another environment")
    packed_tokens: bool = Field(
        default=True,
        description="vLLM: send exact tokens packed, by a plugin of ours inside the server; False: spelled "
        "out as in stock vLLM, which halves the throughput where many requests run at once",
    )
    extra_args: tuple[str, ...] = Field(
        default=(), description="vLLM: further command-line arguments, as they are"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.kind == "external") != bool(self.base_urls):
            raise ValueError("base_url and kind='external' belong together: give both or neither")
        if self.api_key is not None and not self.base_urls:
            raise ValueError("api_key is for kind='external'; servers of ours ask for none")
        if self.publish == "merged" and self.kind in ("embedded", "external"):
            raise ValueError(
                f"publish='merged' with kind={self.kind!r}: only a vLLM that is started here reads new "
                "weights"
            )
        if self.replicas > 1 and self.kind in ("embedded", "external"):
            raise ValueError(
                f"replicas={self.replicas} with kind={self.kind!r}: replicas are vLLM servers that are "
                "started here; for servers that run already, give several addresses as base_url"
            )
        if self.devices is not None and len(self.devices) != self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, but devices={self.devices} are for {len(self.devices)}"
            )
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Addresses of servers that somebody else runs."""
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url or ()


class TrainableModelConfig(Settings):
    """A model that learns, by the names that people know.

    ``rollout_length`` is the most policy calls that one trajectory may make; ``batch_size`` is how many
    trajectories (of ``start_trajectory``) make one optimizer step in ``train()`` without arguments.
    """

    base_model: str = Field(description="a model hub name or a directory")
    project: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    name: str = Field(default="agent", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    lora_rank: int = Field(default=16, ge=1, le=512)
    lora: LoRAConfig | None = Field(default=None, description="in full; None: LoRAConfig(rank=lora_rank)")
    learning_rate: float = Field(default=1e-5, gt=0)
    batch_size: int = Field(default=8, ge=1)
    rollout_length: int | None = Field(default=None, ge=1)
    train: TrainConfig | None = Field(
        default=None, description="training in full; None: TrainConfig(learning_rate=...)"
    )
    seed: int = Field(default=0, ge=0, description="of the adapter's first weights and of shuffling")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = self.model_fields_set
        if self.lora is not None and "lora_rank" in given and self.lora.rank != self.lora_rank:
            raise ValueError(f"lora_rank={self.lora_rank} contradicts lora.rank={self.lora.rank}; give one")
        rate = self.train.learning_rate if self.train is not None else self.learning_rate
        if "learning_rate" in given and self.learning_rate != rate:
            raise ValueError(
                f"learning_rate={self.learning_rate} contradicts train.learning_rate={rate}; give one"
            )
        return self

    @property
    def lora_config(self) -> LoRAConfig:
        """The adapter's settings, whichever way they were given."""
        return self.lora or LoRAConfig(rank=self.lora_rank, alpha=2 * self.lora_rank)

    @property
    def train_config(self) -> TrainConfig:
        """Training's settings, whichever way they were given."""
        return self.train or TrainConfig(learning_rate=self.learning_rate)
