"""What a gateway counts, for Prometheus to scrape.

Invariant: the number of series is bounded, whatever clients ask for: versions beyond the newest
`VERSIONS_KEPT` lose theirs, and models that are not policies share the label ``other``.

One registry for each gateway, so that two in one process do not add up. What changes all the time (calls in
flight, states) is read when it is asked for; what happens is counted once per call.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from art_core.inference.gateway_log import CLIENT_GONE, Completion, CompletionLog
from art_core.inference.gateway_upstream import Upstream
from art_core.packed import FIELD as PACKED_FIELD
from art_core.types import PolicyVersion

VERSIONS_KEPT = 16
"""Policy versions with series of their own."""

OTHER = "other"
"""The version label of models that are not policies."""

NOBODY = "none"
"""The replica label of calls that no replica answered."""

_FIRST_TOKEN_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_CALL_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class GatewayMetrics:
    """Counts the calls of one gateway. Belongs to the gateway's event loop, except for `exposition`.

    Args:
        upstream: the servers.
        log: the completions that wait to be asked for.
        others: what else is to be shown.
    """

    def __init__(self, upstream: Upstream, log: CompletionLog, others: CollectorRegistry) -> None:
        registry = self._registry = CollectorRegistry()
        self._others = others
        self._versions: OrderedDict[str, None] = OrderedDict()
        self._children: dict[tuple[MetricWrapperBase, tuple[str, ...]], Any] = {}
        self.requests = Counter(
            "art_gateway_requests",
            "Completion requests that have ended, by HTTP status (0: none was sent).",
            ("version", "replica", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "art_gateway_errors",
            "Completion requests without a whole completion, by what was wrong: client_gone, refused (the "
            "server's 4xx), server_error (its 5xx), unreachable, unreadable (cut in the middle, too).",
            ("version", "kind"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "art_gateway_prompt_tokens", "Tokens of prompts.", ("version", "replica"), registry=registry
        )
        self.completion_tokens = Counter(
            "art_gateway_completion_tokens", "Tokens sampled.", ("version", "replica"), registry=registry
        )
        self.first_token = Histogram(
            "art_gateway_time_to_first_token_seconds",
            "From a streamed request's arrival to the first bytes of its answer.",
            ("version",),
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "art_gateway_request_seconds",
            "From a request's arrival to the last byte of its answer.",
            ("version",),
            buckets=_CALL_SECONDS,
            registry=registry,
        )
        registry.register(_Now(upstream, log))

    def finished(
        self, completion: Completion, replica: str | None, usage: Mapping[str, Any], streamed: bool
    ) -> None:
        """Count a call that has ended.

        Args:
            completion: what came of it.
            replica: which replica answered; None when none did.
            usage: what `token_counts` says.
            streamed: whether it was asked to come in pieces.
        """
        version, place = self._label(completion.policy), replica or NOBODY
        self._child(self.requests, version, place, str(completion.status)).inc()
        self._child(self.duration, version).observe(completion.duration)
        if streamed and completion.first_byte is not None:
            self._child(self.first_token, version).observe(completion.first_byte)
        if completion.error is not None:
            self._child(self.errors, version, _kind(completion, replica)).inc()
        for counter, count in (
            (self.prompt_tokens, usage.get("prompt_tokens")),
            (self.completion_tokens, usage.get("completion_tokens")),
        ):
            if count:
                self._child(counter, version, place).inc(count)

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(self._others)

    def _child(self, metric: MetricWrapperBase, *labels: str) -> Any:
        # `labels` of the library takes a lock and checks its arguments: several times for each call.
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def _label(self, version: PolicyVersion | None) -> str:
        if version is None:
            return OTHER
        name = version.name
        if name in self._versions:
            self._versions.move_to_end(name)
            return name
        self._versions[name] = None
        if len(self._versions) > VERSIONS_KEPT:
            self._forget(self._versions.popitem(last=False)[0])
        return name

    def _forget(self, version: str) -> None:
        for metric, labels in [key for key in self._children if key[1][0] == version]:
            metric.remove(*labels)
            del self._children[metric, labels]


def token_counts(body: Mapping[str, Any]) -> Mapping[str, int]:
    """How many tokens an answer cost: as the server counts them, or by its ids where it did not count."""
    usage: Any = body.get("usage")
    if isinstance(usage, Mapping):
        given = cast(Mapping[str, Any], usage)
        return {k: n for k in ("prompt_tokens", "completion_tokens") if type(n := given.get(k)) is int}
    packed: Any = body.get(PACKED_FIELD)
    if packed:
        sampled = sum(_packed_count(choice["ids"]) for choice in packed["choices"])
        return {"prompt_tokens": _packed_count(packed["prompt"]), "completion_tokens": sampled}
    sampled = sum(len(choice.get("token_ids") or ()) for choice in body.get("choices") or ())
    return {"prompt_tokens": len(body.get("prompt_token_ids") or ()), "completion_tokens": sampled}


def _packed_count(base64: str) -> int:
    """How many int32 are written so."""
    return (len(base64) * 3 // 4 - base64[-2:].count("=")) // 4


def _kind(completion: Completion, replica: str | None) -> str:
    if completion.error is not None and CLIENT_GONE in completion.error:
        return "client_gone"
    if replica is None:
        return "unreachable" if completion.status >= 500 else "refused"
    if completion.status >= 400:
        return "refused" if completion.status < 500 else "server_error"
    return "unreadable"


class _Now(Collector):
    """What is so at the moment of asking."""

    def __init__(self, upstream: Upstream, log: CompletionLog) -> None:
        self._upstream = upstream
        self._log = log

    def collect(self) -> Iterable[Metric]:
        """The families."""
        upstream = self._upstream
        up = GaugeMetricFamily("art_gateway_replica_up", "1 while calls go to it.", labels=["replica"])
        busy = GaugeMetricFamily(
            "art_gateway_requests_in_flight", "Calls that a replica is busy with.", labels=["replica"]
        )
        repeated = CounterMetricFamily(
            "art_gateway_repeated",
            "Calls that were made again because this replica failed them.",
            labels=["replica"],
        )
        for replica in upstream.router.replicas:
            up.add_metric([replica.name], float(replica.state == "up"))
            busy.add_metric([replica.name], replica.busy)
            repeated.add_metric([replica.name], upstream.repeated[replica.name])
        yield from (up, busy, repeated)
        yield GaugeMetricFamily(
            "art_gateway_requests_queued",
            "Calls that wait for a connection, or for a replica to come up.",
            value=upstream.queued,
        )
        yield GaugeMetricFamily(
            "art_gateway_completions_kept", "Completions that wait to be asked for.", value=len(self._log)
        )
        yield CounterMetricFamily(
            "art_gateway_completions_dropped", "Completions dropped unasked.", value=self._log.dropped
        )
