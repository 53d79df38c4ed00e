"""Questions about an inbox, made of the facts that its mails tell.

Invariant: a question asks for one fact (or for one through another), and no fact is asked for twice in the
same way.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from examples.email_research import topics
from examples.email_research.topics import MULTI_HOP, AnswerKind, Fact, filled

COUNTS = {"when": 26, "who": 22, "how_much": 20, "decision": 22, "where": 14, "how_many": 12}
"""Questions about an inbox that need one mail, by kind: 116."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about an inbox.

    Attributes:
        id: unique over all inboxes.
        inbox: which one it is about.
        kind: ``when``, ``who``, ``how_much``, ``decision``, ``where``, ``how_many`` or ``multi_hop``.
        text: the question.
        answer: see `checking.is_right`, as for ``answer_kind`` and ``rivals``.
        sources: ids of the mails that settle it, in the order in which they are needed.
        searches: for each source, words that find it.
    """

    id: str
    inbox: str
    kind: str
    text: str
    answer: str
    answer_kind: AnswerKind
    rivals: tuple[str, ...]
    sources: tuple[str, ...]
    searches: tuple[str, ...]


def ask(
    facts: Sequence[Fact], ids: Mapping[int, str], inbox: str, *, multi_hop: int, rng: random.Random
) -> Iterator[Question]:
    """Questions of every kind, in a mixed order.

    Args:
        facts: what the inbox tells.
        ids: of its mails, by the order in which they were written.
        inbox: its id.
        multi_hop: questions that need two mails.
        rng: chooses.
    """
    by_about = {(fact.topic.name, fact.about): fact for fact in facts}
    made: list[Question] = []
    for kind, count in COUNTS.items():
        for fact in rng.sample([fact for fact in facts if fact.topic.kind == kind], count):
            text = rng.choice(fact.topic.questions)
            made.append(_question(inbox, kind, text, fact, [fact], ids))
    first = [fact for fact in facts if fact.topic in (topics.LEAD, topics.VENDOR)]
    for fact in rng.sample(first, multi_hop):
        then = by_about["extension" if fact.topic is topics.LEAD else "town", fact.answer]
        text = rng.choice(MULTI_HOP[then.topic.name])
        made.append(_question(inbox, "multi_hop", text, fact, [fact, then], ids))
    rng.shuffle(made)
    for place, question in enumerate(made, 1):
        yield replace(question, id=f"{inbox}-{place}")


def _question(
    inbox: str, kind: str, text: str, about: Fact, needed: Sequence[Fact], ids: Mapping[int, str]
) -> Question:
    """A question about one fact that needs several, the last of which is the answer."""
    last = needed[-1]
    return Question(
        id="",
        inbox=inbox,
        kind=kind,
        text=filled(text, about.about, about.item),
        answer=last.answer,
        answer_kind=last.topic.answer,
        rivals=last.rivals,
        sources=tuple(ids[fact.source] for fact in needed),
        searches=tuple(f"{fact.about} {fact.topic.keywords.format(item=fact.item)}" for fact in needed),
    )
