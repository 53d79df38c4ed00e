"""Reading a judge's answer."""

import json

import pytest
from helpers.judges import told
from hypothesis import given
from hypothesis import strategies as st

from art_core.rewards.judge import JudgeError
from art_core.rewards.verdicts import read_verdicts, verdict_schema

IDS = ("1", "2", "3")
GOOD = [("1", 0.2), ("2", 0.9), ("3", 0.5)]


def scores_of(text: str) -> dict[str, float]:
    return {name: verdict.score for name, verdict in read_verdicts(text, IDS).items()}


@pytest.mark.parametrize(
    "text",
    [
        told(GOOD),
        told([GOOD[2], GOOD[0], GOOD[1]]),
        told([(int(name), score) for name, score in GOOD]),
        told([(float(name), score) for name, score in GOOD]),
        told([(name, str(score)) for name, score in GOOD]),
        f"```json\n{told(GOOD)}\n```",
        f"<think>maybe {told([('1', 1), ('2', 1), ('3', 1)])}</think>{told(GOOD)}",
        f"Well {{then}}: {told(GOOD)} [done]",
        json.dumps(json.loads(told(GOOD))["scores"]),
        told(GOOD) + told(GOOD),
    ],
    ids=["plain", "shuffled", "int", "float", "text", "fence", "thought", "words", "bare", "twice the same"],
)
def test_scores_land_by_id(text: str) -> None:
    """C30."""
    assert scores_of(text) == dict(GOOD)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "said nothing"),
        ("I cannot.", "no JSON object"),
        (told(GOOD)[:-4], "no JSON object"),
        ('{"scores": []}', "no JSON object"),
        (told(GOOD[:2]), "missing: id 3"),
        (told([*GOOD, ("1", 0.2)]), "id 1 is there twice"),
        (told([*GOOD, ("4", 0.2)]), "'4' was not asked for"),
        (told([("1", 7), *GOOD[1:]]), "the score of id 1 is 7, not from 0 to 1"),
        (told([("1", -0.1), *GOOD[1:]]), "not from 0 to 1"),
        (told([("1", float("nan")), *GOOD[1:]]), "no number"),
        (told([("1", True), *GOOD[1:]]), "no number"),
        (told([("1", None), *GOOD[1:]]), "no number"),
        (told([("1", 10**400), *GOOD[1:]]), "no number"),
        (told([(True, 0.2), *GOOD[1:]]), "not an object with an id"),
        (told(GOOD) + told([("1", 1), ("2", 0), ("3", 0)]), "2 different lists"),
        ("[" * 100_000, "no JSON object"),
    ],
)
def test_an_answer_with_a_fault_is_no_answer_and_the_fault_is_named(text: str, problem: str) -> None:
    """C30."""
    with pytest.raises(JudgeError, match=problem):
        read_verdicts(text, IDS)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(JudgeError) as caught:
        read_verdicts(told([("1", 7), ("9", 0.5), ("2", "good")]), IDS)
    for problem in ("id 1 is 7", "'9' was not", "id 2 is no number", "missing: id 3"):
        assert problem in str(caught.value)


@given(
    st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps)
)
def test_any_text_is_a_verdict_on_all_ids_or_an_error_of_ours(text: str) -> None:
    try:
        verdicts = read_verdicts(text, IDS)
    except JudgeError:
        return
    assert set(verdicts) == set(IDS)


def test_the_schema_names_the_ids_and_asks_for_the_reason_before_the_score() -> None:
    scores = verdict_schema(IDS)["properties"]["scores"]
    assert scores["minItems"] == scores["maxItems"] == len(IDS), "a list cannot end too soon"
    item = scores["items"]
    assert item["properties"]["id"]["enum"] == list(IDS)
    assert list(item["properties"]) == ["id", "explanation", "score"]
