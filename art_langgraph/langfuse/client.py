"""LangfuseClient: requests to one Langfuse project, paced, repeated and explained.

Invariant: a method returns only what the server confirmed; otherwise it raises `LangfuseUnavailableError`
(nobody knows whether it arrived: send it again) or `LangfuseRefusedError` (this will never be taken).

The REST side is the SDK's own client (`langfuse.api`). Spans are posted as OTLP, encoded by OpenTelemetry:
the SDK's span processor drops what it cannot deliver and tells nobody, and it becomes the tracer provider of
the whole process, which is the application's to choose.
"""

import email.utils
import gzip
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import httpx
from pydantic import ValidationError
from tenacity import RetryCallState, Retrying, retry_if_exception_type

from art_core.errors import ArtError, ConfigError
from art_langgraph.langfuse.connection import LangfuseConnection

if TYPE_CHECKING:
    from langfuse.api import LangfuseAPI

T = TypeVar("T")

_BUSY = frozenset({408, 409, 425, 429})
"""HTTP codes below 500 that another try may mend."""

_FIELDS = "core,basic,time,io,metadata,model,usage,prompt,trace_context"
_FULL_METADATA = "langgraph_checkpoint_ns,langgraph_node,langgraph_step,tags,tools,attempt,art"
"""Metadata that must come whole: the server cuts the others after 200 characters."""


class LangfuseError(ArtError, RuntimeError):
    """Something between us and Langfuse did not work."""


class LangfuseUnavailableError(LangfuseError):
    """The server did not answer, or was too busy, until patience ran out."""


class LangfuseRefusedError(LangfuseError):
    """The server will not take this request.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Busy(Exception):
    """A try that failed for now."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the server took of a request.

    Attributes:
        rejected: parts that it refused: it never says which.
        message: why.
    """

    rejected: int = 0
    message: str = ""


class LangfuseClient:
    """Talks to one Langfuse project. Thread-safe; close it, or use it as a context manager.

    Args:
        connection: which project, and how hard it may be asked; None: what the environment names.
        stopped: when it is set, waiting ends and the request is given up.

    Attributes:
        requests: how many were sent, repeated ones included.

    Raises:
        ConfigError: the environment names none, or the ``langfuse`` package is missing.
    """

    def __init__(
        self, connection: LangfuseConnection | None = None, *, stopped: threading.Event | None = None
    ) -> None:
        self.connection = connection or LangfuseConnection.from_env()
        self.requests = 0
        self._stopped = stopped or threading.Event()
        self._lock = threading.Lock()
        self._next = 0.0
        self._http = httpx.Client(timeout=self.connection.timeout)
        self._auth = httpx.BasicAuth(
            self.connection.public_key, self.connection.secret_key.get_secret_value()
        )
        self.api = self._sdk()
        """The SDK's REST client, for what is not offered here; it is neither paced nor repeated."""

    def _sdk(self) -> "LangfuseAPI":
        try:
            from langfuse import __version__
            from langfuse.api import LangfuseAPI
        except ImportError as missing:
            raise ConfigError(
                "Langfuse's SDK is not installed: pip install 'art-langgraph[langfuse]'"
            ) from missing
        self.sdk_version = __version__
        return LangfuseAPI(
            base_url=self.connection.base_url,
            username=self.connection.public_key,
            password=self.connection.secret_key.get_secret_value(),
            x_langfuse_sdk_name="python",
            x_langfuse_sdk_version=__version__,
            x_langfuse_public_key=self.connection.public_key,
            httpx_client=self._http,
        )

    def close(self) -> None:
        """Let go of the connections. Closing twice is harmless."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- sending -----------------------------------------------------------------------------------

    def send_spans(self, request: bytes) -> Accepted:
        """Send an OTLP ``ExportTraceServiceRequest``, serialised.

        Raises:
            LangfuseUnavailableError: it could not be delivered for now.
            LangfuseRefusedError: it will never be taken.
        """
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        headers = {
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
            "x-langfuse-sdk-name": "python",
            "x-langfuse-sdk-version": self.sdk_version,
            "x-langfuse-public-key": self.connection.public_key,
            "x-langfuse-ingestion-version": "4",
        }
        url = f"{self.connection.base_url}/api/public/otel/v1/traces"
        body = gzip.compress(request, 1)
        answer = self._ask(
            "sending traces", lambda: self._http.post(url, content=body, headers=headers, auth=self._auth)
        )
        if not answer.headers.get("content-type", "").startswith("application/x-protobuf"):
            return Accepted()  # Langfuse answers with JSON that says nothing
        partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        return Accepted(partial.rejected_spans, partial.error_message)

    def send_scores(self, scores: Sequence[Mapping[str, Any]]) -> Accepted:
        """Send scores, by the names of Langfuse's API; one that is there already (same id) is replaced.

        Raises:
            LangfuseUnavailableError: they could not be delivered for now.
            LangfuseRefusedError: they will never be taken.
        """
        # The generated model knows less than the API takes, so the SDK itself sends plain mappings, too.
        request = cast(Any, [dict(score) for score in scores])
        answer: Any = self._ask(
            "sending scores",
            lambda: self.api.scores.create(request=request, request_options={"max_retries": 0}),
        )
        rejected = int(getattr(answer, "rejected", 0) or 0)
        return Accepted(rejected, "; ".join(e.message for e in getattr(answer, "errors", ())))

    # -- reading -----------------------------------------------------------------------------------

    def observations(self, *, page: int = 100, **filters: Any) -> Iterator[dict[str, Any]]:
        """Observations, as the API's JSON, newest first; all pages, one at a time.

        Args:
            page: observations of one request.
            filters: of ``langfuse.api``'s ``observations.get_many``.

        Raises:
            LangfuseUnavailableError: the server does not answer.
            LangfuseRefusedError: it will not.
        """
        return self._pages(
            "reading observations",
            lambda cursor: self.api.observations.get_many(
                fields=_FIELDS,
                expand_metadata=_FULL_METADATA,
                limit=page,
                cursor=cursor,
                request_options={"max_retries": 0},
                **filters,
            ),
        )

    def scores(self, *, page: int = 100, **filters: Any) -> Iterator[dict[str, Any]]:
        """Scores, as the API's JSON; all pages. Arguments and errors as for `observations`."""
        return self._pages(
            "reading scores",
            lambda cursor: self.api.scores.get_many(
                fields="details,subject,annotation",
                limit=page,
                cursor=cursor,
                request_options={"max_retries": 0},
                **filters,
            ),
        )

    def _pages(self, what: str, ask: Callable[[str | None], Any]) -> Iterator[dict[str, Any]]:
        cursor: str | None = None
        while True:
            current = cursor
            answer = self._ask(what, lambda current=current: ask(current))
            for item in answer.data:
                yield item.model_dump(mode="json", by_alias=True)
            cursor = answer.meta.cursor
            if not cursor:
                return

    def prompt(self, name: str, *, version: int | None = None, label: str | None = None) -> Any:
        """A prompt of Langfuse's prompt management, as the SDK's model.

        Raises:
            LangfuseUnavailableError: the server does not answer.
            LangfuseRefusedError: there is none, or the server will not give it.
        """
        return self._ask(
            f"reading prompt {name!r}",
            lambda: self.api.prompts.get(
                name, version=version, label=label, request_options={"max_retries": 0}
            ),
        )

    def check(self) -> str:
        """Ask whether the keys are good; the project's name.

        Raises:
            LangfuseUnavailableError: the server does not answer.
            LangfuseRefusedError: it does not know the keys.
        """
        found = self._ask(
            "asking for the project", lambda: self.api.projects.get(request_options={"max_retries": 0})
        )
        return found.data[0].name if found.data else ""

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, what: str, ask: Callable[[], T]) -> T:
        began = time.monotonic()
        if self._stopped.is_set():
            raise LangfuseUnavailableError(
                f"{what}: given up, as was asked; nothing is lost: do it again later"
            )

        def give_up(state: RetryCallState) -> bool:
            out_of_patience = time.monotonic() - began + self._wait(state) > self.connection.patience
            # A server that says how long to wait is not broken.
            out_of_attempts = _told(state) is None and state.attempt_number >= self.connection.attempts
            return out_of_patience or out_of_attempts or self._stopped.is_set()

        retrying = Retrying(
            stop=give_up,
            wait=self._wait,
            sleep=self._sleep,
            retry=retry_if_exception_type(_Busy),
            reraise=True,
        )
        try:
            return retrying(self._try, what, ask)
        except _Busy as busy:
            raise LangfuseUnavailableError(
                f"{what}: {self.connection.base_url} {busy}; nothing is lost: do it again later"
            ) from busy

    def _try(self, what: str, ask: Callable[[], T]) -> T:
        from langfuse.api.core import ApiError

        self._pace()
        try:
            answer = ask()
        except httpx.TransportError as broken:
            reason = str(broken) or type(broken).__name__
            raise _Busy(f"cannot be reached ({reason})") from broken
        except ValidationError as unreadable:
            fault = unreadable.errors()[0]
            raise LangfuseError(
                f"{what}: the SDK {self.sdk_version} cannot read the answer of {self.connection.base_url} "
                f"({fault['msg']} at {'.'.join(map(str, fault['loc']))}); upgrade langfuse, or check the "
                "address"
            ) from unreadable
        except ApiError as answered:
            status, headers = answered.status_code or 0, answered.headers or {}
            self._judge(what, status, headers, answered.body)
            raise
        if isinstance(answer, httpx.Response) and answer.status_code >= 300:
            self._judge(what, answer.status_code, answer.headers, answer.text)
        return answer

    def _judge(self, what: str, status: int, headers: Mapping[str, str], body: Any) -> None:
        """Raise what an answer of this status means."""
        said = str(body)[:300]
        if status >= 500 or status in _BUSY or status == 0:
            raise _Busy(f"answers {status} ({said})", _retry_after(headers))
        way_out = {
            401: "check the public and the secret key, and that they are of this server",
            403: "the keys lack the right to do it",
            404: "check the address; the server may be older than Langfuse 4.59, which SDK 5 needs",
            413: "the request is too large; lower max_request_bytes",
        }.get(status, "see what it says")
        raise LangfuseRefusedError(
            f"{what}: {self.connection.base_url} answers {status}: {said}; {way_out}", status
        )

    def _pace(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = max(now, self._next)
            self._next = due + 60.0 / self.connection.requests_per_minute
            self.requests += 1
        if due > now:
            self._stopped.wait(due - now)

    def _sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _wait(self, state: RetryCallState) -> float:
        told = _told(state)
        if told is not None:
            return told
        return min(30.0, 0.5 * 2 ** (state.attempt_number - 1)) * random.uniform(0.8, 1.2)


def _told(state: RetryCallState) -> float | None:
    """How long the server asked us to wait."""
    failure = state.outcome.exception() if state.outcome is not None else None
    return failure.wait if isinstance(failure, _Busy) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = {name.lower(): text for name, text in headers.items()}.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
