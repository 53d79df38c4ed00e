"""vLLM's own metrics, kept with the run: what a server was doing between two training steps.

Invariant: counters are differences over the window, over all replicas together, and a server that was
restarted in between counts from zero; what a server does not tell is left out, never zero.

A thread reads ``/metrics`` (Prometheus' text format) of each server every few seconds, a few of its hundreds
of series; `ServingMonitor.window` sums them up and begins the next window.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from art_core.inference.engine import Engine
from art_core.inference.external import ExternalEngine
from art_core.inference.gateway_transport import is_local
from art_core.inference.replicas import ReplicaSet

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
"""How often servers are read."""

READ_SECONDS = 5.0
"""How soon a server must answer."""

GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
}
"""What is so at a moment, and our name for it."""

COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_queue_time_seconds_count",
)
"""What only grows while a server lives."""

_SELECTED = tuple(f"{name}{mark}" for name in (*GAUGES, *COUNTERS) for mark in "{ ")


@dataclass(frozen=True, slots=True)
class MetricSource:
    """Where a server's metrics are.

    Attributes:
        base_url: of the server, ending in ``/v1``.
        api_key: sent as the bearer token; None sends none.
    """

    base_url: str
    api_key: str | None = None

    @property
    def url(self) -> str:
        """Of the metrics; vLLM has them beside ``/v1``."""
        return self.base_url.removesuffix("/v1") + "/metrics"


def metric_sources(engine: Engine) -> tuple[MetricSource, ...]:
    """Where an engine's servers have their metrics, if they have any."""
    if isinstance(engine, ReplicaSet):
        return tuple(source for each in engine.engines for source in metric_sources(each))
    key = engine.api_key if isinstance(engine, ExternalEngine) else None
    return (MetricSource(engine.base_url, key),)


def read_metrics(text: str) -> dict[str, list[float]]:
    """The selected series of one exposition: by name, one number for each engine of the server."""
    lines = [line for line in text.splitlines() if line.startswith(_SELECTED)]
    series: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.value)
    return series


@dataclass(slots=True)
class _Window:
    """What was seen since the last training step."""

    began: float
    gauges: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    grown: dict[str, float] = field(default_factory=dict[str, float])

    def add_gauges(self, now: Mapping[str, float]) -> None:
        for name, value in now.items():
            self.gauges.setdefault(name, []).append(value)

    def summary(self, ended: float) -> dict[str, float]:
        seconds, grown = ended - self.began, self.grown
        told: dict[str, float] = {}
        for name, values in self.gauges.items():
            told[f"{name}_mean"] = sum(values) / len(values)
            told[f"{name}_max"] = max(values)
        for kind in ("prompt", "generation"):
            tokens = grown.get(f"vllm:{kind}_tokens_total")
            if tokens is not None and seconds > 0:
                told[f"{kind}_tokens_per_second"] = tokens / seconds
        if "vllm:num_preemptions_total" in grown:
            told["preemptions"] = grown["vllm:num_preemptions_total"]
        for name, part, whole in (
            ("prefix_cache_hit_rate", "prefix_cache_hits_total", "prefix_cache_queries_total"),
            *(
                (f"{what}_mean", f"{what}_sum", f"{what}_count")
                for what in (
                    "time_to_first_token_seconds",
                    "inter_token_latency_seconds",
                    "request_queue_time_seconds",
                )
            ),
        ):
            if grown.get(f"vllm:{whole}"):
                told[name] = grown.get(f"vllm:{part}", 0.0) / grown[f"vllm:{whole}"]
        return {f"serving/{name}": value for name, value in told.items()}


class ServingMonitor:
    """Reads servers' metrics while they serve; a context manager. Thread-safe.

    Args:
        sources: the servers; one without metrics is read once, and then left alone.
        interval: seconds between readings.
    """

    def __init__(self, sources: Sequence[MetricSource], *, interval: float = SAMPLE_SECONDS) -> None:
        self._sources = list(sources)
        self._interval = interval
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._last: dict[MetricSource, dict[str, float]] = {}
        self._window = _Window(time.monotonic())
        self._closing = threading.Event()
        self._clients: dict[MetricSource, httpx.Client] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Begin to read."""
        if self._thread is None and self._sources:
            self._thread = threading.Thread(target=self._run, name="art-metrics", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Read no more. Closing twice does nothing."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(READ_SECONDS + 1)
            self._thread = None
        with self._reading:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Begin a new window here, as after a pause."""
        with self._lock:
            self._window = _Window(time.monotonic())

    def window(self) -> dict[str, float]:
        """What the servers did since the last call, by metric name; empty where none tells anything.

        ``serving/running_mean`` and ``_max`` and the like are of moments, over all servers together (the
        fullest one for ``kv_cache_usage``); rates are per second of the window; latencies are means in
        seconds.
        """
        self.read()
        with self._lock:
            ended = time.monotonic()
            told = self._window.summary(ended)
            self._window = _Window(ended)
        return told

    def read(self) -> None:
        """Read every server now. A server that does not answer is left out of this reading."""
        with self._reading:
            if self._closing.is_set():
                return
            read = {source: series for source in tuple(self._sources) if (series := self._read(source))}
        gauges: dict[str, float] = {}
        for series in read.values():
            for name, ours in GAUGES.items():
                if name in series:
                    together = max if ours == "kv_cache_usage" else sum
                    gauges[ours] = together([gauges.get(ours, 0.0), *series[name]])
        with self._lock:
            self._window.add_gauges(gauges)
            for source, series in read.items():
                counts = {name: sum(series[name]) for name in COUNTERS if name in series}
                before = self._last.get(source)
                self._last[source] = counts
                if before is None:
                    continue
                for name, value in counts.items():
                    old = before.get(name, 0.0)
                    # It went down: the server was restarted, and has counted from zero since.
                    growth = value - old if value >= old else value
                    self._window.grown[name] = self._window.grown.get(name, 0.0) + growth

    def _read(self, source: MetricSource) -> dict[str, list[float]]:
        try:
            answer = self._client(source).get(source.url)
        except httpx.HTTPError as down:
            logger.debug("%s does not answer: %r", source.url, down)
            return {}
        series = read_metrics(answer.text) if answer.status_code == 200 else {}
        if not series and answer.status_code < 500:
            logger.info("%s has no metrics of vLLM (%d): none are kept", source.url, answer.status_code)
            self._sources.remove(source)
        return series

    def _client(self, source: MetricSource) -> httpx.Client:
        if source not in self._clients:
            self._clients[source] = httpx.Client(
                headers={} if source.api_key is None else {"authorization": f"Bearer {source.api_key}"},
                timeout=READ_SECONDS,
                verify=source.url.startswith("https:"),
                trust_env=not is_local(source.base_url),
            )
        return self._clients[source]

    def _run(self) -> None:
        self.read()
        while not self._closing.wait(self._interval):
            self.read()
