"""The adapter that is trained."""

from pydantic import Field

from art_core.config.settings import Settings


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
