"""Read what W&B wrote offline: a log of records in LevelDB's format, each one a protobuf message of W&B's.

Its Python package has had no reader of its own since the writing moved into ``wandb-core``.
"""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32 * 1024
_HEADER = (
    7  # of the file (":W&B", a magic number, a version) as well as of each piece (checksum, length, type)
)


def records(path: Path) -> Iterator[Any]:
    """The records of one ``run-<id>.wandb`` file."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", data[:_HEADER]
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block that is too small for a piece
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one dictionary for each step, W&B's own entries (``_step``, ...) included."""
    rows: list[dict[str, Any]] = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows.append({"_step": record.history.step.num, **row})
    return rows


def written(directory: Path, rows: int) -> list[dict[str, Any]]:
    """What was logged under a directory, once so many rows are: W&B writes for a moment after `finish`."""
    until = time.monotonic() + 30
    while True:
        found = [row for path in sorted(directory.rglob("offline-run-*/*.wandb")) for row in history(path)]
        if len(found) >= rows or time.monotonic() > until:
            return found
        time.sleep(0.01)


def run_record(path: Path) -> Any:
    """What was said of the run itself."""
    return next(r.run for r in records(path) if r.WhichOneof("record_type") == "run")
