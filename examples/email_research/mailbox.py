"""The mailboxes in SQLite, with full-text search.

    python examples/email_research/mailbox.py --seed 0 --out mail.db

Invariant: a file is complete or not there, and reading never changes it. Search never fails on what is
searched for: words are words, whatever FTS5's own syntax would make of them.
"""

import argparse
import json
import os
import re
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from art_core import Scenario
from examples.email_research.world import Inbox, inboxes

FORMAT = 1
"""Changes when the same seed makes other mails."""

SCHEMA = """
CREATE TABLE inbox (id TEXT PRIMARY KEY, firm TEXT NOT NULL, owner TEXT NOT NULL);
CREATE TABLE mail (
    rowid INTEGER PRIMARY KEY, inbox TEXT NOT NULL, id TEXT NOT NULL, sent TEXT NOT NULL,
    sender TEXT NOT NULL, address TEXT NOT NULL, recipients TEXT NOT NULL, subject TEXT NOT NULL,
    body TEXT NOT NULL, UNIQUE (inbox, id)
);
CREATE TABLE question (id TEXT PRIMARY KEY, inbox TEXT NOT NULL, told TEXT NOT NULL);
CREATE VIRTUAL TABLE text USING fts5(
    subject, body, content='mail', content_rowid='rowid', tokenize='porter unicode61 remove_diacritics 2'
);
"""


class MailboxError(Exception):
    """What was asked of the mailbox cannot be done; the message says what to do instead."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One mail that a search found."""

    id: str
    sent: str
    sender: str
    subject: str
    snippet: str


class Mailbox:
    """Mailboxes in a file; may be used from any thread.

    Args:
        path: a file that `build` wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = threading.local()

    @property
    def _connection(self) -> sqlite3.Connection:
        # One for each thread: a SQLite connection answers one query at a time.
        if not hasattr(self._own, "connection"):
            self._own.connection = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True
            )
        return self._own.connection

    def search(
        self,
        inbox: str,
        query: str,
        *,
        sender: str = "",
        before: str = "",
        after: str = "",
        most: int = 6,
    ) -> list[Hit]:
        """The mails that fit best: those with every word, then others, each best first (Okapi BM25).

        Args:
            inbox: where to search.
            query: words, in any order.
            sender: part of the sender's name or address; empty for anybody.
            before: only mails sent before this day (``YYYY-MM-DD``); empty for any.
            after: only mails sent after this day; empty for any.
            most: how many.

        Raises:
            MailboxError: there is no word in the query, or a date is none.
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise MailboxError(f"query {query!r} has no word to search for")
        clauses, values = ["mail.inbox = ?"], [inbox]
        if sender:
            clauses.append("instr(lower(mail.sender || ' ' || mail.address), lower(?))")
            values.append(sender.strip())
        for name, given, sign in (("before", before, "<"), ("after", after, ">")):
            if given:
                # A day compares with moments as text: what is sent after a day begins with a later one.
                clauses.append(f"substr(mail.sent, 1, 10) {sign} ?")
                values.append(_day(name, given))
        found: dict[str, Hit] = {}
        for how in (" AND ", " OR "):
            rows = self._connection.execute(
                "SELECT mail.id, mail.sent, mail.sender, mail.subject, snippet(text, 1, '', '', '...', 24) "
                "FROM text JOIN mail ON mail.rowid = text.rowid "
                f"WHERE text MATCH ? AND {' AND '.join(clauses)} "
                "ORDER BY bm25(text), mail.rowid LIMIT ?",
                (how.join(f'"{word}"' for word in words), *values, most),
            )
            for name, sent, who, subject, snippet in rows:
                found.setdefault(name, Hit(name, sent, who, subject, " ".join(snippet.split())))
        return list(found.values())[:most]

    def read(self, inbox: str, mail: str) -> dict[str, str]:
        """One mail: ``id``, ``sent``, ``sender``, ``recipients``, ``subject``, ``body``.

        Raises:
            MailboxError: there is no such mail.
        """
        names = ("id", "sent", "sender", "recipients", "subject", "body")
        row = self._connection.execute(
            f"SELECT {', '.join(names)} FROM mail WHERE inbox = ? AND id = ?", (inbox, mail)
        ).fetchone()
        if row is None:
            raise MailboxError(f"there is no mail {mail!r}; give an id that search has shown, such as m12")
        return dict(zip(names, row, strict=True))

    def count(self, inbox: str) -> int:
        """How many mails an inbox has."""
        return self._connection.execute("SELECT count(*) FROM mail WHERE inbox = ?", (inbox,)).fetchone()[0]

    def scenarios(self, *names: str) -> list[Scenario]:
        """The questions about some inboxes (none named: all) as scenarios, in the order of their ids.

        ``inputs`` are what the agent is given: ``inbox``, ``owner``, ``question``. ``metadata`` is all of the
        `Question`, the answer included.
        """
        rows = self._connection.execute(
            "SELECT question.told, inbox.owner FROM question JOIN inbox ON inbox.id = question.inbox "
            "ORDER BY question.rowid"
        ).fetchall()
        made: list[Scenario] = []
        for told, owner in rows:
            question: Mapping[str, Any] = json.loads(told)
            if not names or question["inbox"] in names:
                inputs = {"inbox": question["inbox"], "owner": owner, "question": question["text"]}
                made.append(Scenario(question["id"], inputs, question))
        return made


def build(path: Path, made: tuple[Inbox, ...]) -> Path:
    """Write inboxes into a new file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        with sqlite3.connect(scratch) as db:
            db.executescript(SCHEMA)
            for inbox in made:
                db.execute("INSERT INTO inbox VALUES (?, ?, ?)", (inbox.id, inbox.firm, inbox.owner.name))
                db.executemany(
                    "INSERT INTO mail (inbox, id, sent, sender, address, recipients, subject, body) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            inbox.id,
                            mail.id,
                            mail.sent.isoformat(" ", "minutes"),
                            mail.sender.name,
                            mail.sender.address,
                            ", ".join(person.name for person in mail.recipients),
                            mail.subject,
                            mail.body,
                        )
                        for mail in inbox.mails
                    ],
                )
                db.executemany(
                    "INSERT INTO question VALUES (?, ?, ?)",
                    [(q.id, q.inbox, json.dumps(asdict(q))) for q in inbox.questions],
                )
            db.execute("INSERT INTO text (text) VALUES ('rebuild')")
        db.close()
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def prepared(seed: int = 0, directory: Path | None = None) -> Mailbox:
    """The mailboxes of a seed; made on the first call, found again later."""
    cache = directory or Path(
        os.environ.get("ART_MAIL_CACHE", Path(__file__).resolve().parents[2] / ".cache" / "mail")
    )
    path = cache / f"mail-{FORMAT}-{seed}.db"
    if not path.exists():
        build(path, inboxes(seed))
    return Mailbox(path)


def _day(name: str, given: str) -> str:
    try:
        return date.fromisoformat(given.strip()).isoformat()
    except ValueError:
        raise MailboxError(f"{name}={given!r} is no date; write YYYY-MM-DD, such as 2025-03-31") from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    written = Mailbox(build(options.out, inboxes(options.seed)))
    for inbox in inboxes(options.seed):
        mails, owner = written.count(inbox.id), inbox.owner.name
        print(f"{inbox.id}: {mails} mails of {owner}, {len(inbox.questions)} questions")
