"""Which earlier groups are trained again."""

from pydantic import Field

from art_core.config.settings import Settings


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
