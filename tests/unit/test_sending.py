"""What trainer processes get of groups."""

import pickle
from dataclasses import replace

from helpers.training import group, step, trajectory
from hypothesis import given
from hypothesis import strategies as st

from art_core.training.sending import common, continued, pack, unpack
from art_core.types import Span, TrajectoryGroup

IDS = st.lists(st.integers(0, 2), max_size=6).map(tuple)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def agents(rollouts: int, turns: int, prompt: int = 400) -> TrajectoryGroup:
    """Each turn goes on from the one before; all begin alike."""
    members = []
    for i in range(rollouts):
        text = [1000 + j for j in range(prompt)]
        steps = []
        for turn in range(turns):
            answer = [2000 + 10 * i + turn] * 5
            steps.append(step(f"{i}-{turn}", text, answer))
            text = [*text, *answer, 3000 + i, 3001 + turn]
        members.append(trajectory(f"{i}", float(i), *steps))
    return group(*members)


def tokens(groups: list[TrajectoryGroup]) -> list[object]:
    return [s.tokens for g in groups for t in g for s in t.steps]


@given(
    st.lists(st.lists(st.one_of(st.none(), st.tuples(PROMPTS, IDS)), max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_all_tokens_arrive_however_texts_begin(rollouts, pickled):
    members = []
    for i, turns in enumerate(rollouts):
        steps = [
            replace(made := step(f"{i}-{j}", *(turn or ((1,), ()))), tokens=made.tokens if turn else None)
            for j, turn in enumerate(turns)
        ]
        members.append(trajectory(f"{i}", 1.0 * i, *steps))
    groups = [group(*members), group(*reversed(members))]
    sent = pack(groups)
    arrived = unpack(pickle.loads(pickle.dumps(sent)) if pickled else sent)
    assert tokens(arrived) == tokens(groups)
    assert [[t.id for t in g] for g in arrived] == [[t.id for t in g] for g in groups]


def test_what_training_does_not_read_stays_behind_and_all_else_arrives():
    said = ({"role": "user", "content": "hello"},)
    whole = replace(
        step("a", [1, 2], [3], node="n", sampling={"temperature": 0.5}, version=3),
        messages=said,
        response={"role": "assistant", "content": "x"},
        finish_reason="length",
    )
    span = Span(id="s", name="n", kind="node", started_at=0.0, duration=1.0)
    member = replace(trajectory("t", 1.0, whole), spans=(span,), step_rewards={"a": 2.0})
    ((arrived,),) = unpack(pack([group(member)]))
    bare = replace(whole, messages=(), response=None)
    assert arrived == replace(member, spans=(), steps=(bare,))


def test_a_message_grows_with_what_is_new_and_not_with_what_is_repeated():
    rollouts, turns, prompt = 8, 6, 400
    sent = pack([agents(rollouts, turns, prompt)])
    ids = sum(len(t.rest) for t in sent[0].tokens if t is not None)
    assert ids == prompt + rollouts * (turns - 1) * 2  # what a tool said after each answer
    assert len(pickle.dumps(sent)) < len(pickle.dumps([agents(rollouts, turns, prompt)])) / 3


@given(
    st.lists(st.integers(0, 1), max_size=12).map(tuple), st.lists(st.integers(0, 1), max_size=12).map(tuple)
)
def test_the_common_beginning_is_as_long_as_it_is(first, second):
    alike = 0
    while alike < min(len(first), len(second)) and first[alike] == second[alike]:
        alike += 1
    assert common(first, second) == alike
    for cut in range(len(first) + 1):
        assert continued((first[:cut], first[cut:]), second) == alike
