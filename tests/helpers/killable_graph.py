"""A learning graph that is killed at chosen places: ``python killable_graph.py BASE ROOT JUDGE POINT...``.

Every life is a fork of this process, which has everything imported, and is ended by SIGKILL at its point:
``node:enter:2`` is when the node is called for the second time in that life, ``node:exit:2`` when that call
is over and nobody knows yet. Points of training itself are ``save``, ``metrics`` and ``version``: after a
checkpoint is on disk, before metrics and before the version are on record. The last life runs to the end,
and its state is written to ``ROOT/state.json``. ``JUDGE`` is the URL of the judge's server.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph

from art_core import LocalBackend, Scenario, TrainableModel
from art_core.config import LoRAConfig
from art_core.rewards import Ruler, VerdictCache
from art_core.store import Store
from art_core.training import checkpoints
from art_core.training.peft_policy import PeftPolicy
from art_core.types import Trajectory
from art_langgraph import ChatART, LangChainJudge, LearningLoop, learning_builder

STEPS = 3
GROUP_SIZE = 2
SCENARIOS = [Scenario(f"s{i}", {"messages": [("user", f"say {i}")]}) for i in range(3)]
PER_STEP = 2
THREAD = {"configurable": {"thread_id": "run"}}
NODES = ("plan", "trial", "evaluate", "rollout", "collect", "judge", "train")


class Fate:
    """Ends the process when its point is reached."""

    def __init__(self, point: str | None) -> None:
        where, _, rest = (point or "never").partition(":")
        when, _, call = rest.partition(":")
        self._point = (where, when or "enter", int(call or 1))
        self._calls: Counter[str] = Counter()

    def reach(self, where: str, when: str, call: int) -> None:
        """Die here, if this is the point."""
        if (where, when, call) == self._point:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, name: str, where: str) -> None:
        """Make an async method a possible end."""
        act = getattr(owner, name)

        async def watched(*given: Any) -> Any:
            self._calls[where] += 1
            call = self._calls[where]
            self.reach(where, "enter", call)
            result = await act(*given)
            self.reach(where, "exit", call)
            return result

        setattr(owner, name, watched)

    def watch_call(self, owner: Any, name: str, where: str, when: str) -> None:
        """Make a sync function a possible end."""
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            self._calls[where] += 1
            call = self._calls[where]
            if when == "enter":
                self.reach(where, "enter", call)
            result = function(*given, **named)
            if when == "exit":
                self.reach(where, "enter", call)
            return result

        setattr(owner, name, watched)


def reward(trajectory: Trajectory) -> float:
    """A rule that a random model meets by chance."""
    tokens = trajectory.steps[0].tokens
    assert tokens is not None
    return float(sum(tokens.completion) % 7) / 7


def combine(trajectory: Trajectory, score: float) -> float:
    """Half the rule's, half the judge's."""
    assert trajectory.reward is not None
    return 0.5 * trajectory.reward + 0.5 * score


def live(base: str, root: Path, judge_url: str, point: str | None) -> None:
    """One life of the run: it begins, or goes on from what is on disk."""
    fate = Fate(point)
    fate.watch_call(checkpoints, "save", "save", "exit")
    fate.watch_call(Store, "log_metrics", "metrics", "enter")
    fate.watch_call(Store, "add_version", "version", "enter")
    model = TrainableModel(base_model=base, project="p", name="agent", lora_rank=4, learning_rate=1e-2)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=128, deterministic=True))
    llm = ChatART(model, max_tokens=3)

    async def agent(state: MessagesState) -> Any:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("agent", agent)
    graph.add_edge(START, "agent").add_edge("agent", END)
    judge = ChatOpenAI(model="judge", base_url=judge_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
    loop = LearningLoop(
        graph.compile(),
        model,
        SCENARIOS,
        steps=STEPS,
        reward=reward,
        ruler=Ruler(LangChainJudge(judge), cache=VerdictCache(root / "verdicts.jsonl")),
        combine=combine,
        group_size=GROUP_SIZE,
        scenarios_per_step=PER_STEP,
        evaluate_every=2,
    )
    for name in NODES:
        fate.watch(getattr(loop, name), "act", name)
    with model, SqliteSaver.from_conn_string(str(root / "graph.db")) as saver:
        learning = learning_builder(loop).compile(checkpointer=saver)
        begun = learning.get_state(THREAD).values
        state = learning.invoke(None if begun else {}, THREAD, durability="sync")
    (root / "state.json").write_text(json.dumps(state))


def in_a_fork(base: str, root: Path, judge_url: str, point: str | None) -> bool:
    """A life of its own process; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            live(base, root, judge_url, point)
        except BaseException as failed:
            print(f"at {point}: {failed!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a life of the run failed")
    return os.WIFSIGNALED(status)


def main(base: str, root: Path, judge_url: str, points: list[str]) -> None:
    """Live once for each point, and once more."""
    root.mkdir(parents=True, exist_ok=True)
    PeftPolicy.load(base, LoRAConfig(rank=4), dtype="float32")  # imports what every life would import
    for point in points:
        if not in_a_fork(base, root, judge_url, point):
            raise SystemExit(f"the run ended before it came to {point}")
    in_a_fork(base, root, judge_url, None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
