"""The completions that went through a gateway, until somebody asks for them.

Invariant: a completion is kept whole (assembled, with the server's token ids and logprobs) or carries
the error that says why it is not; it is handed out once; what was dropped to stay within bounds is
counted and remembered by key, so that asking for it says so.

The proxy puts a completion in before it passes on the last byte, so whoever has read an answer finds it.
"""

import hashlib
import itertools
import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

from pydantic import ConfigDict, TypeAdapter, ValidationError

from art_core.capture import Call, failed_step, steps_from
from art_core.errors import CaptureError
from art_core.types import PolicyVersion, Step, StepIdentity

KEY_PREFIX = "art-"
"""What every key begins with, and no server's own ``system_fingerprint`` does."""

CLIENT_GONE = "the client went away before it had the answer"
"""The error of a completion whose client left."""

CLAIM_SECONDS = 1.0
"""How soon a client of another process that has read its answer comes for the completion."""

_REMEMBERED = 10_000
"""Keys whose fate is remembered after they left the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One call that went through the gateway.

    Attributes:
        key: what the client finds in ``system_fingerprint``.
        path: ``/chat/completions`` or ``/completions``.
        request: the body that the client sent, JSON.
        response: the server's assembled answer with all that was asked upstream, JSON; what came of it
            when ``error`` is set; empty when nothing came.
        model: the name that was asked for.
        policy: the version that answered; None for models that are not policies of ours.
        status: HTTP status, the gateway's own where no server answered; 0 when the client left first.
        started_at: Unix time, seconds.
        first_byte: seconds until the first byte of the answer; None when none came.
        duration: seconds until the last byte.
        time_to_first_token: seconds until a stream's first token; None for answers that came whole.
        raw_logprobs: whether the server gives log-probabilities before temperature; see `Step`.
        error: why this is not a whole completion; None when it is.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    key: str
    path: str
    request: bytes
    response: bytes
    model: str
    policy: PolicyVersion | None
    status: int
    started_at: float
    first_byte: float | None
    duration: float
    time_to_first_token: float | None = None
    raw_logprobs: bool = False
    error: str | None = None

    @property
    def size(self) -> int:
        """Bytes that keeping it costs, roughly."""
        return len(self.request) + len(self.response)

    @property
    def broke_off(self) -> bool:
        """Whether a stream had begun that did not come to its end, where its key is."""
        return self.error is not None and self.status == 200 and bool(self.request_body().get("stream"))

    def request_body(self) -> dict[str, Any]:
        """The request as the client sent it."""
        return cast(dict[str, Any], json.loads(self.request))

    def response_body(self) -> dict[str, Any]:
        """The assembled response; empty when there is none, or when it was no JSON object."""
        try:
            body: Any = json.loads(self.response or b"{}")
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}

    def steps(
        self, rollout_id: str, identity: StepIdentity, *, untrainable: str | None = None
    ) -> tuple[Step, ...]:
        """What this is to a rollout: one step for each choice, or one with the error.

        Args:
            rollout_id: the rollout.
            identity: where in the agent the call was made.
            untrainable: a reason that holds whatever the tokens.
        """
        call = Call(
            request=self.request_body(),
            rollout_id=rollout_id,
            policy=self.policy,
            started_at=self.started_at,
            duration=self.duration,
            time_to_first_token=self.time_to_first_token,
            raw_logprobs=self.raw_logprobs,
            identity=identity,
            call_id=self.key,
        )
        if self.error is not None:
            return (failed_step(call, self.error),)
        try:
            return steps_from(call, self.response_body(), untrainable=untrainable)
        except CaptureError as broken:
            return (failed_step(call, str(broken)),)

    def to_json(self) -> bytes:
        """For a handler in another process."""
        return _wire.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes) -> "Completion":
        """Read what `to_json` wrote.

        Raises:
            CaptureError: it has another form.
        """
        try:
            return _wire.validate_json(data)
        except ValidationError as misfit:
            raise CaptureError(f"this is no completion of a gateway: {misfit}") from misfit


_wire: TypeAdapter[Completion] = TypeAdapter(Completion)


class RecordedElsewhereError(CaptureError):
    """The gateway has recorded this completion into a rollout itself."""


def conversation_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """A digest of what was said: roles and texts, which every client writes alike."""
    said = [[m.get("role"), _text(m.get("content"))] for m in messages]
    return hashlib.blake2b(json.dumps(said, default=str).encode(), digest_size=16).hexdigest()


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def _answer(completion: Completion) -> str:
    choices: Any = completion.response_body().get("choices") or [{}]
    content: Any = (choices[0].get("message") or {}).get("content")
    return content if isinstance(content, str) else ""


_live: "WeakValueDictionary[str, CompletionLog]" = WeakValueDictionary()


class CompletionLog:
    """Completions by key, the oldest dropped first when there are too many. Thread-safe.

    Args:
        max_completions: the most to keep.
        max_bytes: the most bytes of requests and responses to keep.
    """

    def __init__(self, *, max_completions: int = 20_000, max_bytes: int = 512 * 2**20) -> None:
        self.max_completions = max_completions
        self.max_bytes = max_bytes
        self.url: str | None = None
        """The root of the gateway that puts completions in, while it is running."""
        self.dropped = 0
        """How many were dropped before anybody asked for them."""
        self._id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._kept: OrderedDict[str, Completion] = OrderedDict()
        self._gone: OrderedDict[str, CaptureError] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        _live[self._id] = self

    @staticmethod
    def of(key: str) -> "CompletionLog | None":
        """The log of this process that the key was made by; None when it was another process."""
        return _live.get(key.removeprefix(KEY_PREFIX).partition("-")[0])

    @staticmethod
    def at(base_url: str | None) -> "CompletionLog | None":
        """The log of the gateway of this process that has this address."""
        for log in tuple(_live.values()):
            if log.url is not None and base_url is not None and base_url.startswith(f"{log.url}/"):
                return log
        return None

    def new_key(self) -> str:
        """A key for a completion to come; it says which log it belongs to."""
        return f"{KEY_PREFIX}{self._id}-{next(self._numbers)}"

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def put(self, completion: Completion) -> None:
        """Keep a completion, dropping the oldest ones when there is no room."""
        with self._lock:
            self._kept[completion.key] = completion
            self._bytes += completion.size
            while self._kept and (len(self._kept) > self.max_completions or self._bytes > self.max_bytes):
                oldest = next(iter(self._kept))
                self._remove(
                    oldest,
                    f"was dropped unasked: at most {self.max_completions} completions and "
                    f"{self.max_bytes >> 20} MiB are kept",
                )
                self.dropped += 1

    def recorded(self, key: str, rollout_id: str) -> None:
        """Remember that a completion was recorded into a rollout, and need not be kept here."""
        with self._lock:
            self._forget(
                key, RecordedElsewhereError(f"completion {key} is part of rollout {rollout_id} already")
            )

    def take(self, key: str) -> Completion:
        """Hand out a completion, once.

        Raises:
            RecordedElsewhereError: the gateway made it steps of a rollout by itself.
            CaptureError: there is none under this key; the message says what became of it.
        """
        with self._lock:
            if key in self._kept:
                return self._hand_out(key)
            fate = self._gone.get(key)
        if fate is None:
            raise CaptureError(f"completion {key} is not known here: it did not come through this gateway")
        raise type(fate)(str(fate))

    def take_alike(
        self, messages: Sequence[Mapping[str, Any]], text: str, *, since: float, whole_before: float
    ) -> Completion | None:
        """Hand out a completion of this conversation whose answer begins with this text, for want of a key.

        For a client that read this much of a streamed answer and no more. Where several fit, all that any
        of their clients knows is the same, so the oldest is handed out, but first of all one that broke off,
        which no client has a key of. Completions whose own client may still come for them are left alone.

        Args:
            messages: the request's.
            text: what the client read of the answer.
            since: Unix time, seconds; older completions are not looked at.
            whole_before: Unix time, seconds; one that was answered whole is handed out where it began
                before that, when the first client of this process began that may still come for it.
        """
        digest = conversation_digest(messages)
        unclaimed = time.time() - CLAIM_SECONDS
        with self._lock:
            alike = [
                (key, kept)
                for key, kept in self._kept.items()
                if kept.started_at >= since
                and _answer(kept).startswith(text)
                and conversation_digest(kept.request_body().get("messages") or []) == digest
            ]
            for key, kept in alike:
                if kept.broke_off:
                    return self._hand_out(key)
            for key, kept in alike:
                if kept.started_at < whole_before and kept.started_at + kept.duration <= unclaimed:
                    return self._hand_out(key)
        return None

    def _hand_out(self, key: str) -> Completion:
        return self._remove(key, "was handed out already")

    def _remove(self, key: str, fate: str) -> Completion:
        completion = self._kept.pop(key)
        self._bytes -= completion.size
        self._forget(key, CaptureError(f"completion {key} {fate}"))
        return completion

    def _forget(self, key: str, fate: CaptureError) -> None:
        self._gone[key] = fate
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
