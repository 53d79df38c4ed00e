"""How one call of ``train`` turns groups into an update.

Invariant: a setting that needs another one is refused without it. What each loss's paper chooses stands
beside.
"""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from art_core.config.guardrails import GuardrailConfig
from art_core.config.replay import ReplayConfig
from art_core.config.settings import Settings

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
AdvantageName = Literal["mean", "std", "leave_one_out"]
BaselineName = Literal["node", "agent", "turn", "prompt"]
Averaging = Literal["rollout", "token", "constant"]
LevelName = Literal["token", "sequence"]
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


class TrainConfig(Settings):
    """How one call of ``train`` turns groups into an update."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="AdamW's peak learning rate")
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
        "third more time; auto: when smaller passes would not help, or a sharded model's would not fit",
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
    success_reward: float | None = Field(
        default=None,
        description="least reward of a rollout that succeeded, for the metric success_rate; rollouts that "
        "say themselves whether they succeeded need none",
    )
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
