"""The mailbox example: what is generated, how answers are checked, what its rewards are worth."""

import re
import sqlite3
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from helpers.tiny import tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from art_core.inference.chat_templates import CHATML_JSON_TOOLS
from art_langgraph import agather
from examples.email_research import topics
from examples.email_research.agent import MOST_TURNS, build_graph
from examples.email_research.checking import dates, is_right, numbers
from examples.email_research.mailbox import Mailbox, MailboxError, build
from examples.email_research.options import chat_template, parse_options
from examples.email_research.policies import clueless, expert
from examples.email_research.rewards import rules
from examples.email_research.world import MAILS, Inbox, Mail, inboxes, own_words
from examples.options import knobs, model_named


@pytest.fixture(scope="module")
def made() -> tuple[Inbox, ...]:
    return inboxes(0)


@pytest.fixture(scope="module")
def mailbox(made: tuple[Inbox, ...], tmp_path_factory: pytest.TempPathFactory) -> Mailbox:
    return Mailbox(build(tmp_path_factory.mktemp("mail") / "mail.db", made))


def sentences(mail: Mail) -> list[str]:
    """A mail's sentences, without what it quotes."""
    return re.split(r"(?<=[.?!])\s+", own_words(mail.body))


# -- what is generated ---------------------------------------------------------------------------------


def test_three_inboxes_of_1500_mails_hold_400_questions_of_every_kind(made: tuple[Inbox, ...]) -> None:
    questions = [question for inbox in made for question in inbox.questions]
    assert [len(inbox.mails) for inbox in made] == [MAILS] * 3 == [1500] * 3
    assert len(questions) == 400
    assert len({question.id for question in questions}) == 400
    assert len({question.text for question in questions}) == 400, "a question is about one thing"
    kinds = Counter(question.kind for question in questions)
    assert set(kinds) == {"when", "who", "how_much", "decision", "where", "how_many", "multi_hop"}
    assert min(kinds.values()) >= 36


def test_a_seed_makes_the_same_mailbox_again_and_another_seed_another(made: tuple[Inbox, ...]) -> None:
    assert inboxes(0) == made
    other = inboxes(1)
    assert [inbox.id for inbox in other] == [inbox.id for inbox in made]
    assert not {m.body for m in other[0].mails[:50]} & {m.body for m in made[0].mails}


def test_mails_are_numbered_by_date_and_sent_on_working_days(made: tuple[Inbox, ...]) -> None:
    for inbox in made:
        assert [mail.id for mail in inbox.mails] == [f"m{n}" for n in range(1, MAILS + 1)]
        moments = [mail.sent for mail in inbox.mails]
        assert moments == sorted(moments)
        assert all(moment.weekday() < 5 for moment in moments)
        assert {person.address.split("@")[1] for mail in inbox.mails for person in mail.recipients} == {
            inbox.owner.address.split("@")[1]
        }


def test_people_of_an_inbox_have_last_names_of_their_own(made: tuple[Inbox, ...]) -> None:
    for inbox in made:
        people = {person.name for mail in inbox.mails for person in (mail.sender, *mail.recipients)}
        assert len({name.split()[-1] for name in people}) == len(people)


def test_the_source_of_a_question_says_the_answer_in_its_own_words(made: tuple[Inbox, ...]) -> None:
    for inbox in made:
        by_id = {mail.id: mail for mail in inbox.mails}
        for question in inbox.questions:
            told = sentences(by_id[question.sources[-1]])
            # What a change replaces is told in the same sentence; the answer itself must be there.
            assert any(is_named(sentence, question.answer, question.answer_kind) for sentence in told), (
                question
            )


def test_nothing_that_comes_after_its_source_settles_a_question_otherwise(made: tuple[Inbox, ...]) -> None:
    for inbox in made:
        for question in inbox.questions:
            if question.kind == "multi_hop":
                continue
            about = next(
                p for p in re.findall(r"[A-Z]\w+ [A-Z]\w+", question.text) if p in question.searches[0]
            )
            item = question.searches[0].removeprefix(about)
            later = [mail for mail in inbox.mails if int(mail.id[1:]) > int(question.sources[0][1:])]
            for sentence in (s for mail in later for s in sentences(mail) if about in s):
                same_thing = all(word in sentence for word in item.split())
                assert not (
                    same_thing and any(is_named(sentence, r, question.answer_kind) for r in question.rivals)
                )


def is_named(text: str, value: str, kind: topics.AnswerKind) -> bool:
    """Whether a text has a value, whatever else it has."""
    if kind == "date":
        day = date.fromisoformat(value)
        return (day.year, day.month, day.day) in dates(text)
    return float(value) in numbers(text) if kind == "number" else value in text or value.capitalize() in text


def test_facts_change_and_rumours_are_told_for_most_questions(made: tuple[Inbox, ...]) -> None:
    questions = [question for inbox in made for question in inbox.questions]
    assert sum(bool(question.rivals) for question in questions) > 0.75 * len(questions)


# -- the mailbox ---------------------------------------------------------------------------------------


def test_a_search_for_its_words_shows_nearly_every_source_and_the_first_hit_is_not_enough(
    mailbox: Mailbox,
) -> None:
    places: list[int | None] = []
    for scenario in mailbox.scenarios():
        asked = scenario.metadata
        for source, words in zip(asked["sources"], asked["searches"], strict=True):
            hits = [hit.id for hit in mailbox.search(asked["inbox"], words)]
            places.append(hits.index(source) if source in hits else None)
    assert sum(place is not None for place in places) / len(places) > 0.98
    assert sum(place == 0 for place in places) / len(places) < 0.6


@pytest.mark.parametrize(
    "query", ['"', "AND OR NOT", "NEAR(a b)", "budget*", "subject:x", "(", 'it\'s a "test"']
)
def test_words_of_a_query_are_words_and_never_syntax(mailbox: Mailbox, query: str) -> None:
    if re.search(r"\w", query):
        mailbox.search("harbour", query)
    else:
        with pytest.raises(MailboxError, match="no word"):
            mailbox.search("harbour", query)


def test_a_search_is_narrowed_by_sender_and_days(mailbox: Mailbox) -> None:
    whole = mailbox.search("museum", "the budget", most=50)
    sender = whole[0].sender
    assert {hit.sender for hit in mailbox.search("museum", "the budget", sender=sender.upper())} == {sender}
    days = sorted(hit.sent[:10] for hit in whole)
    middle = days[len(days) // 2]
    before = mailbox.search("museum", "the budget", before=middle, most=50)
    after = mailbox.search("museum", "the budget", after=middle, most=50)
    assert before
    assert after
    assert all(hit.sent[:10] < middle for hit in before)
    assert all(hit.sent[:10] > middle for hit in after)
    with pytest.raises(MailboxError, match=r"before='Tuesday' is no date; write YYYY-MM-DD"):
        mailbox.search("museum", "budget", before="Tuesday")


def test_an_inbox_shows_nothing_of_another(mailbox: Mailbox) -> None:
    mail = mailbox.read("clinic", "m7")
    assert mail["subject"]
    assert {mailbox.read(name, "m7")["body"] for name in ("harbour", "museum")} != {mail["body"]}
    with pytest.raises(MailboxError, match="no mail 'm1501'"):
        mailbox.read("clinic", "m1501")


def test_a_mailbox_that_could_not_be_written_is_not_there(made: tuple[Inbox, ...], tmp_path: Path) -> None:
    broken = (made[0], made[0])
    with pytest.raises(sqlite3.IntegrityError):
        build(tmp_path / "mail.db", broken)
    assert list(tmp_path.iterdir()) == []


# -- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected", "kind", "right"),
    [
        ("14 May 2025", "2025-05-14", "date", True),
        ("May 14th, 2025.", "2025-05-14", "date", True),
        ("on Wednesday, 14 May", "2025-05-14", "date", True),
        ("2025-05-14", "2025-05-14", "date", True),
        ("14 May 2024", "2025-05-14", "date", False),
        ("14 May or 15 May", "2025-05-14", "date", False),
        ("soon", "2025-05-14", "date", False),
        ("EUR 48,300", "48300", "number", True),
        ("48 300 euros.", "48300", "number", True),
        ("48300.00", "48300", "number", True),
        ("48.3k", "48300", "number", True),
        ("24 deck winches", "24", "number", True),
        ("24 or 25", "24", "number", False),
        ("148300", "48300", "number", False),
        ("none", "24", "number", False),
        ("mei UEDA", "Mei Ueda", "person", True),
        ("It is Ueda now.", "Mei Ueda", "person", True),
        ("Mei", "Mei Ueda", "person", False),
        ("Ueda, formerly Novotny", "Mei Ueda", "person", False),
        ("Pellworm", "Pellworm Partners", "firm", True),
        ("In the paint hall office", "the paint hall office", "place", True),
        ("paint", "the paint hall office", "place", False),
        ("", "Mei Ueda", "person", False),
        (None, "24", "number", False),
        ("Ueda " * 40, "Mei Ueda", "person", False),
    ],
)
def test_answers_are_right_in_any_form_and_wrong_when_they_hedge(
    answer: str | None, expected: str, kind: topics.AnswerKind, right: bool
) -> None:
    assert is_right(answer, expected, kind, ["Petra Novotny"]) is right


# -- options -------------------------------------------------------------------------------------------


def test_knobs_are_json_or_else_text_and_models_that_are_not_prepared_go_by_their_own_name() -> None:
    assert knobs(["epochs=2", "loss=dapo", "kl_coef=0.01", "gamma=null"]) == {
        "epochs": 2,
        "loss": "dapo",
        "kl_coef": 0.01,
        "gamma": None,
    }
    assert model_named("somebody/a-model") == "somebody/a-model"


def test_calls_are_json_unless_the_models_own_format_is_asked_for_or_it_speaks_no_chatml(
    tmp_path: Path,
) -> None:
    assert [parse_options(given).tool_format for given in ([], ["--tool-format", "model"])] == [
        "json",
        "model",
    ]
    assert chat_template("model", "no/such-model") is None
    tiny_tokenizer().save_pretrained(tmp_path / "chatml")
    assert chat_template("json", str(tmp_path / "chatml")) == CHATML_JSON_TOOLS
    words = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    with pytest.raises(SystemExit, match=r"words has no <\|im_end\|> .* take --tool-format model"):
        chat_template("json", str(tmp_path / "words"))


# -- rewards -------------------------------------------------------------------------------------------


async def test_the_expert_earns_everything_and_a_clueless_player_nothing(mailbox: Mailbox) -> None:
    asked = mailbox.scenarios()[::16]
    rewards: dict[str, list[float]] = {}
    for name, player in (("expert", expert(asked)), ("clueless", clueless())):
        groups = await agather(
            build_graph(player, mailbox),
            asked,
            group_size=1,
            reward=rules,
            require_policy_calls=False,
            progress=False,
        )
        assert not groups.failed
        rewards[name] = [reward for group in groups for reward in group.rewards]
    assert sum(rewards["expert"]) / len(asked) > 0.99
    assert sum(rewards["clueless"]) / len(asked) < 0.05


async def test_every_question_can_be_answered_with_the_tools_within_the_turns(mailbox: Mailbox) -> None:
    asked = [s for s in mailbox.scenarios("clinic") if s.metadata["kind"] in ("multi_hop", "when")]
    groups = await agather(
        build_graph(expert(asked), mailbox),
        asked,
        group_size=1,
        reward=rules,
        require_policy_calls=False,
        progress=False,
    )
    runs = [run for group in groups for run in group]
    assert sum(run.components["correct"] for run in runs) / len(runs) > 0.97
    assert max(len(run.steps) for run in runs) <= MOST_TURNS
