"""Content-addressed pieces: what many steps share is kept once.

Invariant: a step's row is written in the transaction that writes the pieces it refers to, or finds them
there, and pieces are never changed or deleted.

A conversation of n turns sends its first message n times, and every rollout of a group sends the same
prompt. So messages, tool lists and blocks of prompt tokens are kept under the digest of their bytes, and
a step refers to them by a string of digests.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b

from sqlalchemy import Connection, select

from art_core.errors import StoreError
from art_core.store.database import insert_missing, location, unwritten
from art_core.store.packing import pack, unpack
from art_core.store.prepared import Prepared
from art_core.store.schema import contents

DIGEST_SIZE = 16
"""Bytes of a digest: 128 bits, at which two pieces never meet by chance."""

_LOOKED_UP = 500  # digests in one query; databases limit the variables of a statement

_INSERT = Prepared(partial(insert_missing, table=contents))


def digest(piece: bytes) -> bytes:
    """The key of a piece."""
    return blake2b(piece, digest_size=DIGEST_SIZE).digest()


def split(digests: bytes) -> list[bytes]:
    """The digests in a string of them."""
    return [digests[i : i + DIGEST_SIZE] for i in range(0, len(digests), DIGEST_SIZE)]


def insert_contents(connection: Connection, pieces: Mapping[bytes, bytes]) -> None:
    """Write those pieces that are not there yet."""
    # In a fixed order, so that two processes that write the same pieces never wait for each other.
    if new := sorted(unwritten(connection, contents, pieces)):
        _INSERT.execute(connection, [{"digest": key, "body": pack(pieces[key])} for key in new])


def read_contents(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, bytes]:
    """Pieces by digest.

    Raises:
        StoreError: one is missing, so the file is damaged.
    """
    wanted = set(digests)
    found: dict[bytes, bytes] = {}
    for some in _batches(wanted):
        for row in connection.execute(select(contents).where(contents.c.digest.in_(some))):
            found[row.digest] = unpack(row.body)
    if missing := wanted - found.keys():
        raise StoreError(
            f"{location(connection.engine)} is damaged: {len(missing)} pieces of its steps are missing, the "
            f"first is {min(missing).hex()}; restore a copy"
        )
    return found


def _batches(digests: Iterable[bytes]) -> Iterator[list[bytes]]:
    keys = list(digests)
    for start in range(0, len(keys), _LOOKED_UP):
        yield keys[start : start + _LOOKED_UP]
