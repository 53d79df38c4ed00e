"""Values as bytes and JSON text, and back.

Invariant: `unpack` gives back what `pack` was given, to the bit, on any machine; text is always valid UTF-8.
"""

import json
import math
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from pydantic_core import to_jsonable_python

_RAW, _ZLIB = b"\x00", b"\x01"
_WORTH_COMPRESSING = 1024  # bytes; below, setting zlib up takes longer than writing what it would save
_WINDOW_BITS, _MEMORY_LEVEL = (
    12,
    5,
)  # of zlib for small data: its usual 256 KiB take longer to get than to fill


def pack(data: bytes) -> bytes:
    """Bytes, compressed where that makes them smaller; the first byte says whether."""
    if len(data) >= _WORTH_COMPRESSING:
        small = _compress(data)
        if len(small) < len(data):
            return _ZLIB + small
    return _RAW + data


def pack_noise(data: bytes) -> bytes:
    """Bytes that nothing makes smaller, as those of measured numbers; read back by `unpack`, too."""
    return _RAW + data


def _compress(data: bytes) -> bytes:
    if len(data) >= 1 << _WINDOW_BITS:
        return zlib.compress(data, 1)
    compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
    return compressor.compress(data) + compressor.flush()


def unpack(data: bytes) -> bytes:
    """The inverse of `pack`."""
    body = data[1:]
    return zlib.decompress(body) if data[:1] == _ZLIB else body


def _foreign(value: Any) -> Any:
    return to_jsonable_python(
        value, fallback=lambda v: {"type": f"{type(v).__module__}.{type(v).__qualname__}", "repr": repr(v)}
    )


# What orjson would write otherwise than `json` does is left to the encoders below.
_AS_JSON = (
    orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
)

# Made once: `json.dumps` would make an encoder at every call that is not at its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_foreign)
_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_foreign)


def to_json_bytes(value: Any) -> bytes:
    """Compact JSON as UTF-8. Infinities and NaN are written as Python writes them.

    Raises:
        TypeError, ValueError, RecursionError: it has a key that JSON lacks, or contains itself.
    """
    with suppress(TypeError):
        written = orjson.dumps(value, option=_AS_JSON)
        if b"null" not in written:  # it writes None so, but NaN and infinities as well
            return written
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a model may well sample: escape instead
        return _ASCII_ENCODER.encode(value).encode()


def to_json(value: Any) -> str:
    """Compact JSON, always encodable as UTF-8; raises what `to_json_bytes` raises."""
    return "{}" if value == {} else to_json_bytes(value).decode()


def clean_text(text: str | None) -> str | None:
    """Free text that no database refuses; half surrogates are written as escapes."""
    return text if text is None else text.encode("utf-8", "backslashreplace").decode()


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32.

    Raises:
        struct.error: an id does not fit.
    """
    return struct.pack(f"<{len(ids)}i", *ids)


def ids_from_bytes(data: bytes) -> tuple[int, ...]:
    """The inverse of `ids_to_bytes`."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def logprobs_to_bytes(logprobs: Sequence[float | None]) -> bytes:
    """Logprobs as little-endian float64; NaN stands for None (no step holds a NaN of its own)."""
    return struct.pack(f"<{len(logprobs)}d", *(math.nan if p is None else p for p in logprobs))


def logprobs_from_bytes(data: bytes) -> tuple[float | None, ...]:
    """The inverse of `logprobs_to_bytes`."""
    return tuple(None if math.isnan(p) else p for p in struct.unpack(f"<{len(data) // 8}d", data))
