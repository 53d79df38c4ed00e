import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from fakes.langfuse_server import SECRET_KEY, LangfuseServer
from fakes.vllm_server import FakeVLLM, ToolCall
from helpers.judges import runs, told
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langfuse import Langfuse
from langfuse.langchain import CallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt
from opentelemetry.sdk.trace import TracerProvider

from art_core.errors import ConfigError
from art_core.jsonl import conversations, export_conversations
from art_core.rewards import Answer, Ruler
from art_core.rewards.audit import audit
from art_core.store import Store
from art_core.types import RolloutStatus, Trajectory
from art_langgraph.langfuse.client import LangfuseClient, LangfuseError
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import export_to_langfuse
from art_langgraph.langfuse.importing import import_file, import_from_langfuse
from art_langgraph.langfuse.traces import TraceFilter
from art_langgraph.langfuse.trajectories import groups_from, scenarios_from

RECORDED = Path(__file__).parents[1] / "data" / "langfuse_traces.json"


@dataclass
class App:
    """A LangGraph application in production: stock ChatOpenAI, stock CallbackHandler."""

    server: LangfuseServer
    llm: FakeVLLM
    sdk: Langfuse

    def run(self, text: str, **metadata: Any) -> str:
        """Ask it something; the trace's id."""
        handler = CallbackHandler(public_key=self.server.public_key)
        try:
            graph(self.llm).invoke(
                {"messages": [("user", text)]}, config={"callbacks": [handler], "metadata": metadata}
            )
        except ZeroDivisionError:
            assert text == "break"
        self.sdk.flush()
        assert handler.last_trace_id is not None
        return handler.last_trace_id

    def score(self, trace: str, name: str, value: Any, **more: Any) -> None:
        self.sdk.create_score(trace_id=trace, name=name, value=value, **more)
        self.sdk.flush()


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def graph(llm: FakeVLLM) -> Any:
    @tool
    def look(cell: int) -> str:
        """Look at a cell."""
        return f"cell {cell} is free"

    model = ChatOpenAI(model="gpt-x", base_url=llm.base_url, api_key="k", temperature=0.5)  # type: ignore[arg-type]
    flaky = {"tries": 0}

    def agent(state: State) -> dict[str, Any]:
        if state["messages"][-1].content == "break":
            raise ZeroDivisionError("no more")
        return {"messages": [model.bind_tools([look]).invoke(state["messages"])]}

    def critic(state: MessagesState) -> dict[str, Any]:
        answer = model.invoke([("system", "Judge."), ("user", str(state["messages"][-1].content))])
        flaky["tries"] += 1
        if flaky["tries"] == 1:
            raise ConnectionError("the network is down")
        return {"messages": [answer]}

    inner = StateGraph(MessagesState)
    inner.add_node("critic", critic, retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.01))
    inner.add_edge(START, "critic")
    outer = StateGraph(State)
    outer.add_node("agent", agent)
    outer.add_node("tools", ToolNode([look]))
    outer.add_node("review", inner.compile())
    outer.add_edge(START, "agent")
    outer.add_conditional_edges(
        "agent", lambda s: "tools" if s["messages"][-1].tool_calls else "review", ["tools", "review"]
    )
    outer.add_edge("tools", "agent")
    outer.add_edge("review", END)
    return outer.compile()


def say(request: dict[str, Any]) -> Any:
    last = request["messages"][-1]
    if request["messages"][0]["role"] == "system":
        return "good"
    return [ToolCall("look", '{"cell": 3}')] if last["role"] == "user" else "it is free"


@pytest.fixture
def app() -> Iterator[App]:
    # The SDK keeps one client for each public key for the whole process.
    with LangfuseServer(public_key=f"pk-{uuid.uuid4()}") as server, FakeVLLM(say) as llm:
        sdk = Langfuse(
            public_key=server.public_key,
            secret_key=SECRET_KEY,
            base_url=server.base_url,
            tracer_provider=TracerProvider(),
        )
        yield App(server, llm, sdk)
        sdk.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


@pytest.fixture
def bring(app: App, store: Store) -> Iterator[Callable[..., Any]]:
    settings = LangfuseConnection(
        public_key=app.server.public_key,
        secret_key=SECRET_KEY,  # type: ignore[arg-type]
        base_url=app.server.base_url,
        requests_per_minute=60_000,
        attempts=2,
        patience=5,
    )
    with LangfuseClient(settings) as client:

        def bring(**options: Any) -> Any:
            filters = {k: options.pop(k) for k in list(options) if k in TraceFilter.model_fields}
            return import_from_langfuse(store, TraceFilter(**filters), client=client, **options)

        yield bring


def only(store: Store) -> Trajectory:
    (trajectory,) = store.trajectories()
    return trajectory


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


def test_importing_again_brings_what_is_new_and_nothing_twice(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    first = app.run("one")
    bring()
    asked = len(app.server.asked)
    again = bring()
    assert (again.imported, again.updated, again.unchanged) == ((), (), 1)
    assert len(app.server.asked) - asked == 2  # its root and its scores
    app.score(first, "reward", 1.0)
    app.run("two")
    third = bring()
    assert (len(third.imported), len(third.updated)) == (1, 1)
    assert sorted(t.reward or 0.0 for t in store.trajectories()) == [0.0, 1.0]
    app.run("three")
    newer = bring(only_new=True)
    assert len(newer.imported) == 1
    assert newer.unchanged == 1  # the one that the last import ended with
    assert len(list(store.trajectories())) == 3


def test_what_is_said_here_stands_until_something_new_is_said_there(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    trace = app.run("one")
    app.score(trace, "reward", 0.25)
    app.score(trace, "other", 0.5)
    bring()
    name = only(store).id
    store.score(name, 0.75, author="ada")
    assert bring().unchanged == 1
    assert only(store).reward == 0.75
    app.score(trace, "reward", 1.0)
    assert bring().updated == (name,)
    assert [s.reward for s in store.scores(name)] == [0.25, 0.75, 1.0]
    assert bring(reward="other").updated == (name,)  # another score is the reward
    assert (only(store).reward, only(store).components) == (0.5, {"reward": 1.0})


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


def test_filters_choose_by_tag_name_session_time_and_score(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    tagged = app.run("a", langfuse_tags=["prod", "eu"], langfuse_session_id="s-1")
    named = app.run("b", langfuse_tags=["prod"], langfuse_trace_name="checkout")
    app.score(tagged, "quality", 0.9)
    app.score(named, "quality", 0.2)

    def found(**filters: Any) -> set[str]:
        bring(**filters)
        ids = {t.metadata["langfuse"]["trace_id"] for t in store.trajectories()}
        for name in list(brought):
            ids.discard(name)
        brought.update(ids)
        return ids

    brought: set[str] = set()
    now = datetime.now(UTC)
    assert found(tags=("eu",), name="checkout") == set()
    assert found(since=now + timedelta(minutes=1)) == set()
    assert found(until=now - timedelta(minutes=10)) == set()
    assert found(score="quality", score_min=0.95) == set()
    assert found(session_id="s-1", tags=("prod", "eu"), score="quality", score_min=0.5) == {tagged}
    assert found(name="checkout", since=now - timedelta(minutes=10), score="quality", score_max=0.5) == {
        named
    }
    with pytest.raises(ConfigError, match="score_min and score_max are bounds of a score"):
        TraceFilter(score_min=0.5)


def test_traces_of_many_pages_come_whole(app: App, store: Store, bring: Callable[..., Any]) -> None:
    app.server.page = 3
    for number in range(5):
        app.run(f"question {number}")
    assert len(bring().imported) == 5
    assert {len(t.steps) for t in store.trajectories()} == {4}
    assert len({t.scenario.id for t in store.trajectories()}) == 5


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


def test_a_trace_that_was_interrupted_and_resumed_is_one_trajectory_that_grows(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    model = ChatOpenAI(model="gpt-x", base_url=app.llm.base_url, api_key="k")  # type: ignore[arg-type]

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def approve(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([("system", interrupt("go on?"))])]}

    builder = StateGraph(MessagesState).add_node("ask", ask).add_node("approve", approve)
    builder.add_edge(START, "ask").add_edge("ask", "approve").add_edge("approve", END)
    waiting = builder.compile(checkpointer=InMemorySaver())
    # As an application does that wants both halves in one trace.
    trace = Langfuse.create_trace_id(seed="thread-1")
    handler = CallbackHandler(public_key=app.server.public_key, trace_context={"trace_id": trace})
    config: Any = {"callbacks": [handler], "configurable": {"thread_id": "1"}}
    waiting.invoke({"messages": [("user", "hi")]}, config=config)
    app.sdk.flush()
    assert len(bring().imported) == 1
    before = only(store)
    assert (len(before.steps), before.status) == (1, RolloutStatus.FINISHED)
    waiting.invoke(Command(resume="yes"), config=config)
    app.sdk.flush()
    app.score(trace, "reward", 0.5)
    again = bring()
    assert (again.imported, again.updated) == ((), (before.id,))
    after = only(store)
    assert [(s.identity.node, s.identity.attempt) for s in after.steps] == [("ask", 1), ("approve", 2)]
    assert (after.reward, after.duration) > (0.4, before.duration)
    assert bring().unchanged == 1


def test_a_server_that_fails_keeps_what_came_before_and_goes_on_the_next_time(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    app.run("one")
    app.run("two")
    app.server.break_(path="/api/public/v2/observations", after=2, times=None, status=503)
    with pytest.raises(LangfuseError, match="do it again later"):
        bring()
    assert len(list(store.trajectories())) == 1
    app.server.mend()
    assert (len(bring(only_new=True).imported), len(list(store.trajectories()))) == (1, 2)


def test_what_was_exported_from_here_is_left_out_and_survives_the_way_there_and_back(
    app: App, store: Store, bring: Callable[..., Any], tmp_path: Path
) -> None:
    app.run("hi")
    bring()
    imported = only(store)
    settings = LangfuseConnection(
        public_key=app.server.public_key,
        secret_key=SECRET_KEY,  # type: ignore[arg-type]
        base_url=app.server.base_url,
    )
    with LangfuseClient(settings) as client:
        assert export_to_langfuse(store, client=client).confirmed == 1
    again = bring()
    assert (again.imported, again.own) == ((), 1)
    generations = [o for o in app.server.observations.values() if o["type"] == "GENERATION"]
    assert len(generations) == 2 * len(imported.steps)


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


def test_a_recorded_export_is_read_from_a_file(store: Store, tmp_path: Path) -> None:
    result = import_file(store, RECORDED, reward="helpfulness")
    assert (len(result.imported), result.failed) == (2, {})
    one, two = store.trajectories()
    assert (one.reward, one.components) == (0.9, {"concise": 1.0})
    assert [s.identity.node for s in one.steps] == ["answer"]
    assert one.steps[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert one.steps[0].usage == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    assert two.failure is not None
    lines = tmp_path / "traces.jsonl"
    lines.write_text("".join(json.dumps(trace) + "\n" for trace in json.loads(RECORDED.read_text())))
    assert import_file(store, lines, reward="helpfulness").unchanged == 2
    loose = tmp_path / "observations.json"
    recorded = json.loads(RECORDED.read_text())
    loose.write_text(json.dumps({"data": [o for trace in recorded for o in trace["observations"]]}))
    with Store.open("q", tmp_path) as other:
        assert len(import_file(other, loose).imported) == 2
        assert [len(t.steps) for t in other.trajectories()] == [1, 1]


def test_odd_traces_in_a_file_do_no_harm(store: Store, tmp_path: Path) -> None:
    time = {"startTime": "2026-10-02T09:15:00Z", "endTime": "2026-10-02T09:15:01Z"}
    circle = [
        {"id": "a", "type": "SPAN", "parentObservationId": "b", "level": "DEBUG", **time},
        {"id": "b", "type": "GENERATION", "parentObservationId": "a", "input": 3, "output": [[]], **time},
    ]
    odd = [{"id": "c", "type": "GENERATION", "input": {"lc": 1}, "metadata": "none", "usage": [], **time}]
    path = tmp_path / "odd.json"
    traces = [{"id": "t-1", "observations": circle}, {"id": "t-2", "observations": odd}]
    path.write_text(json.dumps([*traces, {"id": "t-3", "observations": []}]))
    result = import_file(store, path)
    assert (len(result.imported), result.failed) == (2, {"t-3": "it has no observations"})
    one, two = store.trajectories()
    assert one.steps[0].messages == ({"role": "user", "content": "3"},)
    assert two.steps[0].messages == ({"role": "user", "content": '{"lc": 1}'},)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{nonsense", "line 1: not JSON"),
        ('[{"id": "t", "observations": ["o-1"]}]', "without holding them"),
        ('[{"id": "t"}]', "neither a trace with its observations nor an observation"),
        ("[3]", "expected an object, found int"),
        ("3", "expected a list of traces or observations, found int"),
        ('{"data": null}', "expected a list of traces or observations, found NoneType"),
        ('[{"id": "t", "observations": [{"id": "o"}]}]', "no type, startTime"),
        (
            '[{"id": "t", "observations": [{"id": "o", "type": "SPAN", "startTime": "noon"}]}]',
            "observation o: 'noon' is not a time",
        ),
    ],
)
def test_a_file_of_something_else_says_where_it_goes_wrong(
    store: Store, tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "traces.json"
    path.write_text(content)
    with pytest.raises(LangfuseError, match=says):
        import_file(store, path)
    assert not list(store.trajectories())
