"""Rewards of what an agent said."""

import pytest
from helpers.conversations import call, conversation

from art_core.errors import ConfigError, RewardError
from art_core.rewards import Citation, ExactMatch, Forbidden, Format, FuzzyMatch, Grounding, Refusal
from art_core.types import Scenario, Trajectory


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("Paris", "paris.", 1),
        ("Paris", "  PARIS ", 1),
        ("Paris", "Paris, France", 0),
        (["4", "four"], "Four", 1),
        (42, "42", 1),
        ("A-1", "(\N{FULLWIDTH LATIN CAPITAL LETTER A}-1)", 1),
        ("", "", 1),
    ],
)
def test_an_exact_match_ignores_case_width_space_and_punctuation_around_it(answer, said, right) -> None:
    assert ExactMatch().value(conversation(said, answer=answer)) == right


def test_an_exact_match_may_be_as_strict_as_one_likes() -> None:
    assert ExactMatch(normalize=str).value(conversation("paris", answer="Paris")) == 0
    assert ExactMatch(normalize=str).value(conversation("Paris", answer="Paris")) == 1


def test_the_answer_is_the_output_or_the_last_message_or_that_of_a_node() -> None:
    run = conversation("draft", "final", nodes=["writer", "editor"], answer="final")
    assert ExactMatch().value(run) == 1
    assert ExactMatch().value(run, {"messages": []}) == 1
    assert ExactMatch().value(run, "something else") == 0
    assert ExactMatch(node="writer").value(run, "final") == 0
    assert ExactMatch("draft_of", node="writer").value(conversation("x", nodes=["writer"], draft_of="x")) == 1


def test_the_expected_answer_may_be_computed_and_may_be_in_the_inputs() -> None:
    inputs = Trajectory(id="t", scenario=Scenario("a", {"question": "6 x 7", "answer": "42"}))
    assert ExactMatch().value(inputs, "42") == 1
    assert ExactMatch(lambda t: t.scenario.inputs["question"]).value(inputs, "6 X 7") == 1


def test_what_cannot_be_looked_up_is_an_error_that_names_it_and_never_a_zero() -> None:
    """C33."""
    with pytest.raises(RewardError, match=r"'question-1' has no 'answer'.*it has: 'gold'"):
        ExactMatch().value(conversation("x", gold="x"))
    with pytest.raises(RewardError, match="no answered call in node 'judge'"):
        ExactMatch(node="judge").value(conversation("x", answer="x"))
    with pytest.raises(RewardError, match="no answered call"):
        FuzzyMatch().value(conversation(answer="x"))
    with pytest.raises(RewardError, match=r"'exact_match'.*got None"):
        ExactMatch().value(conversation("x", answer=None))
    with pytest.raises(RewardError, match=r"got \[\]"):
        ExactMatch().value(conversation("x", answer=[]))


@pytest.mark.parametrize(
    ("answer", "said", "tokens"),
    [
        ("the cat sat", "The cat sat.", 1),
        ("the cat sat", "the dog sat", 2 / 3),
        ("cat", "a cat a cat", 2 / 5),
        ("cat", "dog", 0),
        ("cat", "", 0),
        (["cat", "a dog"], "dog", 2 / 3),
    ],
)
def test_a_fuzzy_match_is_the_f1_of_shared_words_with_the_likest_answer(answer, said, tokens) -> None:
    assert FuzzyMatch().value(conversation(said, answer=answer)) == pytest.approx(tokens)


def test_a_fuzzy_match_by_characters_forgives_typing_errors() -> None:
    likeness = FuzzyMatch(by="characters")
    assert likeness.value(conversation("Lovre", answer="Louvre")) == pytest.approx(10 / 11)
    assert likeness.value(conversation("xyz", answer="Louvre")) == 0
    with pytest.raises(ConfigError, match=r"by='words'.*'tokens', 'characters'"):
        FuzzyMatch(by="words")  # type: ignore[arg-type]


def test_a_format_must_cover_the_whole_answer_unless_anywhere_will_do() -> None:
    tagged = r"<think>.*</think>\s*<answer>.+</answer>"
    good = "<think>a\nb</think>\n<answer>4</answer>"
    assert Format(tagged).value(conversation(good)) == 1
    assert Format(tagged).value(conversation(f"well: {good}")) == 0
    assert Format(tagged, anywhere=True).value(conversation(f"well: {good}")) == 1
    with pytest.raises(ConfigError, match=r"'format'.*unterminated"):
        Format("(")


def test_forbidden_phrases_are_found_as_words_in_every_answer_of_the_run() -> None:
    forbidden = Forbidden(["my password", "$100"])
    assert forbidden.value(conversation("My PASSWORD is 1", "done")) == 1
    assert forbidden.value(conversation("it costs $100!")) == 1
    assert forbidden.value(conversation("it costs $1000, ask about my passwords")) == 0
    assert forbidden.value(conversation("fine"), "my password") == 1
    assert Forbidden(patterns=[r"\d{4}"], node="b").value(conversation("1234", "ok", nodes=["a", "b"])) == 0


@pytest.mark.parametrize("make", [Forbidden, lambda: Forbidden([""]), lambda: Forbidden("secret")])
def test_forbidding_nothing_is_a_mistake(make) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("I'm sorry, but I can't help with that.", 1),
        ("I cannot assist with this request.", 1),
        ("I can\N{RIGHT SINGLE QUOTATION MARK}t help with that", 1),
        ("As an AI language model, I have no opinion.", 1),
        ("The library is closed, I cannot find the book there.", 0),
        ("Sorry for the delay: it is 4.", 0),
    ],
)
def test_refusals_are_told_from_answers(said: str, refused: int) -> None:
    assert Refusal().value(conversation(said)) == refused


@pytest.mark.parametrize(
    ("said", "sources", "precision", "recall", "f1"),
    [
        ("It was May [m1].", ["m1"], 1, 1, 1),
        ("It was May [m1, m2] [m1].", ["m1"], 1 / 2, 1, 2 / 3),
        ("It was May [m1].", ["m1", "m3"], 1, 1 / 2, 2 / 3),
        ("It was May.", ["m1"], 0, 0, 0),
        ("Nobody knows.", [], 1, 1, 1),
        ("Nobody knows [m1].", [], 0, 0, 0),
        ("See [7].", [7], 1, 1, 1),
    ],
)
def test_citations_are_compared_with_the_sources(said, sources, precision, recall, f1) -> None:
    run = conversation(said, sources=sources)
    assert Citation(by="precision").value(run) == pytest.approx(precision)
    assert Citation(by="recall").value(run) == pytest.approx(recall)
    assert Citation().value(run) == pytest.approx(f1)


def test_sources_are_grounded_when_a_tool_has_shown_them() -> None:
    run = conversation([call("search")], "May [m1], [m2] and [m11].", results=[["m1: hello; m111: bye"]])
    assert Grounding().value(run) == pytest.approx(1 / 3)
    assert Grounding().value(run, "no source at all") == 0
    with pytest.raises(ConfigError, match="no group"):
        Grounding(r"\[\d+\]")
