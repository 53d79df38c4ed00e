"""What becomes of a trace: its nodes, its calls, its scores, and of what was asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.judges import runs, told
from helpers.langfuse_app import App, graph, only

from art_core.jsonl import conversations, export_conversations
from art_core.rewards import Answer, Ruler
from art_core.rewards.audit import audit
from art_core.store import Store
from art_core.types import RolloutStatus
from art_langgraph.langfuse.trajectories import groups_from, scenarios_from


def test_a_graph_traced_by_langfuses_own_handler_comes_back_as_a_trajectory(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    trace = app.run("is 3 free?", langfuse_session_id="s-1", langfuse_tags=["prod"], langfuse_user_id="u-1")
    result = bring()
    assert len(result.imported) == 1
    trajectory = only(store)
    assert trajectory.status is RolloutStatus.FINISHED
    assert [(s.identity.node, s.identity.attempt, s.identity.call_index) for s in trajectory.steps] == [
        ("agent", 1, 0),
        ("agent", 1, 0),
        ("critic", 1, 0),
        ("critic", 2, 0),
    ]
    first, second, *critics = trajectory.steps
    assert first.messages == ({"role": "user", "content": "is 3 free?"},)
    assert [t["function"]["name"] for t in first.tools] == ["look"]
    assert first.response is not None
    (call,) = first.response["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"cell": 3}
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[2]["tool_call_id"] == call["id"]
    assert second.message() == "it is free"
    assert critics[0].identity.namespace == critics[1].identity.namespace
    assert critics[0].identity.namespace.startswith("review:")
    assert first.model == "gpt-x"
    assert first.sampling == {"temperature": 0.5}
    assert first.usage["total_tokens"] == first.usage["prompt_tokens"] + first.usage["completion_tokens"]
    for step in trajectory.steps:
        assert not step.trainable
        assert trace in (step.untrainable or "")
    kinds = [(s.kind, s.name, s.status) for s in trajectory.spans]
    assert ("tool", "look", "ok") in kinds
    assert ("chain", "critic", "error") in kinds
    assert [s.attempt for s in trajectory.spans if (s.kind, s.name) == ("chain", "critic")] == [1, 2]
    assert trajectory.scenario.inputs == {"messages": [{"role": "user", "content": "is 3 free?"}]}
    about = trajectory.metadata["langfuse"]
    assert (about["trace_id"], about["sessionId"], about["userId"], about["tags"]) == (
        trace, "s-1", "u-1", ["prod"],
    )  # fmt: skip
    assert trajectory.tree()  # who called whom can be drawn
    lines = list(conversations(trajectory))
    assert [m["role"] for m in lines[0]["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_scores_become_rewards_components_and_what_people_said(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    trace = app.run("hi")
    generation = next(o for o in app.server.of_trace(trace) if o["type"] == "GENERATION")
    app.score(trace, "correctness", 0.5)
    app.score(trace, "correctness", 0.75, comment="better than I thought")
    app.score(trace, "polite", 1, data_type="BOOLEAN")
    app.score(trace, "topic", "games", data_type="CATEGORICAL")
    app.score(trace, "correctness", 0.25, observation_id=generation["id"])
    (key,) = [k for k, s in app.server.scores.items() if s["name"] == "polite"]
    app.server.scores[key] |= {"source": "ANNOTATION", "authorUserId": "ada"}
    bring(reward="correctness")
    trajectory = only(store)
    assert (trajectory.reward, trajectory.components) == (0.75, {"polite": 1.0})
    assert list(trajectory.step_rewards.values()) == [0.25]
    assert set(trajectory.step_rewards) <= {s.id for s in trajectory.steps}
    assert store.scores(trajectory.id)[-1].explanation == "better than I thought"
    assert [s["name"] for s in trajectory.metadata["langfuse"]["scores"]].count("topic") == 1
    (said,) = store.feedback(trajectory.id)
    assert (said.kind, said.value, said.author, said.comment) == ("thumb", 1.0, "ada", "polite")


def test_imported_trajectories_can_be_judged_audited_and_fine_tuned_on(
    app: App, store: Store, bring: Callable[..., Any], tmp_path: Path
) -> None:
    for text in ("same", "same", "same"):
        app.score(app.run(text), "helpful", 0.5)
    bring(reward="helpful")
    trajectories = list(store.trajectories())
    (group,) = groups_from(trajectories)

    class FirstIsBest:
        name = "first-is-best"

        async def ask(self, messages: Any, schema: Any) -> Answer:
            names = list(runs(messages))
            return Answer(told([(name, 1.0 if name == names[0] else 0.25) for name in names]))

    (judgement,) = Ruler(FirstIsBest(), rubric="Be right.").score_groups([group])
    judged = judgement.apply(group)
    assert [t.reward for t in judged] == [1.0, 1.0, 1.0]  # they said the same
    report = audit(trajectories)
    assert (report.groups, report.trajectories, report.scored) == (1, 3, 3)
    path = tmp_path / "tune.jsonl"
    assert export_conversations(trajectories, path) == 9
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["tools"][0]["function"]["name"] == "look"


def test_a_failed_trace_is_a_failed_trajectory_without_a_reward(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    trace = app.run("break")
    app.score(trace, "reward", 0.0)
    bring()
    trajectory = only(store)
    assert trajectory.failure is not None
    assert (trajectory.failure.cause, trajectory.failure.message) == ("exception", "no more")
    assert trajectory.reward is None


def test_scenarios_and_groups_are_made_of_what_was_asked(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    for text in ("same", "same", "other"):
        app.run(text)
    bring()
    trajectories = list(store.trajectories())
    scenarios = sorted(scenarios_from(trajectories), key=lambda s: str(s.inputs), reverse=True)
    assert [s.inputs["messages"][0]["content"] for s in scenarios] == ["same", "other"]
    (group,) = groups_from(trajectories)
    assert (len(group), group.scenario.inputs) == (2, scenarios[0].inputs)
    state = graph(app.llm).invoke(scenarios[1].inputs)  # a graph takes it as it is
    assert state["messages"][0].content == "other"
