"""Which steps are trained, and what each is credited with."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.capture import superseded
from art_core.errors import ConfigError
from art_core.selection import (
    NOT_SELECTED,
    SUPERSEDED,
    Models,
    Namespaces,
    Nodes,
    Tags,
    Where,
    as_selection,
    choose,
    returns,
    step_reward,
)
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)

POLICY = PolicyVersion("agent", 2)


def step(name: str, *, at: float = 0.0, **changes) -> Step:
    identity = StepIdentity(
        node=changes.pop("node", name),
        namespace=changes.pop("namespace", f"{name}:u-{name}"),
        attempt=changes.pop("attempt", 1),
        tags=changes.pop("tags", ()),
    )
    default = {
        "rollout_id": "t",
        "messages": ({"role": "user", "content": "hi"},),
        "model": "agent@2",
        "policy": POLICY,
        "tokens": StepTokens((1,), (2,), (-0.5,)),
        "response": {"role": "assistant", "content": "ho"},
        "started_at": at,
        "duration": 1.0,
        "identity": identity,
    }
    return Step(id=name, **{**default, **changes})


def trajectory(*steps: Step, **changes) -> Trajectory:
    return Trajectory(
        **{
            "id": "t",
            "scenario": Scenario("s"),
            "steps": steps,
            "status": RolloutStatus.FINISHED,
            **changes,
        }
    )


def names(steps) -> list[str]:
    return [s.id for s in steps]


PLAN = step("plan", node="planner", tags=("outer", "plan"))
WORK = step("work", node="writer", namespace="work:1-a|writer:2-b", tags=("draft",))
JUDGE = step("judge", node="judge", model="gpt-x", policy=None, tokens=None)
ALL = trajectory(PLAN, WORK, JUDGE)


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (None, ["plan", "work"]),
        ("planner", ["plan"]),
        (Nodes("planner", "writer"), ["plan", "work"]),
        (Nodes("plan*"), ["plan"]),
        (~Nodes("planner"), ["work"]),
        (Namespaces("work:*"), ["work"]),
        (Namespaces("work|*"), ["work"]),
        (Namespaces("work"), []),
        (Namespaces("plan:u-plan"), ["plan"]),
        (Tags("draft", "outer"), ["plan", "work"]),
        (Tags("outer") & Tags("plan"), ["plan"]),
        (Models("agent"), ["plan", "work"]),
        (Models("agent@2") & ~Tags("draft"), ["plan"]),
        (Models("other"), []),
        (lambda s: s.id == "work", ["work"]),
        (Nodes("planner") | (lambda s: s.id == "work"), ["plan", "work"]),
        ((lambda s: s.id == "work") & Tags("draft"), ["work"]),
        ((lambda s: False) | Tags("draft"), ["work"]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),  # no address: workers must agree
)
def test_a_selection_trains_exactly_what_it_names(selection, chosen) -> None:
    assert names(choose(ALL, selection).steps) == chosen


def test_a_selection_reads_as_it_was_written() -> None:
    assert (
        repr(Nodes("a", "b") & ~Tags("x") | Models("m")) == "((Nodes('a', 'b') & ~Tags('x')) | Models('m'))"
    )
    assert "names" in repr(Where(names))


def test_selections_of_the_same_kind_and_names_are_equal_and_of_other_kinds_are_not() -> None:
    assert Nodes("a") == Nodes("a")
    assert Nodes("a") != Tags("a")
    assert Nodes("a") & Tags("b") == Nodes("a") & Tags("b")


@given(st.lists(st.sampled_from(["a", "b", "c"]), unique=True), st.sampled_from(["a", "b", "c"]))
def test_selections_combine_like_sets(tags: list[str], node: str) -> None:
    one, left, right = step("s", node=node, tags=tuple(tags)), Tags("a", "b"), Nodes("a")
    assert (left & right)(one) == (left(one) and right(one))
    assert (left | right)(one) == (left(one) or right(one))
    assert (~left)(one) == (not left(one))
    assert (~(left | right))(one) == (~left & ~right)(one)


def test_every_step_that_is_not_trained_is_counted_under_its_reason() -> None:
    cached = step("cached", untrainable="answered by a cache", tokens=None)
    broken = step("broken", tokens=None, response=None, error="boom")
    bare = step("bare", tokens=None)
    silent = step("silent", tokens=StepTokens((1,), (), ()))
    again = step("again", namespace="plan:u-plan", attempt=2)
    chosen = choose(
        trajectory(PLAN, again, WORK, JUDGE, cached, broken, bare, silent), Nodes("again", "judge")
    )
    assert names(chosen.steps) == ["again"]
    assert chosen.left_out == {
        SUPERSEDED: 1,
        NOT_SELECTED: 1,
        "the server gave no token ids": 2,
        "answered by a cache": 1,
        "the call failed": 1,
        "no token was sampled": 1,
    }


def test_an_answer_that_did_not_parse_is_trained_because_it_was_sampled() -> None:
    """C01, C08."""
    unparsed = step("s", error="could not parse", response={"role": "assistant", "content": "{"})
    assert names(choose(trajectory(unparsed)).steps) == ["s"]


def test_an_attempt_that_a_later_one_replaced_is_not_trained_unless_asked() -> None:
    """C11."""
    first = step("first", namespace="work:1", attempt=1)
    aside = step("aside", namespace="work:2", attempt=1)
    second = step("second", namespace="work:1", attempt=2)
    third = step("third", namespace="work:1", attempt=3)
    retried = trajectory(first, aside, second, third)
    assert superseded(retried.steps) == {"first", "second"}
    assert names(choose(retried).steps) == ["aside", "third"]
    assert names(choose(retried, include_superseded=True).steps) == ["first", "aside", "second", "third"]


@pytest.mark.parametrize("wrong", [3, object()])
def test_a_choice_that_is_none_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="expected a selection"):
        as_selection(wrong)


def test_naming_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Nodes\(\) names nothing"):
        Nodes()
    with pytest.raises(ConfigError, match="expected strings"):
        Nodes(["a", "b"])  # type: ignore[arg-type]


def test_the_most_specific_reward_wins() -> None:
    scored = trajectory(
        PLAN,
        WORK,
        JUDGE,
        reward=1.0,
        node_rewards={"planner": 2.0, "writer": 3.0},
        step_rewards={"work": 4.0},
    )
    assert [step_reward(scored, s) for s in scored.steps] == [2.0, 4.0, 1.0]
    assert returns(scored) == {"plan": 2.0, "work": 4.0, "judge": 1.0}


def test_a_failed_rollout_credits_nothing() -> None:
    """C33."""
    failed = trajectory(
        PLAN,
        status=RolloutStatus.FAILED,
        failure=Failure("timeout", "too slow"),
        step_rewards={"plan": 1.0},
        node_rewards={"planner": 1.0},
    )
    assert step_reward(failed, PLAN) is None
    assert returns(failed) == returns(failed, 0.9) == {}


def test_without_any_reward_nothing_is_credited() -> None:
    assert returns(ALL) == returns(ALL, 1.0) == {}


def test_discounted_returns_credit_a_step_with_what_came_after_it() -> None:
    a, b, c = step("a", at=0), step("b", at=1), step("c", at=2)
    credited = returns(trajectory(a, b, c, reward=1.0, step_rewards={"a": 0.5}, node_rewards={"b": 2.0}), 0.5)
    assert credited == {"a": 0.5 + 0.5 * (2.0 + 0.5 * 1.0), "b": 2.0 + 0.5 * 1.0, "c": 1.0}
    assert list(credited) == ["a", "b", "c"]


def test_a_nodes_reward_falls_due_once_at_its_last_step() -> None:
    a, b = step("a", at=0, node="n"), step("b", at=1, node="n")
    assert returns(trajectory(a, b, node_rewards={"n": 1.0}), 0.5) == {"a": 0.5, "b": 1.0}


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0, 1))
def test_returns_follow_the_recursion(rewards: list[float], gamma: float) -> None:
    steps = [step(f"s{i}", at=i) for i in range(len(rewards))]
    credited = list(
        returns(
            trajectory(*steps, step_rewards=dict(zip(map(str, names(steps)), rewards, strict=True))), gamma
        ).values()
    )
    for i, value in enumerate(credited):
        ahead = credited[i + 1] if i + 1 < len(credited) else 0.0
        assert math.isclose(value, rewards[i] + gamma * ahead, abs_tol=1e-9)


def test_superseded_steps_take_no_part_in_discounting() -> None:
    first = step("first", at=0, namespace="n:1", attempt=1)
    second = step("second", at=1, namespace="n:1", attempt=2)
    assert returns(trajectory(first, second, reward=1.0), 0.5) == {"second": 1.0}


def test_a_discount_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="gamma"):
        returns(ALL, 1.5)
