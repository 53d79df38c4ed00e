"""Processes that train: how many, on which GPUs, and how they share the model."""

from typing import Literal, Self

from pydantic import Field, model_validator

from art_core.config.settings import Settings

Strategy = Literal["ddp", "fsdp2"]


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
