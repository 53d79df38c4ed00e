"""What graphs of ours keep in their state: rollouts and scores, as plain data with ids.

Invariant: a state is made of JSON's values alone, so every checkpointer keeps it exactly, LangGraph's strict
msgpack mode included. Trajectories themselves are in the store, which is the truth: a trajectory in a state
would be copied by every checkpoint, and come back with lists for tuples.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from art_core.errors import ConfigError
from art_core.store.packing import clean_text
from art_core.types import Scenario, Trajectory


class RolloutRecord(TypedDict):
    """One rollout that has ended.

    Attributes:
        batch: number of the batch (in a learning loop: of the step) that it belongs to.
        place: of its group in the batch, from 0.
        member: its place in the group, from 0.
        group: the group's id.
        scenario: the scenario's id.
        trajectory: its id in the store.
        status: ``finished`` or ``failed``.
        reward: what it ended with; None without a reward, and always when it failed.
        failure: why it failed; None when it did not.
    """

    batch: int
    place: int
    member: int
    group: str
    scenario: str
    trajectory: str
    status: str
    reward: float | None
    failure: str | None


class ScoreRecord(TypedDict):
    """What a judge said of one trajectory.

    Attributes:
        trajectory: its id in the store.
        group: its group's id; the scenario's id for rollouts of no group.
        scenario: the scenario's id.
        reward: from 0 to 1, or what ``combine`` made of it; None when it has no score.
        explanation: the judge's reason.
        unscored: why there is no score; None when there is one.
    """

    trajectory: str
    group: str
    scenario: str
    reward: float | None
    explanation: str
    unscored: str | None


class PlainScenario(TypedDict, total=False):
    """A scenario as plain data: what `Scenario` takes. ``id`` may be left out when there is only one."""

    id: str
    inputs: dict[str, Any]
    metadata: dict[str, Any]


def newest_batch(old: Sequence[RolloutRecord], new: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Reducer: the rollouts of the newest batch, in order; those of earlier batches are in the store."""
    by_place = {(r["batch"], r["place"], r["member"]): r for r in (*old, *new)}
    newest = max((batch for batch, _, _ in by_place), default=0)
    return [by_place[key] for key in sorted(by_place) if key[0] == newest]


def by_trajectory(old: Sequence[ScoreRecord], new: Sequence[ScoreRecord]) -> list[ScoreRecord]:
    """Reducer: one score a trajectory, the newest."""
    return list({score["trajectory"]: score for score in (*old, *new)}.values())


def rollout_record(trajectory: Trajectory, *, batch: int, place: int, member: int) -> RolloutRecord:
    """What a state keeps of an ended rollout."""
    failure = trajectory.failure
    return {
        "batch": batch,
        "place": place,
        "member": member,
        "group": trajectory.group_id or trajectory.scenario.id,
        "scenario": trajectory.scenario.id,
        "trajectory": trajectory.id,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "failure": None if failure is None else clean_text(f"{failure.cause}: {failure.message}"),
    }


def finished(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """Those that did not fail."""
    return [record for record in records if record["failure"] is None]


def as_scenario(given: Scenario | PlainScenario | Mapping[str, Any]) -> Scenario:
    """A scenario, however it was given.

    Raises:
        ConfigError: it is no mapping, or has other fields than a scenario.
    """
    if isinstance(given, Scenario):
        return given
    if not isinstance(cast(object, given), Mapping):
        raise ConfigError(f"{given!r} is no scenario; give Scenario(id, inputs), or its fields as a mapping")
    fields = cast("Mapping[str, Any]", given)
    if unknown := fields.keys() - PlainScenario.__annotations__.keys():
        raise ConfigError(
            f"a scenario has no {', '.join(map(repr, sorted(unknown)))}; it has id, inputs and metadata"
        )
    return Scenario(fields.get("id", "default"), fields.get("inputs", {}), fields.get("metadata", {}))


def as_plain(scenario: Scenario) -> PlainScenario:
    """A scenario as plain data, for a graph's input."""
    return {"id": scenario.id, "inputs": dict(scenario.inputs), "metadata": dict(scenario.metadata)}
