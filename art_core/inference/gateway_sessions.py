"""Rollouts that are captured by their address: ``/rollouts/<id>/v1/...`` records into rollout ``<id>``.

Invariant: a call under a prefix becomes steps of that rollout before its client has the last byte, or is
refused with what is wrong; a rollout that ended stays readable for a while and takes no more calls.

This is how clients of any language are captured: they need a base URL and nothing else.
"""

import threading
from collections import OrderedDict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from art_core.errors import UnknownTrajectoryError
from art_core.inference.gateway_log import Completion
from art_core.inference.gateway_proxy import Keep
from art_core.inference.gateway_upstream import RefusalError
from art_core.recording import Rollout, Sink
from art_core.types import Failure, Scenario, StepIdentity, Trajectory

_ENDED_KEPT = 1_000
"""Ended rollouts that stay readable over HTTP."""

_trajectories: TypeAdapter[Trajectory] = TypeAdapter(Trajectory)


class ScenarioSpec(BaseModel):
    """A scenario, as a client sends it."""

    model_config = ConfigDict(extra="forbid")
    id: str = "default"
    inputs: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class NewRollout(BaseModel):
    """Body of ``POST /rollouts``."""

    model_config = ConfigDict(extra="forbid")
    scenario: ScenarioSpec = Field(default_factory=ScenarioSpec)
    group: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    max_calls: int | None = Field(default=None, ge=1)


class FailureSpec(BaseModel):
    """Why a rollout failed, as a client sends it."""

    model_config = ConfigDict(extra="forbid")
    message: str
    cause: str = "exception"
    error_type: str | None = None


class EndRollout(BaseModel):
    """Body of ``POST /rollouts/<id>/end``: a reward, a failure, or neither when the reward comes later."""

    model_config = ConfigDict(extra="forbid")
    reward: float | None = None
    failure: FailureSpec | None = None


def trajectory_json(trajectory: Trajectory) -> bytes:
    """A trajectory as JSON."""
    return _trajectories.dump_json(trajectory)


def read_trajectory(data: bytes) -> Trajectory:
    """Read what `trajectory_json` wrote."""
    return _trajectories.validate_json(data)


class Sessions:
    """The rollouts that a gateway records into. Thread-safe.

    Args:
        sink: where rollouts that are created over HTTP are kept.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._open: dict[str, Rollout] = {}
        self._ended: OrderedDict[str, Rollout] = OrderedDict()

    def register(self, rollout: Rollout) -> None:
        """Record calls under ``/rollouts/<its id>/v1`` into this rollout, until it ends."""
        with self._lock:
            self._open[rollout.id] = rollout

    def create(self, asked: NewRollout) -> Rollout:
        """Start a rollout, kept in the gateway's sink."""
        spec = asked.scenario
        rollout = Rollout(
            Scenario(id=spec.id, inputs=spec.inputs, metadata=spec.metadata),
            sink=self._sink,
            group_id=asked.group,
            metadata=asked.metadata,
            max_calls=asked.max_calls,
        )
        self.register(rollout)
        return rollout

    def find(self, rollout_id: str) -> Rollout:
        """A rollout, running or ended.

        Raises:
            RefusalError: 404, there is none.
        """
        with self._lock:
            self._sweep()
            rollout = self._open.get(rollout_id) or self._ended.get(rollout_id)
        if rollout is None:
            raise RefusalError(
                404,
                f"no rollout {rollout_id!r} is known to this gateway; start one with POST /rollouts, "
                "or register it in process with Gateway.register",
            )
        return rollout

    def running(self, rollout_id: str) -> Rollout:
        """A rollout that still takes calls.

        Raises:
            RefusalError: 404 when there is none, 409 when it has ended.
        """
        rollout = self.find(rollout_id)
        if rollout.ended:
            status = rollout.snapshot().status
            raise RefusalError(409, f"rollout {rollout_id!r} has ended already ({status}); start a new one")
        return rollout

    def admit(self, rollout_id: str) -> Keep:
        """Count a call that is about to be made in a rollout; returns what records its completion there.

        Raises:
            RefusalError: it is unknown, has ended, or has made all the calls that it may.
        """
        rollout = self.running(rollout_id)
        calls = rollout.count_call()
        if rollout.max_calls is not None and calls > rollout.max_calls:
            raise RefusalError(
                409, f"rollout {rollout_id!r} may make {rollout.max_calls} calls, and this is number {calls}"
            )
        identity = StepIdentity(call_index=rollout.branches.next_call_index("", 1))

        async def record(completion: Completion) -> str:
            for step in completion.steps(rollout.id, identity):
                await rollout.arecord(step)
            return rollout.id

        return record

    async def end(self, rollout_id: str, asked: EndRollout) -> Trajectory:
        """End a rollout.

        Raises:
            RefusalError: it is unknown, has ended, or was given both a reward and a failure.
            RewardError: the reward is no finite number.
        """
        rollout = self.running(rollout_id)
        if asked.reward is not None and asked.failure is not None:
            raise RefusalError(
                400, f"rollout {rollout_id!r}: give a reward or a failure; a failure has no reward"
            )
        try:
            if asked.failure is not None:
                spec = asked.failure
                return await rollout.afail(Failure(spec.cause, spec.message, spec.error_type))
            if not rollout.steps:
                return await rollout.afail(
                    Failure(
                        "no_policy_calls",
                        f"no call came to /rollouts/{rollout_id}/v1: set the client's base URL to it "
                        "(calls to the plain /v1 belong to no rollout)",
                    )
                )
            return await rollout.afinish(asked.reward)
        except UnknownTrajectoryError as ended:
            raise RefusalError(409, str(ended)) from ended

    def _sweep(self) -> None:
        for rollout_id in [i for i, rollout in self._open.items() if rollout.ended]:
            self._ended[rollout_id] = self._open.pop(rollout_id)
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
