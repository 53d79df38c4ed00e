"""LocalRegistration: one model that is served and trained on this machine.

Invariant: a version is written to disk before it is served, and served before it is current; one call trains
at a time, and what it was trained from is in the record first.

Rollouts are answered by the engine's current version. `atrain` records groups, lets the trainer learn from
them, writes a checkpoint, and publishes it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.backends.base import LastUpdate
from art_core.backends.group_training import GroupTraining
from art_core.backends.run_record import RunRecord
from art_core.backends.serving import Serving, write_base_adapter
from art_core.backends.training_turn import TrainingTurn
from art_core.config import RetentionConfig, TrainableModelConfig
from art_core.errors import ConfigError, TrainingStoppedError
from art_core.inference.availability import Availability, availability_of
from art_core.inference.endpoint import raw_logprobs_of
from art_core.inference.engine import Engine, Eventful
from art_core.inference.gateway import Gateway
from art_core.inference.pinned import PinnedEndpoint
from art_core.inference.replicas import ReplicaSet
from art_core.inference.vllm_merged import base_directory
from art_core.inference.vllm_metrics import ServingMonitor, metric_sources
from art_core.observe.phases import Training
from art_core.observe.sinks.base import MetricSink
from art_core.recording import Sink
from art_core.seeing_through import seen_through
from art_core.selection import Train
from art_core.store import Store
from art_core.training.knobs import KnobBoard, Knobs, Turn, Turned
from art_core.types import PolicyVersion, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.grpo import Trainer
    from art_core.training.launch import TrainerProcesses
    from art_core.training.report import TrainReport

logger = logging.getLogger(__name__)

RAW_LOGPROBS = (
    "the server's log-probabilities are the model's own, before temperature: steps that are sampled at other "
    "temperatures than 1 are trained without them (vLLM: --logprobs-mode processed_logprobs mends it)"
)
"""The event of a server that tells others than those of what it sampled."""


class LocalRegistration:
    """One model, served and trained on this machine. Is the model's `PolicyEndpoint`, too."""

    def __init__(
        self,
        *,
        config: TrainableModelConfig,
        store: Store,
        trainer: "Trainer | TrainerProcesses",
        engine: Engine,
        directory: Path,
        keep_checkpoints: RetentionConfig,
        apart: bool = False,
        sinks: Sequence[MetricSink] = (),
    ) -> None:
        self.config = config
        self.store = store
        self.engine = engine
        self.api_key = "none"
        self._trainer = trainer
        self._apart = apart
        self._directory = directory
        self.last_update: LastUpdate | None = None
        self._board = KnobBoard(directory.parent, config.train_config)
        self._groups = GroupTraining(config, trainer, self._board, keep_checkpoints.metric)
        self._serving = Serving(
            config.name,
            engine,
            directory,
            keep_checkpoints,
            base_adapter=self._base_adapter(),
            scores=self._groups.scores,
        )
        self._stopped = False
        self._training = asyncio.Lock()
        self._turn = TrainingTurn(config.name, directory)
        self._monitor = ServingMonitor(())
        self._record = RunRecord(store, config, directory, sinks)
        if isinstance(engine, ReplicaSet):
            engine.bind(self)
        if isinstance(engine, Eventful):
            engine.on_event = self._record.engine_event

    def _base_adapter(self) -> Callable[[], Path] | None:
        """How an engine is told to serve the base model, if it has to be told."""
        from art_core.inference.embedded import EmbeddedEngine

        engines = self.engine.engines if isinstance(self.engine, ReplicaSet) else (self.engine,)
        if not any(isinstance(engine, EmbeddedEngine) for engine in engines):
            return None
        if self.config.lora is None:
            return lambda: base_directory(self.config.base_model)
        directory = self._directory.with_name("base-adapter")
        return lambda: write_base_adapter(self._trainer.policy.save_weights, directory)

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
        return self._record.sink

    def current_version(self) -> PolicyVersion:
        """The newest version that is served."""
        return self._serving.current

    @property
    def availability(self) -> Availability:
        """Whether the server can be asked now; it is restarted when it dies."""
        return availability_of(self.engine)

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        """Hold a version for the length of a call or of a rollout.

        Raises:
            EngineError: (when entered) it is not served any more.
        """
        return self._serving.lease(version)

    async def aserve(self, number: int) -> PinnedEndpoint:
        """Serve a version beside the current one, for as long as the endpoint is open.

        Raises:
            CheckpointError: its checkpoint is not on disk any more.
            EngineError: the engine refuses it.
        """
        async with self._training:  # whose GPU a server may be asleep on
            release = await self._serving.hold(number)
        return PinnedEndpoint(self, PolicyVersion(self.name, number), release)

    @property
    def gateway(self) -> Gateway:
        """What stands in front of the servers.

        Raises:
            ConfigError: nothing does.
        """
        if not isinstance(self.engine, ReplicaSet):
            raise ConfigError(
                f"model {self.name!r} is served without a gateway; register it with "
                "LocalBackend(gateway=True)"
            )
        return self.engine.gateway

    @property
    def raw_logprobs(self) -> bool:
        """Whether the server's log-probabilities are the model's own, before temperature."""
        return raw_logprobs_of(self.engine)

    def wire_name(self, version: PolicyVersion) -> str:
        """The name by which the server knows a version."""
        return self.engine.wire_name(version) if isinstance(self.engine, ReplicaSet) else version.name

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """A trajectory from the record."""
        return self.store.trajectory(trajectory_id)

    # -- life --------------------------------------------------------------------------------------

    async def astart(self) -> None:
        """Restore the last checkpoint, if there is one, and serve."""
        from art_core.training import checkpoints
        from art_core.training.report import report_from_json

        self._directory.mkdir(parents=True, exist_ok=True)  # beside it, knobs can be turned from now on
        last = checkpoints.latest(self._directory)
        version, adapter = PolicyVersion(self.name, 0), None
        if last is not None:
            checkpoint = await asyncio.to_thread(checkpoints.load, last, self._trainer)
            version, adapter = PolicyVersion(self.name, checkpoint.version), checkpoint.weights_dir
            self._board.read()
            self._groups.restore(checkpoint.state, self.store.group)
            if (update := checkpoint.state.get("update")) is not None:  # older checkpoints say nothing
                report = report_from_json(update["report"])
                self.last_update = LastUpdate(version, tuple(update["groups"]), report)
                self._record.complete(self.last_update, update["model"], adapter)
            logger.info("model %s goes on from version %s", self.name, version)
        self._turn.began_from = version.number
        self._serving.recorded = await asyncio.to_thread(self._record.newest_version, version)
        await self.engine.start()
        if self.raw_logprobs:
            self._record.event("raw_logprobs", RAW_LOGPROBS)
        if isinstance(self.engine, ReplicaSet):
            self._record.show(self.engine.gateway.metrics)
        try:
            await self._serving.publish(version, adapter)
        except BaseException:
            await self.engine.close()
            raise
        self._monitor = ServingMonitor(metric_sources(self.engine)).start()
        self._record.begin()

    async def aclose(self, failure: BaseException | None = None) -> None:
        """Stop serving and close the record, which says how the run ended; see `Registration.aclose`."""
        state = self._record.ending(failure, stopped=self._stopped)
        parts = AsyncExitStack()  # the last one first, and each of them whatever becomes of the others
        parts.callback(self.store.close)
        parts.push_async_callback(asyncio.to_thread, self._record.close, state)
        parts.callback(self._turn.give_back)
        parts.push_async_callback(asyncio.to_thread, self._trainer.close)
        parts.push_async_callback(self.engine.close)
        parts.push_async_callback(asyncio.to_thread, self._monitor.close)
        await seen_through(parts.aclose())

    # -- learning ----------------------------------------------------------------------------------

    async def atrain(
        self,
        batches: Sequence[Sequence[TrajectoryGroup]],
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """One call of the trainer per batch, then publish what came out."""
        # In a thread: workers write to the same database meanwhile, and their rollouts go on over this loop.
        kept = await asyncio.to_thread(lambda: [self._record.keep_groups(batch) for batch in batches])
        return await self._learn(
            lambda: self._groups.train(kept, self.current_version().number, train=train, imitate=imitate),
            [group for batch in kept for group in batch],
        )

    async def asft(self, conversations: Sequence[Any], **options: Any) -> "TrainReport":
        """Supervised fine-tuning, then publish what came out."""
        return await self._learn(lambda: self._trainer.sft(conversations, **options))

    async def _learn(
        self, train: "Callable[[], TrainReport]", groups: Sequence[TrajectoryGroup] = ()
    ) -> "TrainReport":
        async with self._training:
            await asyncio.to_thread(self._turn.take)
            # Its thread would go on anyway, on a machine that is not its own any more.
            return await seen_through(self._step(train, groups))

    async def _step(
        self, train: "Callable[[], TrainReport]", groups: Sequence[TrajectoryGroup]
    ) -> "TrainReport":
        began = time.time()
        self._note(self._board.read())
        served = await asyncio.to_thread(self._monitor.window)
        try:
            if not self._apart:  # otherwise rollouts may go on: see `art_core.learning`
                await self.engine.pause()
            trained_from = time.time()
            report = await asyncio.to_thread(self._as_turned, train)
            trained_to = time.time()
            self._stopped = self._stopped or any(e.kind == "training_stopped" for e in report.events)
            try:
                adapter = await self._publish(tuple(g.id for g in groups), report) if report.updated else None
            finally:
                for event in report.events:
                    self._record.happened(event)
        except TrainingStoppedError:
            self._stopped = True  # also when it was an earlier process that stopped
            raise
        finally:
            if not self._apart:
                await self.engine.resume()
            self._monitor.begin()
        await self._serving.tidy()
        training = Training(began, trained_from, trained_to, time.time())
        version = self.current_version()
        await asyncio.to_thread(self._record.trained, report, groups, training, version, served, adapter)
        return report

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Keep numbers of somebody else's about the current version."""
        self._record.note(values)

    def _as_turned(self, train: "Callable[[], TrainReport]") -> "TrainReport":
        if self._trainer.config != self._board.config:
            self._trainer.set_config(self._board.config)
        return train()

    async def _publish(self, groups: tuple[str, ...], report: "TrainReport") -> Path:
        """Make the trained weights the current version; returns where its adapter lies."""
        from art_core.training import checkpoints
        from art_core.training.report import report_to_json

        version = self._serving.next_version()
        state = {
            **self._groups.state(),
            # Written with the weights, so that nobody who was killed has to guess what they hold.
            "update": {"model": self.name, "groups": groups, "report": report_to_json(report)},
        }
        checkpoint = await asyncio.to_thread(
            checkpoints.save, self._directory, self._trainer, version=version.number, state=state
        )
        await self._serving.publish(version, checkpoint.weights_dir)
        self.last_update = LastUpdate(version, groups, report)
        return checkpoint.weights_dir

    # -- turning it while it runs --------------------------------------------------------------------

    @property
    def knobs(self) -> Knobs:
        """Settings as they were turned; what is None is as configured."""
        return self._board.knobs

    def turn(self, **values: Turn) -> None:
        """Turn knobs, from the next call of ``train`` on; see `TrainableModel.turn`."""
        self._note(self._board.turn(**values))

    def _note(self, turned: Sequence[Turned]) -> None:
        for change in turned:
            logger.info(change.message)
            self._record.happened(change)

    async def aresume_training(self) -> None:
        """Train on after a guardrail's stop; see `TrainableModel.aresume_training`."""
        async with self._training:
            await asyncio.to_thread(self._trainer.resume)
            self._stopped = False
            self._record.event("training_resumed", "training goes on after a stop")

    async def asave_adapter(self, directory: Path) -> None:
        """Write the adapter in training as a PEFT directory; see `exporting.write_adapter`."""
        from art_core.backends.exporting import write_adapter

        async with self._training:
            await asyncio.to_thread(write_adapter, self._trainer.policy, directory)

    async def asave_model(self, directory: Path) -> None:
        """Write the model as trained as a transformers directory; see `exporting.write_model`."""
        from art_core.backends.exporting import write_model

        async with self._training:
            await asyncio.to_thread(write_model, self._trainer.policy, directory)
