"""Messages, tool lists and blocks of prompt tokens move into ``contents``, each kept once.

Revision: 0002, from 0001. What it needs of the encoding is written out here, because a migration must go on
doing what it did while the code around it changes.
"""

import json
import zlib
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BLOCK = 256 * 4  # bytes of 256 token ids
_PAGE = 500  # steps that are held in memory at a time

_contents = sa.table("contents", sa.column("digest", sa.LargeBinary), sa.column("body", sa.LargeBinary))
_steps = sa.table(
    "steps",
    sa.column("seq", sa.Integer),
    *(sa.column(name, sa.LargeBinary) for name in ("messages", "tools", "prompt_blocks", "prompt_tokens")),
)


def upgrade() -> None:
    """Make the table, and move what the steps hold."""
    op.create_table(
        "contents",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_contents"),
    )
    op.add_column("steps", sa.Column("prompt_blocks", sa.LargeBinary()))
    connection = op.get_bind()
    last = -1
    while True:
        page = sa.select(_steps).where(_steps.c.seq > last).order_by(_steps.c.seq).limit(_PAGE)
        rows = connection.execute(page).all()
        for row in rows:
            _move(connection, row)
        if len(rows) < _PAGE:
            return
        last = rows[-1].seq


def _move(connection: sa.Connection, row: Any) -> None:
    messages = [_json(message) for message in json.loads(_unpack(row.messages))]
    tools = json.loads(_unpack(row.tools))
    values: dict[str, Any] = {
        "messages": b"".join(_keep(connection, message) for message in messages),
        "tools": _keep(connection, _json(tools)) if tools else b"",
    }
    if row.prompt_tokens is not None:
        prompt = _unpack(row.prompt_tokens)
        shared = len(prompt) - len(prompt) % _BLOCK
        blocks = [prompt[i : i + _BLOCK] for i in range(0, shared, _BLOCK)]
        values["prompt_blocks"] = b"".join(_keep(connection, block) for block in blocks)
        values["prompt_tokens"] = _pack(prompt[shared:])
    connection.execute(sa.update(_steps).where(_steps.c.seq == row.seq).values(values))


def _keep(connection: sa.Connection, piece: bytes) -> bytes:
    digest = blake2b(piece, digest_size=16).digest()
    known = sa.select(_contents.c.digest).where(_contents.c.digest == digest)
    if connection.scalar(known) is None:
        connection.execute(sa.insert(_contents), {"digest": digest, "body": _pack(piece)})
    return digest


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _pack(data: bytes) -> bytes:
    small = zlib.compress(data, 1)
    return b"\x01" + small if len(small) < len(data) else b"\x00" + data


def _unpack(data: bytes) -> bytes:
    return zlib.decompress(data[1:]) if data[:1] == b"\x01" else data[1:]
