"""LocalBackend: serves and trains on this machine.

Invariant: a version is written to disk before it is served, and served before it is current; a model
that was trained here before goes on from its last checkpoint.

Everything lies under ``root``: ``<project>.db`` is the record, ``<project>/<model>/checkpoints`` holds
one directory per version with the adapter and the optimizer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.config import EngineConfig, TrainableModelConfig
from art_core.errors import CheckpointError, ConfigError
from art_core.inference.endpoint import VersionLeases
from art_core.inference.engine import Engine
from art_core.recording import Sink
from art_core.selection import Train
from art_core.store import RunState, Store
from art_core.types import PolicyVersion, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.policy import PeftPolicy
    from art_core.training.report import TrainReport

logger = logging.getLogger(__name__)

SERVED_VERSIONS = 2
"""The current version, and the one before it for rollouts that are still going."""


class LocalBackend:
    """Serves and trains on this machine.

    Args:
        root: directory of the record and the checkpoints.
        engine: how to serve, in full; or give its settings as keywords (`EngineConfig` documents each).
        keep_checkpoints: how many of the newest checkpoints stay on disk.
    """

    def __init__(
        self,
        *,
        root: Path | str = ".art",
        engine: EngineConfig | None = None,
        keep_checkpoints: int = 3,
        **settings: Any,
    ) -> None:
        if engine is not None and settings:
            raise ConfigError(
                f"give engine=EngineConfig(...) or keywords, not both (got {', '.join(settings)})"
            )
        if keep_checkpoints < SERVED_VERSIONS:
            raise ConfigError(
                f"keep_checkpoints={keep_checkpoints}: at least {SERVED_VERSIONS}, the served ones"
            )
        self.root = Path(root)
        self.engine_config = engine or EngineConfig(**settings)
        self.keep_checkpoints = keep_checkpoints

    async def aregister(self, config: TrainableModelConfig) -> "LocalRegistration":
        """Load and serve a model.

        Raises:
            ConfigError: the base model is unknown, or its directory belongs to another base model.
            EngineError: the server did not come up.
            StoreError: the project's record cannot be opened.
        """
        store = Store.open(config.project, self.root)
        try:
            policy = await asyncio.to_thread(load_policy, config, self.engine_config)
            registration = LocalRegistration(
                config=config,
                store=store,
                policy=policy,
                engine=make_engine(policy, config, self.engine_config, self.root),
                directory=self.root / config.project / config.name / "checkpoints",
                keep_checkpoints=self.keep_checkpoints,
            )
            await registration.astart()
        except BaseException:
            store.close()
            raise
        return registration


def engine_kind(config: EngineConfig) -> str:
    """What ``auto`` stands for on this machine."""
    if config.kind != "auto":
        return config.kind
    import torch

    return "vllm" if torch.cuda.is_available() and find_spec("vllm") else "embedded"


def load_policy(config: TrainableModelConfig, engine: EngineConfig) -> "PeftPolicy":
    """The base model with the adapter that is trained."""
    import torch

    from art_core.training.policy import PeftPolicy

    dtype = "float32" if engine.deterministic and engine.dtype == "auto" else engine.dtype
    return PeftPolicy.load(
        config.base_model,
        config.lora_config,
        dtype=dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=config.seed,
    )


def make_engine(
    policy: "PeftPolicy", config: TrainableModelConfig, engine: EngineConfig, root: Path
) -> Engine:
    """The engine that the settings ask for; nothing is started."""
    if engine_kind(engine) == "embedded":
        from art_core.inference.embedded import EmbeddedEngine

        return EmbeddedEngine(policy, engine, served_model=config.name)
    from art_core.inference.vllm import VLLMEngine

    return VLLMEngine(
        config.base_model,
        engine,
        config.lora_config,
        served_model=config.name,
        log_dir=root / config.project / config.name / "logs",
    )


class LocalRegistration:
    """One model, served and trained on this machine. Is the model's `PolicyEndpoint`, too."""

    def __init__(
        self,
        *,
        config: TrainableModelConfig,
        store: Store,
        policy: "PeftPolicy",
        engine: Engine,
        directory: Path,
        keep_checkpoints: int,
    ) -> None:
        from art_core.training.grpo import Trainer

        self.config = config
        self.store = store
        self.engine = engine
        self.api_key = "none"
        self._policy = policy
        self._trainer: Trainer = Trainer(policy, config.train_config, seed=config.seed)
        self._directory = directory
        self._keep = keep_checkpoints
        self._leases = VersionLeases()
        self._training = asyncio.Lock()
        self._version = PolicyVersion(config.name, 0)
        self._run = store.begin_run(config.name, config.model_dump(mode="json"))
        self._sink = store.sink(self._run)

    # -- endpoint ----------------------------------------------------------------------------------

    @property
    def endpoint(self) -> "LocalRegistration":
        """Where the model answers."""
        return self

    @property
    def name(self) -> str:
        """The policy's name, without a version."""
        return self.config.name

    @property
    def base_url(self) -> str:
        """The server, ending in ``/v1``."""
        return self.engine.base_url

    @property
    def sink(self) -> Sink:
        """The project's store."""
        return self._sink

    def current_version(self) -> PolicyVersion:
        """The newest version that is served."""
        return self._version

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        """Hold a version for the length of a call or of a rollout."""
        return self._leases.lease(version or self._version)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """A trajectory from the record."""
        return self.store.trajectory(trajectory_id)

    # -- life --------------------------------------------------------------------------------------

    async def astart(self) -> None:
        """Restore the last checkpoint, if there is one, and serve."""
        from art_core.training import checkpoints

        last = checkpoints.latest(self._directory)
        adapter: Path | None = None
        if last is not None:
            checkpoint = await asyncio.to_thread(checkpoints.load, last, self._trainer)
            self._version = PolicyVersion(self.name, checkpoint.version)
            adapter = checkpoint.adapter_dir
            logger.info("model %s goes on from version %s", self.name, self._version)
        await self.engine.start()
        try:
            await self.engine.publish(self._version, adapter)
        except BaseException:
            await self.engine.close()
            raise

    async def aclose(self) -> None:
        """Stop serving and close the record."""
        await self.engine.close()
        self.store.end_run(self._run, RunState.FINISHED)
        self.store.close()

    # -- learning ----------------------------------------------------------------------------------

    async def atrain(
        self,
        batches: Sequence[Sequence[TrajectoryGroup]],
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """One call of the trainer per batch, then publish what came out."""
        from art_core.training.report import merge_reports

        for batch in batches:
            for group in batch:
                self.store.save_group(group, run_id=self._run)
        return await self._learn(
            lambda: merge_reports(
                [self._trainer.train(batch, train=train, imitate=imitate) for batch in batches]
            )
        )

    async def asft(self, conversations: Sequence[Any], **options: Any) -> "TrainReport":
        """Supervised fine-tuning, then publish what came out."""
        return await self._learn(lambda: self._trainer.sft(conversations, **options))

    async def _learn(self, train: "Callable[[], TrainReport]") -> "TrainReport":
        async with self._training:
            await self.engine.pause()
            try:
                report = await asyncio.to_thread(train)
                for event in report.events:
                    self.store.add_event(self._run, event.kind, event.message, asdict(event))
                if report.updated:
                    await self._publish()
            finally:
                await self.engine.resume()
            self.store.log_metrics(self._run, self._version.number, report.metrics)
            return report

    async def _publish(self) -> None:
        from art_core.training import checkpoints

        version = PolicyVersion(self.name, self._version.number + 1)
        checkpoint = await asyncio.to_thread(
            checkpoints.save, self._directory, self._trainer, version=version.number
        )
        await self.engine.publish(version, checkpoint.adapter_dir)
        self.store.add_version(version, checkpoint.adapter_dir, run_id=self._run)
        self._version = version
        for old in self.engine.versions():
            if version.number - old.number >= SERVED_VERSIONS and not self._leases.held(old):
                await self.engine.retire(old)
        served = {v.number for v in self.engine.versions()}
        await asyncio.to_thread(checkpoints.prune, self._directory, self._keep, served)

    async def asave_adapter(self, directory: Path) -> None:
        """Write the adapter in training as a PEFT directory.

        Raises:
            CheckpointError: something else lies at that path.
        """
        if directory.exists() and not (directory.is_dir() and _is_adapter(directory)):
            raise CheckpointError(f"{directory} exists and is no adapter directory; choose another path")
        async with self._training:
            await asyncio.to_thread(self._policy.save_adapter, directory)


def _is_adapter(directory: Path) -> bool:
    return not any(directory.iterdir()) or (directory / "adapter_config.json").exists()
