"""What is known of one call while it passes through the gateway, and the JSON of both its sides.

Invariant: a request is read as its client wrote it, numbers included; an answer is read whatever its server
wrote.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from art_core.fast_json import read_json
from art_core.inference.gateway_log import Completion
from art_core.inference.gateway_metrics import token_counts
from art_core.inference.gateway_upstream import RefusalError
from art_core.types import PolicyVersion


@dataclass(slots=True)
class GatewayCall:
    """What is known of a call while it runs.

    Attributes:
        key: of its completion.
        path: ``/chat/completions`` or ``/completions``.
        raw: the request as it came.
        body: the request, read.
        policy: the version that answers; None for models that are not policies.
        replica: which replica answers; None until one does.
        status: HTTP status; 0 until there is one.
        usage: its token counts.
        started_at: Unix time, seconds.
        clock: `time.perf_counter` at the start.
        first_byte: seconds until the first byte of the answer; None until it came.
        time_to_first_token: seconds until a stream's first token; None until it came.
        raw_logprobs: whether the policy's server gives log-probabilities before temperature.
    """

    key: str
    path: str
    raw: bytes
    body: dict[str, Any]
    policy: PolicyVersion | None = None
    replica: str | None = None
    status: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    first_byte: float | None = None
    time_to_first_token: float | None = None
    raw_logprobs: bool = False

    def mark_first_byte(self) -> None:
        """Bytes of the answer have come."""
        if self.first_byte is None:
            self.first_byte = time.perf_counter() - self.clock

    def mark_first_token(self) -> None:
        """A stream has brought a token, the first one."""
        self.time_to_first_token = time.perf_counter() - self.clock

    def completed(self, response: bytes, error: str | None) -> Completion:
        """What has come of it, now that it ends."""
        return Completion(
            key=self.key,
            path=self.path,
            request=self.raw,
            response=response,
            model=str(self.body.get("model", "")),
            policy=self.policy,
            status=self.status,
            started_at=self.started_at,
            first_byte=self.first_byte,
            time_to_first_token=self.time_to_first_token,
            raw_logprobs=self.raw_logprobs,
            duration=time.perf_counter() - self.clock,
            error=error,
        )


def last_usage(events: list[bytes]) -> Mapping[str, int]:
    """The token counts of a stream, from one of its last events; empty where it has none."""
    for data in reversed(events):
        if b'"usage"' in data:
            try:
                counts = token_counts(read_object(data))
            except ValueError:  # the beginning of this one was cut off
                return {}
            if counts.get("completion_tokens"):
                return counts
    return {}


# Made once: `json.dumps` makes an encoder at every call that is not at its defaults.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """JSON without spaces."""
    return _ENCODER.encode(value).encode()


def read_object(raw: bytes, read: Callable[[bytes], Any] = read_json) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    body = read(raw)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    return cast(dict[str, Any], body)


def read_request(raw: bytes) -> dict[str, Any]:
    """A request's body.

    Raises:
        RefusalError: 400, it is no JSON object.
    """
    try:
        return read_object(raw, json.loads)  # a tool's schema may have any number
    except ValueError as garbage:
        raise RefusalError(400, f"the request's body must be a JSON object: {garbage}") from garbage
