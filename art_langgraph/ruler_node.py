"""RulerNode: the judge as a LangGraph node.

Invariant: ids come in, scores go out; what the scores are of, and what became of them, is in the store. A
trajectory that failed, or that the judge could not score, has no reward and a reason, never a 0. Judging the
same again changes nothing, so a graph that was killed in this node may simply run it again.

Ids in the state -> trajectories from the store, by group -> `Ruler` -> rewards in the store, with author and
explanation -> one `ScoreRecord` for each id in the state.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from art_core.errors import ConfigError
from art_core.rewards.judgement import Combine, Judgement
from art_core.rewards.ruler import Ruler
from art_core.store import Store
from art_core.store.packing import clean_text
from art_core.types import Trajectory, TrajectoryGroup
from art_langgraph.graph_node import GraphNode, Record, check_record, store_of, tell
from art_langgraph.graph_records import ScoreRecord

if TYPE_CHECKING:
    from art_core.model import TrainableModel


class RulerNode(GraphNode):
    """Judges the trajectories that a state names.

    So it is used in a graph of one's own::

        class State(TypedDict):
            trajectories: list[str]
            scores: list[ScoreRecord]

        graph.add_node("judge", RulerNode(ruler, store))

    Trajectories of one group (``TrajectoryGroup``) are compared with each other; those of no group, with
    those of their scenario. Streams ``{"event": "judged", ...}`` for each group.

    Args:
        ruler: the judge and its rubric.
        record: the store that has the trajectories, or the model whose store it is.
        combine: makes the reward of what a trajectory has and its score; None: the score. What it has is
            the newest reward that is not this judge's own.
        key: of the ids in the state.
        writes: the key of the scores.

    Raises:
        ConfigError: the ruler or the record is none.
    """

    def __init__(
        self,
        ruler: Ruler,
        record: "Record | TrainableModel",
        *,
        combine: Combine | None = None,
        key: str = "trajectories",
        writes: str = "scores",
    ) -> None:
        if not isinstance(cast(object, ruler), Ruler):
            raise ConfigError(
                f"{type(ruler).__name__} is no ruler: give Ruler(LangChainJudge(...), rubric=...) of "
                "art_core.rewards"
            )
        check_record(record)
        self._ruler = ruler
        self._record = record
        self._combine = combine
        self._key = key
        self._writes = writes
        self.name = "ruler"

    async def act(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Judge, keep the rewards, and say them.

        Raises:
            ConfigError: the state has no list of ids.
            UnknownTrajectoryError: the store does not have one of them.
            RewardError: ``combine`` gave no finite number.
        """
        store = store_of(self._record)
        groups = await asyncio.to_thread(self._groups, store, self._ids(state))
        judgements = await self._ruler.ascore_groups(groups)
        scores: list[ScoreRecord] = []
        for group, judgement in zip(groups, judgements, strict=True):
            kept = await asyncio.to_thread(self._keep, store, group, judgement)
            scores += kept
            tell(
                "judged",
                group=group.id,
                scenario=group.scenario.id,
                scored=len(judgement.scores),
                left_out=len(judgement.left_out),
                unscored=judgement.unscored,
                calls=judgement.usage.calls,
                prompt_tokens=judgement.usage.prompt_tokens,
                completion_tokens=judgement.usage.completion_tokens,
            )
        return {self._writes: scores}

    def _ids(self, state: Mapping[str, Any]) -> list[str]:
        given = state.get(self._key)
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ConfigError(
                f"state[{self._key!r}] is {type(given).__name__}; RulerNode needs a list of trajectory ids "
                "there (key=... names another place)"
            )
        ids = list(cast("Sequence[Any]", given))
        for item in ids:
            if not isinstance(item, str):
                raise ConfigError(
                    f"state[{self._key!r}] holds {type(item).__name__}; a state holds ids of trajectories "
                    "(trajectory.id), and the store the trajectories: agather(..., sink=store.sink())"
                )
        return list(dict.fromkeys(ids))

    def _groups(self, store: Store, ids: Sequence[str]) -> list[TrajectoryGroup]:
        members: dict[str, list[Trajectory]] = {}
        for name in ids:
            member = self._as_it_was(store, store.trajectory(name))
            members.setdefault(member.group_id or member.scenario.id, []).append(member)
        return [TrajectoryGroup(m[0].scenario, tuple(m), name) for name, m in members.items()]

    def _as_it_was(self, store: Store, member: Trajectory) -> Trajectory:
        """A trajectory with the reward that it had without this judge."""
        if member.failed:
            return member
        others = [score for score in store.scores(member.id) if score.author != self._ruler.author]
        if not others:
            return replace(member, reward=None, components={})
        return member.with_reward(others[-1].reward, components=others[-1].components)

    def _keep(self, store: Store, group: TrajectoryGroup, judgement: Judgement) -> list[ScoreRecord]:
        """Give the rewards to the store, unless it has them, and put them on record."""
        records: list[ScoreRecord] = []
        for member in judgement.apply(group, self._combine):
            found = judgement.scores.get(member.id)
            explanation = "" if found is None else clean_text(found.explanation) or ""
            if member.reward is not None and not _has(store, member, judgement.author, explanation):
                store.score(
                    member.id,
                    member.reward,
                    components=member.components,
                    author=judgement.author,
                    explanation=explanation,
                )
            why = None if found else judgement.left_out.get(member.id) or judgement.unscored
            records.append(
                {
                    "trajectory": member.id,
                    "group": group.id,
                    "scenario": member.scenario.id,
                    "reward": member.reward,
                    "explanation": explanation,
                    "unscored": why,
                }
            )
        return records


def _has(store: Store, member: Trajectory, author: str, explanation: str) -> bool:
    """Whether the newest reward in the store is this very one."""
    newest = store.scores(member.id)[-1:]
    return [(s.reward, s.author, s.explanation) for s in newest] == [(member.reward, author, explanation)]
