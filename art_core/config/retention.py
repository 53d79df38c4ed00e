"""Which checkpoints stay on disk."""

from pydantic import Field

from art_core.config.settings import Settings


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
