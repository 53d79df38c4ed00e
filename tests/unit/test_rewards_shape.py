"""Rewards of steps, lengths, time, money, valid JSON, and of single steps and nodes."""

import asyncio
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.conversations import call, conversation, tool
from helpers.trajectories import a_step, a_trajectory
from pydantic import BaseModel

from art_core.errors import ConfigError, RewardError
from art_core.rewards import (
    Cost,
    Efficiency,
    ExactMatch,
    Format,
    Latency,
    Length,
    Outcome,
    PerNode,
    PerStep,
    Price,
    Steps,
    ToolErrors,
    ValidJSON,
    ValidToolCalls,
    component,
    score_trajectories,
)
from art_core.selection import returns, step_reward
from art_core.training.advantages import step_advantages
from art_core.types import Trajectory, TrajectoryGroup


def test_steps_are_answered_calls_whose_choices_count_once() -> None:
    choices = [a_step("t", i, call_id="c1", choice=i) for i in range(2)]
    lost = a_step("t", 2, response=None, error="timeout")
    run = replace(a_trajectory("t"), steps=(*choices, lost))
    assert Steps().value(run) == 1
    assert Cost({"agent": Price(1e6, 0)}).value(run) == 3
    assert Steps(node="nobody").value(run) == 0


def test_lengths_are_sampled_tokens_or_characters_of_the_answer() -> None:
    run = a_trajectory("t", steps=3)
    assert Length().value(run) == 6
    assert Length(unit="characters").value(run, "four") == 4
    told = replace(run, steps=(a_step("t", tokens=None, usage={"prompt_tokens": 9, "completion_tokens": 7}),))
    assert Length().value(told) == 7
    with pytest.raises(ConfigError, match="unit='words'"):
        Length(unit="words")  # type: ignore[arg-type]


def test_latency_is_the_rollouts_own_or_so_far_or_that_of_the_models() -> None:
    run = a_trajectory("t", steps=2)
    assert Latency().value(run) == 3.0
    assert Latency().value(replace(run, duration=None)) == pytest.approx(2.25)
    assert Latency(models_only=True).value(run) == 0.5


def test_cost_is_tokens_times_prices_and_an_unknown_price_is_an_error() -> None:
    run = replace(
        a_trajectory("t", steps=1),
        steps=(
            a_step("t", 0),
            a_step(
                "t",
                1,
                model="big",
                policy=None,
                tokens=None,
                usage={"prompt_tokens": 1000, "completion_tokens": 10},
            ),
        ),
    )
    prices = {"agent": Price(1, 2), "big": Price(3, 15)}
    assert Cost(prices).value(run) == pytest.approx((3 * 1 + 2 * 2 + 3000 + 150) / 1e6)
    with pytest.raises(RewardError, match=r"no price for model 'big'.*'agent'"):
        Cost({"agent": Price(1, 2)}).value(run)
    with pytest.raises(ConfigError, match="not negative"):
        Price(-1, 2)


def test_tokens_that_nobody_counted_are_an_error() -> None:
    """C33."""
    run = replace(a_trajectory("t"), steps=(a_step("t", tokens=None, usage={}),))
    for reward in (Length(), Cost({"agent": Price(1, 1)})):
        with pytest.raises(RewardError, match="s-t-0 has neither token ids nor 'prompt_tokens'"):
            reward.value(run)


@pytest.mark.parametrize(("steps", "share"), [(1, 1), (2, 1), (4, 0.5), (6, 0), (9, 0)])
def test_efficiency_falls_in_a_line_from_good_to_bad(steps: int, share: float) -> None:
    [found] = score_trajectories(1.0 * Efficiency(Steps(), good=2, bad=6), [a_trajectory("t", steps=steps)])
    assert found.reward == share
    assert found.components == {"steps_efficiency": share, "steps_efficiency/steps": steps}


def test_efficiency_may_rise_and_needs_two_ends() -> None:
    more = Efficiency(points, good=10, bad=0, name="points")
    [found] = score_trajectories(more, [a_trajectory("t", metrics={"points": 4})])
    assert found.reward == pytest.approx(0.4)
    with pytest.raises(ConfigError, match="two different numbers"):
        Efficiency(Steps(), good=1, bad=1)


def points(trajectory: Trajectory) -> float:
    return trajectory.metrics["points"]


def test_an_outcome_is_read_from_the_state_or_the_metrics_and_is_never_guessed() -> None:
    """C33."""
    run = a_trajectory("t", metrics={"moves": 9.0})
    assert Outcome("won").value(run, {"won": True}) == 1
    assert Outcome("moves").value(run, {"won": True}) == 9
    with pytest.raises(RewardError, match=r"neither .* have 'lost' .they have: 'moves', 'won'"):
        Outcome("lost").value(run, {"won": True})
    with pytest.raises(RewardError, match="'won' of trajectory t is None"):
        Outcome("won").value(run, {"won": None})


# -- JSON --------------------------------------------------------------------------------------------


class Reply(BaseModel):
    name: str
    age: int


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("said", "valid"),
    [
        ('{"age": 3}', 1),
        ('```json\n{"age": 3}\n```', 1),
        ('{"age": -3}', 0),
        ('{"age": NaN}', 0),
        ("age: 3", 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_an_answer_is_valid_when_its_schema_allows_it(said: str, valid: int) -> None:
    assert ValidJSON(SCHEMA).value(conversation(said)) == valid


def test_a_graphs_state_is_not_taken_for_its_answer() -> None:
    assert ValidJSON().value(conversation("no JSON"), {"messages": []}) == 0


def test_any_json_a_pydantic_model_and_parsed_output_are_checked_too() -> None:
    run = conversation('{"name": "Ada", "age": 36}')
    assert ValidJSON().value(run) == 1
    assert ValidJSON(Reply).value(run) == 1
    parsed = ValidJSON(SCHEMA, key="structured_response")
    assert parsed.value(run, {"messages": [], "structured_response": Reply(name="Ada", age=36)}) == 1
    assert parsed.value(run, {"structured_response": {"age": -1}}) == 0
    with pytest.raises(RewardError, match=r"no 'structured_response' \(it has: 'messages'\)"):
        parsed.value(run, {"messages": []})
    assert ValidJSON(SCHEMA, fenced=False).value(conversation('```\n{"age": 3}\n```')) == 0


def test_a_schema_that_is_none_is_refused_at_once_and_one_elsewhere_is_not_fetched() -> None:
    with pytest.raises(ConfigError, match=r"'valid_json'.*no JSON Schema.*\$\.type"):
        ValidJSON({"type": "objekt"})
    asked: list[str] = []

    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "object"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Schemas) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/schema.json"
        [found] = score_trajectories(ValidJSON({"$ref": address}), [conversation("{}")])
        tools = [tool("read", id={"$ref": address})]
        with pytest.raises(RewardError, match=f"parameters of tool 'read'.*{address}.*nothing is fetched"):
            ValidToolCalls().value(conversation([call("read", {"id": "m1"})], tools=tools))
        server.shutdown()
    assert asked == []
    assert found.reward is None
    assert found.failure is not None
    assert "'valid_json'" in found.failure.message
    assert "$defs" in found.failure.message


def test_tool_calls_are_valid_by_their_tools_own_schemas() -> None:
    tools = [tool("read", id={"type": "string"})]
    calls = [
        call("read", {"id": "m1"}),
        call("read", {"id": 7}),
        call("read", "{"),
        call("write", {"id": "m1"}),
    ]
    assert ValidToolCalls().value(conversation(calls, tools=tools)) == 1 / 4
    assert ValidToolCalls().value(conversation("no calls")) == 1


# -- steps and nodes ---------------------------------------------------------------------------------


def test_a_reward_per_step_is_kept_by_step_and_weighted_with_its_sum() -> None:
    run = conversation([call("read", "{")], [call("read", {})], "done")
    [found] = score_trajectories(1.0 * ExactMatch() - 0.5 * PerStep(ToolErrors()), [with_answer(run, "done")])
    assert found.step_rewards == {"s-t-0": 0.5, "s-t-1": 1.0, "s-t-2": 1.0}
    assert found.components == {"exact_match": 1.0, "tool_errors": pytest.approx(1 / 3)}
    assert found.reward == pytest.approx(1 - 0.5 / 3)


@pytest.mark.parametrize(
    ("summary", "total"), [("mean", 0.5), ("sum", 1), ("min", 0), ("max", 1), ("last", 1)]
)
def test_a_reward_per_node_is_asked_of_the_nodes_own_calls(summary, total: float) -> None:
    run = conversation("draft", "<final>", nodes=["writer", "editor"])
    reward = PerNode(Format("<.*>"), summary=summary, name="tagged")
    [found] = score_trajectories(reward, [run], outputs=["the output is nobody's own"])
    assert found.node_rewards == {"writer": 0.0, "editor": 1.0}
    assert found.components == {"tagged": total, "tagged/writer": 0.0, "tagged/editor": 1.0}
    assert found.reward == total
    [only] = score_trajectories(PerNode(Format("<.*>"), "editor"), [run])
    assert only.node_rewards == {"editor": 1.0}


def test_async_functions_are_asked_per_step_and_a_failure_names_the_step() -> None:
    @component
    async def judge(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return {"a": 0.5, "b": 0.25}[trajectory.steps[0].message()]

    fine, broken = score_trajectories(PerStep(judge), [conversation("a", "b"), conversation("a", "c")])
    assert fine.step_rewards == {"s-t-0": 0.5, "s-t-1": 0.25}
    assert broken.reward is None
    assert broken.failure is not None
    assert "judge of s-t-1" in broken.failure.message
    with pytest.raises(ConfigError, match="summary='median'"):
        PerStep(judge, summary="median")  # type: ignore[arg-type]


def test_nothing_to_ask_is_an_error() -> None:
    for reward in (PerStep(Steps(), node="x"), PerNode(Steps(), "x")):
        [found] = score_trajectories(reward, [conversation("a", "b", nodes=["writer", "editor"])])
        assert found.reward is None
        assert found.failure is not None
        assert (
            "no answered call to be judged; nodes with answered calls: editor, writer"
            in found.failure.message
        )


def test_steps_of_a_sum_are_worth_what_every_component_gives_them() -> None:
    run = conversation([call("read", "{")], "done", "off", nodes=["a", "a", "b"], answer="off")
    total = ExactMatch() - PerStep(ToolErrors(), node="a") + 2 * PerNode(Steps(), "b")
    [found] = score_trajectories(total, [run])
    assert found.reward == pytest.approx(1 - 0.5 + 2 * 1)
    for step, worth in zip(run.steps, (1 - 1 + 2, 1 - 0 + 2, 1 - 0.5 + 2), strict=True):
        assert step_reward(found, step) == pytest.approx(worth)
    [events] = score_trajectories(total.as_events() / 1, [run])
    assert events.reward == found.reward
    assert (events.step_rewards, events.node_rewards) == ({"s-t-0": -1.0, "s-t-1": 0.0}, {"b": 2.0})


def test_what_steps_earned_is_credited_once_with_gamma() -> None:
    run = conversation([call("read", "{")], "done", answer="done")
    total = (ExactMatch() - PerStep(ToolErrors(), summary="none")).as_events()
    [found] = score_trajectories(total, [run])
    assert found.reward == 1.0
    assert returns(found, 1.0) == {"s-t-0": 0.0, "s-t-1": 1.0}


def test_the_outcome_and_the_steps_of_a_sum_both_reach_the_advantages() -> None:
    turns = [call("read", "{")], [call("read", {})]
    runs = [
        replace(conversation(turn, said, answer="right"), id=f"{i}{said}")
        for i, turn in enumerate(turns)
        for said in ("right", "wrong")
    ]
    reward = ExactMatch() - 0.5 * PerStep(ToolErrors())
    group = TrajectoryGroup(runs[0].scenario, tuple(score_trajectories(reward, runs)))
    found = step_advantages(group)
    first = [found[run.id]["s-t-0"] for run in runs]
    assert first == pytest.approx([0.5 - 0.375, -0.5 - 0.375, 0.5 + 0.125, -0.5 + 0.125])


def with_answer(run: Trajectory, answer: str) -> Trajectory:
    return replace(run, scenario=replace(run.scenario, metadata={"answer": answer}))
