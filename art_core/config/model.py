"""The model that learns: what it is made of, and the names that it is kept under.

Invariant: what can be given in short and in full is given once, or the same both times.
"""

from typing import Self

from pydantic import Field, model_validator

from art_core.config.lora import LoRAConfig
from art_core.config.settings import Settings
from art_core.config.train import TrainConfig


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
