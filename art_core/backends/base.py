"""The Backend protocol: where a model is served and trained.

Invariant: after `atrain` returned, the endpoint's current version is the trained one, and what it was
trained from is in the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from art_core.config import TrainableModelConfig
from art_core.inference.endpoint import PolicyEndpoint
from art_core.inference.gateway import Gateway
from art_core.inference.pinned import PinnedEndpoint
from art_core.selection import Train
from art_core.training.knobs import Knobs, Turn
from art_core.types import PolicyVersion, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.store import Store
    from art_core.training.report import TrainReport


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """The update that made a model's newest version.

    Attributes:
        version: the version that it made.
        groups: ids of the groups that it was made from, in their order; none after fine-tuning.
        report: what training said.
    """

    version: PolicyVersion
    groups: tuple[str, ...]
    report: "TrainReport"


class Registration(Protocol):
    """One model on one backend: it answers, and it can be trained."""

    @property
    def store(self) -> "Store":
        """The record of its project."""
        ...

    @property
    def last_update(self) -> LastUpdate | None:
        """What the newest version was made from; None for a version that no training made."""
        ...

    @property
    def endpoint(self) -> PolicyEndpoint:
        """Where it answers."""
        ...

    @property
    def gateway(self) -> Gateway:
        """What stands in front of the servers.

        Raises:
            ConfigError: nothing does.
        """
        ...

    async def atrain(
        self,
        batches: Sequence[Sequence[TrajectoryGroup]],
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """One GRPO update per batch of groups, of the chosen steps, then publish the new version."""
        ...

    async def asft(self, conversations: Sequence[Any], **options: Any) -> "TrainReport":
        """Supervised fine-tuning, then publish the new version."""
        ...

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Keep numbers of somebody else's beside those of the newest training step."""
        ...

    async def aserve(self, number: int) -> PinnedEndpoint:
        """Serve a version beside the current one, for as long as the endpoint is open.

        Raises:
            CheckpointError: its adapter is not on disk any more.
            EngineError: the engine refuses it.
        """
        ...

    @property
    def knobs(self) -> Knobs:
        """Settings as they were turned while the run goes on."""
        ...

    def turn(self, **values: Turn) -> None:
        """Turn knobs, from the next call of `atrain` on.

        Raises:
            ConfigError: there is no such knob, or it does not go there.
        """
        ...

    async def aresume_training(self) -> None:
        """Train on after a guardrail's stop."""
        ...

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """A trajectory from the record.

        Raises:
            StoreError: it holds none with this id.
        """
        ...

    async def asave_adapter(self, directory: Path) -> None:
        """Write the adapter in training as a PEFT directory."""
        ...

    async def asave_model(self, directory: Path) -> None:
        """Write the model as trained as a transformers directory."""
        ...

    async def aclose(self, failure: BaseException | None = None) -> None:
        """Stop serving; what was trained is on disk.

        Args:
            failure: what ended the run before its time, if something did; the record then says so.
        """
        ...


class Backend(Protocol):
    """Makes models answer and learn."""

    async def aregister(self, config: TrainableModelConfig) -> Registration:
        """Load and serve a model; a model that was trained here before goes on from its last checkpoint."""
        ...
