"""A generated inbox: people, projects, facts that change, the mails that tell of them, and questions.

Invariant: everything follows from the seed. The answer of a question is the last value that its fact's mails
settle on, and ``sources`` are the mails that say so; earlier values, quotations and rumours are in the inbox
as well.

A firm's words -> people, vendors, projects -> facts -> a thread of mails for each fact, by a plot -> mails
about nothing until there are enough -> all in the order of their dates, with ids -> questions.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta

from examples.email_research import topics
from examples.email_research.questions import Question, ask
from examples.email_research.topics import Fact, Topic, filled
from examples.email_research.vocabulary import (
    ACKNOWLEDGEMENTS,
    AFTER,
    ASIDE,
    BEFORE,
    DAYS,
    DID,
    FIRMS,
    FIRST_NAMES,
    GREETINGS,
    LAST_NAMES,
    SIGN_OFFS,
    SMALL_TALK,
    STATUS,
    THING,
    TOWNS,
    VENDOR_ENDINGS,
    VENDOR_NAMES,
    WHERE,
    WHO,
    Firm,
)

MAILS = 1500
"""Mails of an inbox."""
STAFF = 48
VENDORS = 24
PROJECTS = 30
FIRST_DAY, LAST_DAY = date(2025, 1, 6), date(2025, 12, 19)

PLOTS = (
    ("announce", "ack"),
    ("announce", "ack", "change", "ack"),
    ("announce", "ack", "change"),
    ("announce", "change", "ack", "change"),
    ("announce", "change", "revert", "ack"),
    ("announce", "ack", "doubt", "settle"),
    ("announce", "change", "doubt", "settle"),
)
"""How a fact is told, one mail for each word."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with an address."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail; ``id`` is empty until all of the inbox are known, and then ``m1``, ``m2``, ... by date."""

    sent: datetime
    sender: Person
    recipients: tuple[Person, ...]
    subject: str
    body: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Inbox:
    """A whole inbox."""

    id: str
    firm: str
    owner: Person
    mails: tuple[Mail, ...]
    questions: tuple[Question, ...]


def inboxes(seed: int) -> tuple[Inbox, ...]:
    """All three inboxes: 4,500 mails and 400 questions."""
    return tuple(
        _Writer(firm, number, random.Random(f"{seed}/{firm.inbox}")).inbox()
        for number, firm in enumerate(FIRMS)
    )


@dataclass(slots=True)
class _Writer:
    """Writes one inbox."""

    firm: Firm
    number: int
    rng: random.Random
    owner: Person = field(init=False)
    staff: list[Person] = field(init=False)
    vendors: list[str] = field(init=False)
    projects: list[str] = field(init=False)
    mails: list[Mail] = field(init=False, default_factory=list[Mail])

    def __post_init__(self) -> None:
        first = self.rng.sample(FIRST_NAMES, STAFF + 1)
        last = self.rng.sample(LAST_NAMES, STAFF + 1)
        people = [
            Person(f"{f} {n}", f"{f}.{n}@{self.firm.domain}".lower())
            for f, n in zip(first, last, strict=True)
        ]
        self.owner, *self.staff = people
        names = self.rng.sample(VENDOR_NAMES, VENDORS)
        self.vendors = [f"{name} {self.rng.choice(VENDOR_ENDINGS)}" for name in names]
        pairs = [f"{a} {n}" for a in self.firm.adjectives for n in self.firm.nouns]
        self.projects = self.rng.sample(pairs, PROJECTS)

    def inbox(self) -> Inbox:
        """Everything."""
        facts = [self.thread(*told) for told in self._facts()]
        while len(self.mails) < MAILS:
            self.nothing()
        if len(self.mails) > MAILS:
            raise ValueError(f"the facts alone need {len(self.mails)} mails, an inbox has {MAILS}")
        order = sorted(range(MAILS), key=lambda i: self.mails[i].sent)
        ids = {written: f"m{place}" for place, written in enumerate(order, 1)}
        return Inbox(
            self.firm.inbox,
            self.firm.name,
            self.owner,
            tuple(replace(self.mails[written], id=ids[written]) for written in order),
            # 134, 133 and 133 questions: 400.
            tuple(ask(facts, ids, self.firm.inbox, multi_hop=18 - (self.number > 0), rng=self.rng)),
        )

    # -- facts and their threads -------------------------------------------------------------------

    def _facts(self) -> Iterator[tuple[Topic, str, str]]:
        """What there is to tell, as (topic, about, item)."""
        for project in self.projects:
            first, second, third = self.rng.sample(self.firm.items, 3)
            yield topics.LEAD, project, ""
            yield topics.BUDGET, project, ""
            yield topics.VENUE, project, ""
            yield topics.VENDOR, project, first
            yield topics.DEADLINE, project, first
            yield topics.DEADLINE, project, second
            yield topics.QUANTITY, project, self.rng.choice((second, third))
        for person in self.staff:
            yield topics.EXTENSION, person.name, ""
        for vendor in self.vendors:
            yield topics.TOWN, vendor, ""

    def thread(self, topic: Topic, about: str, item: str) -> Fact:
        """Write the mails of a fact."""
        plain = topic in (topics.EXTENSION, topics.TOWN)
        plot = self.rng.choices(PLOTS, weights=(6, 1, 2, 0, 0, 0, 0) if plain else None)[0]
        sent = self._moment(LAST_DAY - timedelta(days=60))
        values = self._values(topic, sent.date(), 1 + len(plot))
        said = iter(values[1:])
        now, before, source = values[0], "", -1
        named = {now}
        team = self.rng.sample(self.staff, 3)
        subject = filled(self.rng.choice(topic.subjects), about, item)
        rumour = values[-1]
        for event in plot:
            sender = (
                team[0] if event in ("announce", "settle", "change", "revert") else self.rng.choice(team[1:])
            )
            if event == "change":
                before, now = now, next(said)
            elif event == "revert":
                before, now = now, before
            old = rumour if event in ("doubt", "settle") else before
            named |= {now, old} - {""}
            last = None if event == "announce" else self.mails[-1]
            if event in ("change", "revert") and self.rng.random() < 0.3:
                subject, last = filled(self.rng.choice(topic.subjects), about, item), None
            wordings = {
                "announce": topic.announce,
                "ack": ACKNOWLEDGEMENTS,
                "change": topic.change,
                "revert": topic.change,
                "doubt": topic.doubt,
                "settle": topic.settle,
            }[event]
            key = filled(
                self.rng.choice(wordings), about, item, self._told(topic, now), self._told(topic, old)
            )
            self.write(sent, sender, team, subject if last is None else f"Re: {subject}", key, answered=last)
            if event not in ("ack", "doubt"):
                source = len(self.mails) - 1
            sent = self._later(sent)
        rivals = tuple(value for value in values if value in named - {now})
        return Fact(topic, about, item, now, rivals, source)

    def _values(self, topic: Topic, since: date, count: int) -> list[str]:
        """Different values that a fact may have."""
        match topic.name:
            case "deadline":
                days = (since + timedelta(days=d) for d in self.rng.sample(range(40, 200), 3 * count))
                return [day.isoformat() for day in days if day.weekday() < 5][:count]
            case "budget":
                return [str(value * 100) for value in self.rng.sample(range(42, 2900), count)]
            case "quantity":
                return [str(value) for value in self.rng.sample(range(6, 400), count)]
            case "extension":
                return [str(value) for value in self.rng.sample(range(2100, 9900), count)]
            case "lead":
                return [person.name for person in self.rng.sample(self.staff, count)]
            case "vendor":
                return self.rng.sample(self.vendors, count)
            case "venue":
                return self.rng.sample(self.firm.rooms, count)
            case _:
                return self.rng.sample(TOWNS, count)

    def _told(self, topic: Topic, value: str) -> str:
        """A value as somebody writes it."""
        if not value:
            return ""
        if topic.name == "deadline":
            day = date.fromisoformat(value)
            forms = (
                f"{day.day} {day:%B %Y}",
                f"{day:%B} {day.day}, {day.year}",
                f"{day:%A}, {day.day} {day:%B %Y}",
                value,
            )
            return self.rng.choice(forms)
        if topic.name == "budget":
            amount = f"{int(value):,}"
            return self.rng.choice((f"EUR {amount}", f"{amount} euros", f"€{amount}"))
        return value

    # -- mails -------------------------------------------------------------------------------------

    def write(
        self,
        sent: datetime,
        sender: Person,
        others: Sequence[Person],
        subject: str,
        key: str,
        answered: Mail | None = None,
    ) -> None:
        """Add a mail that says one thing, among the usual words; it quotes the mail that it answers."""
        rng = self.rng
        recipients = (self.owner, *(person for person in others if person is not sender))
        to = answered.sender if answered is not None and answered.sender is not sender else self.owner
        said = [
            *([rng.choice(BEFORE)] if rng.random() < 0.6 else []),
            key,
            *([rng.choice(AFTER)] if rng.random() < 0.6 else []),
        ]
        beside = [
            self._anecdote() if rng.random() < 0.5 else rng.choice(self.firm.chatter)
            for _ in range(rng.choice((0, 1, 1, 2)))
        ]
        greeting = rng.choice(GREETINGS).format(name=to.name.split()[0])
        paragraphs = (greeting, " ".join(said), *([" ".join(beside)] if beside else []))
        body = "\n\n".join((*paragraphs, f"{rng.choice(SIGN_OFFS)}\n{sender.name}"))
        if answered is not None and rng.random() < 0.7:
            quoted = own_words(answered.body).replace("\n", "\n> ")
            day = f"{answered.sent.day} {answered.sent:%B %Y}"
            body += f"\n\nOn {day}, {answered.sender.name} wrote:\n> {quoted}"
        self.mails.append(Mail(sent, sender, recipients, subject, body))

    def nothing(self) -> None:
        """Add a mail that settles nothing."""
        rng = self.rng
        subject, text = rng.choice((*SMALL_TALK, *STATUS, *STATUS))
        sender, person, *others = rng.sample(self.staff, 4)
        words = {
            "day": rng.choice(DAYS),
            "room": rng.choice(self.firm.rooms),
            "person": person.name,
            "project": rng.choice(self.projects),
            "vendor": rng.choice(self.vendors),
            "item": rng.choice(self.firm.items),
            "chatter": rng.choice(self.firm.chatter),
        }
        self.write(self._moment(LAST_DAY), sender, others, subject.format(**words), text.format(**words))

    def _anecdote(self) -> str:
        """A sentence that has nothing to do with anything."""
        who, did, thing, where, aside = (self.rng.choice(part) for part in (WHO, DID, THING, WHERE, ASIDE))
        article = "an" if thing[0] in "aeiou" else "a"
        return f"{who[0].upper()}{who[1:]} {did} {article} {thing} {where}, {aside}."

    def _moment(self, latest: date) -> datetime:
        day = FIRST_DAY + timedelta(days=self.rng.randrange((latest - FIRST_DAY).days))
        return self._at(day)

    def _later(self, sent: datetime) -> datetime:
        return self._at(sent.date() + timedelta(days=self.rng.randint(1, 12)))

    def _at(self, day: date) -> datetime:
        """Some minute of a working day, never of the weekend."""
        day += timedelta(days=max(0, 7 - day.weekday()) if day.weekday() >= 5 else 0)
        minute = self.rng.randrange(8 * 60, 18 * 60)
        return datetime(day.year, day.month, day.day, minute // 60, minute % 60)


def own_words(body: str) -> str:
    """What a mail says itself, without what it quotes."""
    return re.split(r"\n\nOn \d+ \w+ \d{4}, .* wrote:\n", body)[0]
