"""The model that learns: what it is made of, and the names that it is kept under.

Invariant: what can be given in short and in full is given once, or the same both times.
"""

from typing import Any, Self

from pydantic import Field, model_validator

from art_core.config.lora import LoRAConfig
from art_core.config.settings import Settings
from art_core.config.train import TrainConfig

FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What models and projects may be called: their names are directories, and parts of URLs."""


class TrainableModelConfig(Settings):
    """A model that learns, by the names that people know.

    ``rollout_length`` is the most policy calls that one trajectory may make; ``batch_size`` is how many
    trajectories (of ``start_trajectory``) make one optimizer step in ``train()`` without arguments.
    """

    base_model: str = Field(description="a model hub name or a directory")
    project: str = Field(default="default", pattern=FILE_NAME)
    name: str = Field(default="agent", pattern=FILE_NAME)
    lora_rank: int | None = Field(default=16, ge=1, le=512, description="None: there is no adapter")
    lora: LoRAConfig | None = Field(
        default_factory=lambda given: LoRAConfig(rank=given["lora_rank"], alpha=2 * given["lora_rank"]),
        description="the adapter in full; left out: one of rank lora_rank; None: no adapter, all weights are "
        "trained (full fine-tuning, for small models)",
    )
    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    batch_size: int = Field(default=8, ge=1)
    rollout_length: int | None = Field(default=None, ge=1)
    train: TrainConfig | None = Field(
        default=None, description="training in full; None: TrainConfig(learning_rate=...)"
    )
    seed: int = Field(default=0, ge=0, description="of the adapter's first weights and of shuffling")

    @model_validator(mode="before")
    @classmethod
    def _rank_of_lora(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "lora" not in given or "lora_rank" in given:
            return given
        settings: dict[str, Any] = {**given}
        lora: Any = settings["lora"]
        default = LoRAConfig.model_fields["rank"].default
        rank = lora.get("rank", default) if isinstance(lora, dict) else getattr(lora, "rank", None)
        return {**settings, "lora_rank": rank}

    @model_validator(mode="before")
    @classmethod
    def _rate_of_train(cls, given: Any) -> Any:
        """The rate in short is that of ``train``: a record with another one misleads its readers."""
        if not isinstance(given, dict) or "learning_rate" in given:
            return given
        settings: dict[str, Any] = {**given}
        train: Any = settings.get("train")
        name = "learning_rate"
        rate: Any = train.get(name) if isinstance(train, dict) else getattr(train, name, None)
        return settings if rate is None else {**settings, "learning_rate": rate}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = self.model_fields_set
        if self.lora is None and self.lora_rank is not None:
            raise ValueError(f"lora=None trains all weights, lora_rank={self.lora_rank} an adapter; give one")
        if self.lora is not None and self.lora.rank != self.lora_rank:
            raise ValueError(f"lora_rank={self.lora_rank} contradicts lora.rank={self.lora.rank}; give one")
        rate = self.train.learning_rate if self.train is not None else self.learning_rate
        if "learning_rate" in given and self.learning_rate != rate:
            raise ValueError(
                f"learning_rate={self.learning_rate} contradicts train.learning_rate={rate}; give one"
            )
        return self

    @property
    def train_config(self) -> TrainConfig:
        """Training's settings, whichever way they were given."""
        return self.train or TrainConfig(learning_rate=self.learning_rate)
