"""Answers of servers, parsed quickly: with their tokens they are ten times the size of what was said.

Invariant: what `read_json` gives is what `json.loads` gives, save that integers beyond 64 bits, which no
completion has, become floats.
"""

import json
from typing import Any

import orjson


def read_json(data: bytes) -> Any:
    """A JSON document. NaN, infinities and lone surrogates, which some servers send, are read as well.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
