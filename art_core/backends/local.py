"""LocalBackend: serves and trains on this machine.

Invariant: a model that was trained here before goes on from its last checkpoint, and one that cannot be
registered leaves neither trainers nor the record open.

Everything lies under ``root``: ``<project>.db`` is the record, ``<project>/<model>/checkpoints`` holds
one directory per version with the adapter and the optimizer.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.backends.making import (
    check_weights,
    engine_kind,
    load_policy,
    make_engine,
    make_placement,
    make_trainer,
)
from art_core.backends.registration import LocalRegistration
from art_core.backends.serving import SERVED_VERSIONS
from art_core.config import EngineConfig, ParallelConfig, RetentionConfig, TrainableModelConfig
from art_core.config.model import FILE_NAME
from art_core.errors import CheckpointError, ConfigError
from art_core.observe.sinks import MetricSink, as_sinks
from art_core.store import Store
from art_core.sync import run_sync

if TYPE_CHECKING:
    from art_core.training.grpo import Trainer
    from art_core.training.launch import TrainerProcesses


class LocalBackend:
    """Serves and trains on this machine.

    Args:
        root: directory of the record and the checkpoints.
        store_url: a database for the record in place of a file in ``root``, as in
            ``postgresql://user@host/name``; it is one project's. The command line reads it with ``--url``.
        engine: how to serve, in full; or give its settings as keywords (`EngineConfig` documents each).
        parallel: train in processes of their own, one or several, each with a GPU; None: in this one.
        keep_checkpoints: which checkpoints stay on disk: that many of the newest, or a `RetentionConfig`.
        sinks: where metrics go beside the record: names (``jsonl``, ``tensorboard``, ``wandb``, ``mlflow``,
            ``prometheus``) or sinks of `art_core.observe.sinks`.

    Raises:
        ConfigError: settings contradict each other, or a sink is unknown or its package not installed.
    """

    def __init__(
        self,
        *,
        root: Path | str = ".art",
        store_url: str | None = None,
        engine: EngineConfig | None = None,
        parallel: ParallelConfig | None = None,
        keep_checkpoints: int | RetentionConfig = 3,
        sinks: Sequence[str | MetricSink] = (),
        **settings: Any,
    ) -> None:
        if engine is not None and settings:
            raise ConfigError(
                f"give engine=EngineConfig(...) or keywords, not both (got {', '.join(settings)})"
            )
        if isinstance(keep_checkpoints, int) and keep_checkpoints < SERVED_VERSIONS:
            raise ConfigError(
                f"keep_checkpoints={keep_checkpoints}: at least {SERVED_VERSIONS}, the served ones"
            )
        self.sinks = as_sinks(sinks)
        self.root = Path(root)
        self.store_url = store_url
        self.engine_config = engine or EngineConfig(**settings)
        self.parallel = parallel
        self.keep_checkpoints = (
            RetentionConfig(last=keep_checkpoints) if isinstance(keep_checkpoints, int) else keep_checkpoints
        )

    async def afork(self, project: str, source: str, name: str, *, version: int | None = None) -> int:
        """Let a model begin where another one is, or was; the other one is not touched.

        Register a `TrainableModel` of the new name afterwards: it goes on from there.

        Args:
            project: of both models.
            source: the model to begin from.
            name: of the new one.
            version: which checkpoint of the source; None: the newest.

        Returns:
            The version that the new model begins with.

        Raises:
            CheckpointError: there is no such checkpoint, or the new model has checkpoints already.
            ConfigError: no model can have the new name.
        """
        from art_core.training import checkpoints

        if not re.fullmatch(FILE_NAME, name):
            raise ConfigError(
                f"a fork cannot be named {name!r}: use letters, digits, '.', '_' and '-', and begin with a "
                "letter or digit"
            )
        kept = {
            checkpoints.number_of(p): p
            for p in checkpoints.list_checkpoints(self._directory(project, source))
        }
        chosen = max(kept, default=None) if version is None else version
        if chosen is None or chosen not in kept:
            wanted = "no checkpoint" if version is None else f"no checkpoint of version {version!r}"
            raise CheckpointError(
                f"{source!r} has {wanted}; there are "
                f"{', '.join(map(str, sorted(kept))) or 'none'} in {self._directory(project, source)}"
            )
        await asyncio.to_thread(checkpoints.fork, kept[chosen], self._directory(project, name))
        return chosen

    def fork(self, project: str, source: str, name: str, *, version: int | None = None) -> int:
        """Let a model begin where another one is; see `afork`."""
        return run_sync(lambda: self.afork(project, source, name, version=version))

    def _directory(self, project: str, name: str) -> Path:
        return self.root / project / name / "checkpoints"

    async def aregister(self, config: TrainableModelConfig) -> LocalRegistration:
        """Load and serve a model.

        Raises:
            ConfigError: the base model is unknown, or its directory belongs to another base model.
            EngineError: the server did not come up.
            StoreError: the project's record cannot be opened.
            TrainerProcessError: a process that is to train did not come up.
        """
        check_weights(config, self.engine_config, self.parallel)
        store = Store.open(config.project, self.root, url=self.store_url)
        trainer: Trainer | TrainerProcesses | None = None
        try:
            placement = make_placement(self.parallel, self.engine_config)
            # A server and trainers in other processes leave nothing for a model in this one to do.
            elsewhere = placement is not None and engine_kind(self.engine_config) != "embedded"
            policy = None if elsewhere else await asyncio.to_thread(load_policy, config, self.engine_config)
            trainer = await asyncio.to_thread(
                make_trainer, policy, config, self.engine_config, placement, self.root
            )
            registration = LocalRegistration(
                config=config,
                store=store,
                trainer=trainer,
                engine=make_engine(policy, config, self.engine_config, self.root),
                directory=self._directory(config.project, config.name),
                keep_checkpoints=self.keep_checkpoints,
                apart=placement is not None and placement.apart,
                sinks=self.sinks,
            )
            await registration.astart()
        except BaseException:
            if trainer is not None:
                trainer.close()
            store.close()
            raise
        return registration
