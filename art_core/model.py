"""TrainableModel: the one object a user holds.

Invariant: which version answers is decided when a call is made; what was collected stays collected
until it was trained on.

Two ways to use it. With LangGraph: hand the model to ``ChatART``, run the graph with ``agather``, give
the groups to ``atrain``. With any OpenAI-style code: ``start_trajectory``, ``chat.completions.create``,
``end_trajectory``, then ``train()``. Sync names are bare; async names carry an ``a``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.backends.base import Backend, LastUpdate, Registration
from art_core.chat import Chat
from art_core.collection import Collection, in_batches, require_scored
from art_core.config import TrainableModelConfig
from art_core.errors import ConfigError, NothingToTrainError
from art_core.inference.availability import Availability, availability_of
from art_core.inference.endpoint import PolicyEndpoint, raw_logprobs_of, served_name
from art_core.inference.gateway import Gateway
from art_core.inference.pinned import PinnedEndpoint
from art_core.recording import Rollout, Sink
from art_core.seeing_through import seen_through
from art_core.selection import Train, as_selection
from art_core.sync import run_sync
from art_core.types import PolicyVersion, Scenario, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.store import Store
    from art_core.training.knobs import Knobs, Turn
    from art_core.training.report import TrainReport


class TrainableModel:
    """A language model that learns from rollouts.

    Args:
        config: its settings; or give them as keywords (`TrainableModelConfig` documents each).

    Raises:
        ConfigError: a setting is unknown or out of range, or both forms were given.
    """

    def __init__(self, config: TrainableModelConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(
                f"give a TrainableModelConfig or keywords, not both (got {', '.join(settings)})"
            )
        self.config = config or TrainableModelConfig(**settings)
        self.chat = Chat(self)
        self._registration: Registration | None = None
        self._collection = Collection(self.config.name)

    # -- registration ------------------------------------------------------------------------------

    async def aregister(self, backend: Backend) -> None:
        """Load the model on a backend and serve it.

        Raises:
            ConfigError: it is registered already, or the base model is unknown.
            EngineError: the server did not come up.
        """
        if self._registration is not None:
            raise ConfigError(f"model {self.name!r} is registered already; close() it first")
        self._registration = await backend.aregister(self.config)

    def register(self, backend: Backend) -> None:
        """Load the model on a backend and serve it; see `aregister`."""
        run_sync(lambda: self.aregister(backend))

    async def aclose(self, failure: BaseException | None = None) -> None:
        """Stop serving. Trajectories still open stay in the store as running.

        The record says how the run ended: finished; stopped, when a guardrail had stopped training and it was
        not resumed, or on Ctrl-C; or failed. ``with`` and ``async with`` hand over what was raised in them.

        Args:
            failure: what ended the run before its time, if something did.
        """
        registration, self._registration = self._registration, None
        if registration is not None:
            await self.chat.aclose()
            await registration.aclose(failure)

    def close(self, failure: BaseException | None = None) -> None:
        """Stop serving; see `aclose`."""
        run_sync(lambda: self.aclose(failure))

    def __enter__(self) -> "TrainableModel":
        return self

    def __exit__(self, _: object, failure: BaseException | None, *__: object) -> None:
        self.close(failure)

    async def __aenter__(self) -> "TrainableModel":
        return self

    async def __aexit__(self, _: object, failure: BaseException | None, *__: object) -> None:
        await self.aclose(failure)

    # -- endpoint: what chat models need -----------------------------------------------------------

    @property
    def _registered(self) -> Registration:
        if self._registration is None:
            raise ConfigError(f"model {self.name!r} is not registered; call register(LocalBackend()) first")
        return self._registration

    @property
    def endpoint(self) -> PolicyEndpoint:
        """Where the model answers."""
        return self._registered.endpoint

    @property
    def name(self) -> str:
        """The model's name, to be sent as ``model`` by any client."""
        return self.config.name

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible server, ending in ``/v1``."""
        return self.endpoint.base_url

    @property
    def gateway(self) -> Gateway:
        """The gateway at `base_url`, with ``LocalBackend(gateway=True)`` or several replicas.

        ``model.gateway.register(rollout)`` is a base URL whose calls are recorded into a rollout, for clients
        in any language.

        Raises:
            ConfigError: the model is served without one, or is not registered.
        """
        return self._registered.gateway

    @property
    def api_key(self) -> str:
        """What to send as the bearer token."""
        return self.endpoint.api_key

    @property
    def sink(self) -> Sink:
        """Where this model's rollouts are kept."""
        return self.endpoint.sink

    def current_version(self) -> PolicyVersion:
        """The newest version that is served."""
        return self.endpoint.current_version()

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        """Hold a version (None: the current one) for the length of a call or of a rollout."""
        return self.endpoint.lease(version)

    @property
    def availability(self) -> Availability:
        """Whether its server can be asked now; one that died is being restarted."""
        return availability_of(self.endpoint)

    @property
    def raw_logprobs(self) -> bool:
        """Whether its server's log-probabilities are the model's own, before temperature."""
        return raw_logprobs_of(self.endpoint)

    def wire_name(self, version: PolicyVersion) -> str:
        """The name by which the server knows a version."""
        return served_name(self.endpoint, version)

    async def aserve(self, version: int) -> PinnedEndpoint:
        """Serve an earlier version beside the current one, to compare them.

        So it is used::

            async with await model.aserve(12) as before, await model.aserve(40) as after:
                ChatART(before), ChatART(after)

        Args:
            version: its number; 0 is the base model.

        Returns:
            An endpoint all of whose calls go to that version; it is served until the endpoint is closed.

        Raises:
            CheckpointError: its adapter is not on disk any more (``LocalBackend(keep_checkpoints=...)``).
            EngineError: the engine refuses it.
        """
        return await self._registered.aserve(version)

    def serve(self, version: int) -> PinnedEndpoint:
        """Serve an earlier version beside the current one; see `aserve`."""
        return run_sync(lambda: self.aserve(version))

    @property
    def store(self) -> "Store":
        """The record of its project: rollouts, rewards, runs, metrics, versions.

        Raises:
            ConfigError: the model is not registered.
        """
        return self._registered.store

    @property
    def last_update(self) -> LastUpdate | None:
        """What the newest version was made from, also after a restart; None where no training made it."""
        return self._registered.last_update

    # -- turning it while it runs --------------------------------------------------------------------

    @property
    def knobs(self) -> "Knobs":
        """Settings as they were turned while the run goes on; what is None is as configured."""
        return self._registered.knobs

    @property
    def temperature(self) -> float | None:
        """For calls whose chat model names no temperature of its own; None: the server's default."""
        return self._registered.knobs.temperature_at(self.current_version().number)

    def turn(self, **values: "Turn") -> None:
        """Turn knobs while a run goes on, as in ``model.turn(learning_rate=3e-5, temperature=0.8)``.

        They hold from the next call of `train` (temperature: from the next call of a chat model), are kept in
        ``knobs.json`` beside the checkpoints, which can be edited as well, and each change is an event.

        ``model.turn(reward_weights={"steps": -0.05})`` puts a weight in place of the one that rewards were
        scored with, in what is trained; other components' weights stay as they are.

        Args:
            **values: see `art_core.training.knobs.Knobs`; None goes back to what was configured, or scored.

        Raises:
            ConfigError: there is no such knob, or it does not go there. Nothing is changed.
        """
        self._registered.turn(**values)

    async def aresume_training(self) -> None:
        """Train on, at the configured learning rate, after a guardrail stopped the training."""
        await self._registered.aresume_training()

    def resume_training(self) -> None:
        """Train on after a guardrail's stop; see `aresume_training`."""
        run_sync(self.aresume_training)

    # -- trajectories ------------------------------------------------------------------------------

    def start_trajectory(
        self, scenario: Scenario | str = "default", *, metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Begin a trajectory and make it the current one of this context; returns its id.

        Trajectories of one scenario are compared with each other in training.
        """
        return self._collection.start(
            Scenario(id=scenario) if isinstance(scenario, str) else scenario,
            sink=self.sink,
            metadata=metadata,
            max_calls=self.config.rollout_length,
        )

    async def astart_trajectory(
        self, scenario: Scenario | str = "default", *, metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Begin a trajectory; see `start_trajectory`."""
        return self.start_trajectory(scenario, metadata=metadata)

    def rollout(self, trajectory_id: str) -> Rollout:
        """The open trajectory with this id.

        Raises:
            UnknownTrajectoryError: it was never started here, or has ended.
        """
        return self._collection.opened(trajectory_id)

    def end_trajectory(
        self, trajectory_id: str, reward: float | None = None, *, failure: str | None = None
    ) -> Trajectory:
        """End a trajectory with its reward, or as failed.

        Raises:
            RewardError: neither a reward nor a failure was given, or the reward is not a finite number.
                The trajectory then stays open, with all that it holds.
            UnknownTrajectoryError: it was never started here, or has ended.
        """
        return self._collection.end(trajectory_id, reward, failure)

    async def aend_trajectory(
        self, trajectory_id: str, reward: float | None = None, *, failure: str | None = None
    ) -> Trajectory:
        """End a trajectory; see `end_trajectory`."""
        return self.end_trajectory(trajectory_id, reward, failure=failure)

    def get_trajectory(self, trajectory_id: str) -> Trajectory:
        """A trajectory as it is now, open or ended.

        Raises:
            UnknownTrajectoryError: it was never started here.
        """
        found = self._collection.now(trajectory_id)
        return self._registered.trajectory(trajectory_id) if found is None else found

    async def aget_trajectory(self, trajectory_id: str) -> Trajectory:
        """A trajectory as it is now; see `get_trajectory`."""
        return self.get_trajectory(trajectory_id)

    # -- learning ----------------------------------------------------------------------------------

    async def atrain(
        self,
        groups: Sequence[TrajectoryGroup] | None = None,
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """Learn from groups, or from the trajectories ended since the last call, and publish the result.

        Without groups, every ``batch_size`` trajectories (in the order in which they ended) make one
        optimizer step; within it, those of one scenario are compared with each other.

        Args:
            groups: rollouts to compare with each other, each with a reward or with rewards of its nodes
                or steps.
            train: which steps to train: ``"planner"``, ``Nodes("planner", "writer") & ~Tags("draft")``, or
                a function of the step (see `art_core.selection`); None: every one that can be. Rewards and
                baselines stay those of the whole rollouts.
            imitate: conversations mixed in against forgetting, with ``TrainConfig.sft_weight``; what
                `asft` takes.

        Raises:
            NothingToTrainError: nothing was collected, or nothing of it can be trained.
            RewardError: a trajectory that did not fail has no reward.
            ConfigError: ``train`` is no selection.
        """
        as_selection(train)  # before anything is written or paused
        if groups is not None:
            require_scored(groups)
            return await self._registered.atrain([groups], train=train, imitate=imitate)
        collected = self._collection.collected()
        if not collected:
            raise NothingToTrainError(
                f"model {self.name!r} has collected no trajectories since it was last trained: "
                "end some with end_trajectory(id, reward=...), or pass groups"
            )
        batches = in_batches(collected, self.config.batch_size)
        training = self._registered.atrain(batches, train=train, imitate=imitate)
        return await seen_through(training, then=lambda: self._collection.forget(collected))

    def train(
        self,
        groups: Sequence[TrajectoryGroup] | None = None,
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """Learn and publish; see `atrain`."""
        return run_sync(lambda: self.atrain(groups, train=train, imitate=imitate))

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Keep numbers of your own, of an evaluation for example, beside those of the newest training step.

        They are in the store at once, and then go to the sinks.

        Args:
            values: by name; those of the same names at the same step are replaced.
        """
        self._registered.log_metrics(values)

    async def asft(self, conversations: Sequence[Any], **options: Any) -> "TrainReport":
        """Learn to answer as given conversations do (supervised fine-tuning), and publish the result.

        Args:
            conversations: message lists in OpenAI's form, `Conversation`s, or trajectories.
            options: ``batch_size``, ``steps``, ``learning_rate``, ``progress``; see `Trainer.sft`.
        """
        return await self._registered.asft(conversations, **options)

    def sft(self, conversations: Sequence[Any], **options: Any) -> "TrainReport":
        """Supervised fine-tuning; see `asft`."""
        return run_sync(lambda: self.asft(conversations, **options))

    async def asave_model(self, path: Path | str) -> Path:
        """Write the whole model as trained as a new transformers directory; returns it."""
        directory = Path(path)
        await self._registered.asave_model(directory)
        return directory

    def save_model(self, path: Path | str) -> Path:
        """Write the whole model as trained; see `asave_model`."""
        return run_sync(lambda: self.asave_model(path))

    async def asave_lora_adapter(self, path: Path | str) -> Path:
        """Write the trained adapter as an ordinary PEFT directory; returns it."""
        directory = Path(path)
        await self._registered.asave_adapter(directory)
        return directory

    def save_lora_adapter(self, path: Path | str) -> Path:
        """Write the trained adapter; see `asave_lora_adapter`."""
        return run_sync(lambda: self.asave_lora_adapter(path))
