"""The durable record of a project: what was run, what it was worth, what came of it.

Invariant: what a method has written survives ``kill -9`` once the method has returned (or, for a sink,
once its future is done), and what failed to be written has left nothing behind.

All writing of a process goes through one thread (`writer`), so that hundreds of rollouts share its commits;
reading goes straight to the database and may happen in any thread and in any other process.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, select

from art_core.errors import StoreError, UnknownTrajectoryError
from art_core.recording import Sink, new_id
from art_core.store import codec, reading
from art_core.store.database import reading as read_transaction
from art_core.store.database import sqlite_url
from art_core.store.feedback import check_feedback, insert_feedback, read_feedback
from art_core.store.packing import to_json
from art_core.store.records import Feedback, FeedbackKind, Score, TrainedStep
from art_core.store.runs import RunRecords
from art_core.store.saving import save_group, save_score, save_trajectories
from art_core.store.schema import groups, scenarios, trajectories
from art_core.store.sink import StoreSink
from art_core.store.trained import read_trained
from art_core.types import RolloutStatus, Trajectory, TrajectoryGroup, check_reward

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Store(RunRecords):
    """A project's store; thread-safe. Use `Store.open`, and close it (or use it as a context manager).

    Attributes:
        project: whose it is.
        location: the file, or the URL without its password.
    """

    @classmethod
    def open(cls, project: str, root: str | Path = ".art", *, url: str | None = None) -> "Store":
        """Open a project's store, which is created, or brought to the newest schema, where needed.

        Args:
            project: the project's name; its file is ``<root>/<project>.db``.
            root: directory of the files.
            url: a database's URL (SQLAlchemy's form, ``postgresql://...``) in place of a file.

        Raises:
            StoreError: it cannot be opened, belongs to another project, or is newer than this code.
        """
        if not _PROJECT.fullmatch(project):
            raise StoreError(
                f"project {project!r} cannot be a file's name: use letters, digits, '.', '_' and '-', and "
                "begin with a letter or digit"
            )
        return cls(project, sqlite_url(Path(root) / f"{project}.db") if url is None else url)

    # -- rollouts ----------------------------------------------------------------------------------

    def sink(self, run_id: str | None = None) -> Sink:
        """Where rollouts record themselves while they run.

        Args:
            run_id: the run that they belong to; None for rollouts of no run.
        """
        self._check_process()
        url = self._engine.url.render_as_string(hide_password=False)
        return StoreSink(self._writer, run_id, partial(_sink_elsewhere, self.project, url, run_id))

    def save_group(self, group: TrajectoryGroup, *, run_id: str | None = None) -> str:
        """Keep a group: its members, their order, and what is new about them.

        Members and steps that the store lacks are added; of those that it has, outcome and reward are
        brought up to the given ones.

        Returns:
            The group's id; a new one where the group has none.
        """
        return self.save_groups([group], run_id=run_id)[0]

    def save_groups(self, groups: Sequence[TrajectoryGroup], *, run_id: str | None = None) -> list[str]:
        """`save_group` for several, of which all are kept or, if one cannot be, none; returns their ids."""
        ids = [group.id or new_id("g") for group in groups]

        def apply(connection: Connection) -> None:
            for group, group_id in zip(groups, ids, strict=True):
                save_group(connection, group, group_id, run_id)

        if ids:
            # In one transaction: each waits for whoever else is writing, as worker processes are.
            others = f" and {len(ids) - 1} more" if ids[1:] else ""
            self._write(f"saving group {ids[0]}{others}", apply, run_id)
        return ids

    def save_trajectory(self, trajectory: Trajectory, *, run_id: str | None = None) -> None:
        """Keep a trajectory that ran elsewhere (an import, another process), or what is new about one."""
        self._write(
            f"saving trajectory {trajectory.id}",
            lambda connection: save_trajectories(connection, [trajectory], run_id),
            run_id,
        )

    def score(
        self,
        trajectory_id: str,
        reward: float,
        *,
        components: Mapping[str, float] | None = None,
        author: str,
        explanation: str = "",
    ) -> None:
        """Give a trajectory a reward; earlier ones stay in its history.

        Raises:
            RewardError: the reward is not a finite number, or the rollout failed.
            UnknownTrajectoryError: there is no such trajectory.
        """
        reward = check_reward(reward, f"trajectory {trajectory_id}")
        made_of = to_json(dict(components or {}))
        self._write(
            f"scoring trajectory {trajectory_id}",
            lambda connection: save_score(
                connection, trajectory_id, reward, made_of, author=author, explanation=explanation
            ),
        )

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One trajectory with its steps, in the order in which they started.

        Raises:
            UnknownTrajectoryError: there is none with this id.
        """
        with read_transaction(self._engine) as connection:
            found = reading.read_trajectories(connection, [trajectories.c.id == trajectory_id])
        if not found:
            raise UnknownTrajectoryError(f"{self.location} has no trajectory {trajectory_id}")
        return found[0]

    def trajectories(
        self,
        run_id: str | None = None,
        group_id: str | None = None,
        scenario_id: str | None = None,
        status: RolloutStatus | str | None = None,
        limit: int | None = None,
        with_steps: bool = True,
    ) -> Iterator[Trajectory]:
        """Trajectories in the order in which they began; each condition that is given narrows them down."""
        conditions: list[ColumnElement[bool]] = []
        if run_id is not None:
            conditions.append(trajectories.c.run_id == run_id)
        if group_id is not None:
            conditions.append(trajectories.c.group_id == group_id)
        if scenario_id is not None:
            conditions.append(scenarios.c.scenario_id == scenario_id)
        if status is not None:
            conditions.append(trajectories.c.status == RolloutStatus(status).value)
        return reading.iterate_trajectories(self._engine, conditions, limit, with_steps)

    def group(self, group_id: str) -> TrajectoryGroup:
        """A group with its members: those of `save_group` in its order, then others as they began.

        Raises:
            UnknownTrajectoryError: there is none with this id.
        """
        with read_transaction(self._engine) as connection:
            joined = groups.join(scenarios, groups.c.scenario == scenarios.c.digest)
            body = connection.scalar(
                select(scenarios.c.body).select_from(joined).where(groups.c.id == group_id)
            )
            if body is None:
                raise UnknownTrajectoryError(f"{self.location} has no group {group_id}")
            members = reading.read_trajectories(
                connection,
                [trajectories.c.group_id == group_id],
                trajectories.c.group_position.asc().nulls_last(),
            )
        return TrajectoryGroup(codec.scenario_from_body(body), tuple(members), id=group_id)

    def scores(self, trajectory_id: str) -> list[Score]:
        """A trajectory's reward history, oldest first."""
        with read_transaction(self._engine) as connection:
            return reading.read_scores(connection, trajectory_id)

    def add_feedback(
        self,
        trajectory_id: str,
        *,
        kind: FeedbackKind | str,
        value: float,
        author: str,
        comment: str = "",
        over: str | None = None,
    ) -> None:
        """Keep what a person says of a trajectory. The trajectory's reward stays as it is.

        Args:
            trajectory_id: of which it is said.
            kind: ``thumb``, ``score`` or ``choice``.
            value: see `FeedbackKind`.
            author: who says it.
            comment: in their own words.
            over: of a choice: the trajectory that it is better than, or as good as.

        Raises:
            RewardError: the value is none of that kind, or a choice lacks what it was made over.
            UnknownTrajectoryError: there is no such trajectory.
        """
        row = check_feedback(trajectory_id, kind, value, author, over)
        self._write(
            f"keeping feedback on trajectory {trajectory_id}",
            lambda connection: insert_feedback(connection, row, comment),
        )

    def feedback(self, trajectory_id: str | None = None, run_id: str | None = None) -> list[Feedback]:
        """What people said, oldest first: of one trajectory, of those of a run, or of all."""
        with read_transaction(self._engine) as connection:
            return read_feedback(connection, trajectory_id, run_id)

    def trained(self, trajectory_id: str) -> list[TrainedStep]:
        """What training did with a trajectory's steps, oldest first; empty where none was trained."""
        with read_transaction(self._engine) as connection:
            return read_trained(connection, trajectory_id)


_opening = threading.Lock()


@cache
def _opened_elsewhere(project: str, url: str) -> Store:
    return Store.open(project, url=url)


def _sink_elsewhere(project: str, url: str, run_id: str | None) -> Sink:
    """The sink of a store that another process has open; this process opens it once."""
    with _opening:  # `cache` lets two threads open one each, and forgets, which closes, the first
        store = _opened_elsewhere(project, url)
    return store.sink(run_id)
