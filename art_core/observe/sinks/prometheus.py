"""Metrics for Prometheus: the newest training step of each run, as gauges to be scraped.

Invariant: a name that a run brings along (of a node, of a component) is a label, so that families are those
of the catalogue; a run that has ended has no series any more.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from art_core.observe.metrics import METRICS, MetricSpec, resolved
from art_core.observe.sinks.base import SinkRun
from art_core.store import RunState

_LABELS = ("project", "model")


class PrometheusSink:
    """Shows the newest numbers of each run: ``art_reward_mean{project="p",model="m"} 0.5``.

    A model that is served through the gateway shows them at the gateway's ``/metrics``, too.

    Args:
        port: serve ``/metrics`` there while a run is open; None: serve nothing, the gateway or the registry
            is enough where a process has a ``/metrics`` of its own.
        host: to serve on.
        registry: where the gauges are; None: the process-wide one, or one of its own when it serves.
    """

    name = "prometheus"

    def __init__(
        self,
        port: int | None = None,
        *,
        host: str = "127.0.0.1",
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._host, self._port = host, port
        self.registry = registry or (REGISTRY if port is None else CollectorRegistry())
        self._lock = threading.Lock()
        self._open = 0
        self._server: Any = None

    @property
    def url(self) -> str | None:
        """Where it serves now; None when it does not."""
        return None if self._server is None else f"http://{self._host}:{self._server.server_port}/metrics"

    @property
    def collector(self) -> Collector:
        """What it shows, to be registered with other registries, too."""
        return _shown_in(self.registry)

    def open(self, run: SinkRun) -> "_Gauges":
        """Begin to show a run."""
        with self._lock:
            if self._open == 0 and self._port is not None:
                self._server, _ = start_http_server(self._port, self._host, self.registry)
            self._open += 1
            return _Gauges(self, _shown_in(self.registry), run)

    def closed(self) -> None:
        """One run fewer is shown."""
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._server is not None:
                self._server.shutdown()
                self._server.server_close()
                self._server = None


class _Gauges:
    last_step = 0  # a process that begins has nothing to show of those before it

    def __init__(self, sink: PrometheusSink, latest: "_Latest", run: SinkRun) -> None:
        self._sink, self._latest, self._run = sink, latest, run

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._latest.show(self._run, {**values, "step": float(step)})

    def close(self, state: RunState | None) -> None:
        self._latest.forget(self._run)
        self._sink.closed()


_STEP = MetricSpec("step", "number", "The newest training step.", "", "")
_OTHER = MetricSpec("other/<name>", "as given", "Numbers of a name of the user's own.", "", "")


class _Latest(Collector):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, str], dict[str, float]] = {}

    def show(self, run: SinkRun, values: dict[str, float]) -> None:
        with self._lock:
            before = self._shown.get((run.project, run.model), {})
            same = before.get("step") == values["step"]  # numbers may be added to a step
            self._shown[run.project, run.model] = {**before, **values} if same else values

    def forget(self, run: SinkRun) -> None:
        with self._lock:
            self._shown.pop((run.project, run.model), None)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families."""
        with self._lock:
            shown = {run: dict(values) for run, values in self._shown.items()}
        families: dict[str, GaugeMetricFamily] = {}
        for run, values in shown.items():
            for name, value in values.items():
                spec, label = (_STEP, None) if name == "step" else resolved(name)
                if spec is None:
                    spec, label = _OTHER, name
                family = families.get(spec.name)
                if family is None:
                    labels = (*_LABELS, "name") if spec.is_pattern else _LABELS
                    told = f"{spec.what} ({spec.unit})"
                    family = families[spec.name] = GaugeMetricFamily(_family(spec.name), told, labels=labels)
                family.add_metric([*run, *([] if label is None else [label])], value)
        order = {name: i for i, name in enumerate(METRICS)}
        return [families[name] for name in sorted(families, key=lambda name: order.get(name, len(order)))]


def _family(name: str) -> str:
    """``node/<name>/calls`` is ``art_node_calls``."""
    parts = [part for part in name.split("/") if not part.startswith("<")]
    return "art_" + "_".join(parts)


_registered: WeakKeyDictionary[CollectorRegistry, _Latest] = WeakKeyDictionary()
_registering = threading.Lock()


def _shown_in(registry: CollectorRegistry) -> _Latest:
    """What a registry shows: one collector for all sinks, since a family may be there only once."""
    with _registering:
        if registry not in _registered:
            latest = _registered[registry] = _Latest()
            registry.register(latest)
        return _registered[registry]
