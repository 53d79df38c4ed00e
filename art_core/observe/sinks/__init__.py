"""Where a run's metrics go beside the store: files, trackers, monitoring.

Invariant: the store is first and has everything; a sink gets it from there, each step once.

A *sink* says where to (`JSONLSink`, `TensorBoardSink`, `WandbSink`, `MLflowSink`, `PrometheusSink`) and may
serve several runs; opened for one run it is a *writer*. Runs that continue each other are one run to a sink.
`delivery` brings metrics to writers; `export_metrics` does it once, for runs that are over.
"""

from art_core.observe.sinks.base import MetricSink, MetricWriter, SinkRun
from art_core.observe.sinks.delivery import Delivery, Undelivered, export_metrics
from art_core.observe.sinks.jsonl import JSONLSink
from art_core.observe.sinks.mlflow import MLflowSink
from art_core.observe.sinks.names import SINKS, as_sinks
from art_core.observe.sinks.prometheus import PrometheusSink
from art_core.observe.sinks.tensorboard import TensorBoardSink
from art_core.observe.sinks.wandb import WandbSink

__all__ = [
    "SINKS",
    "Delivery",
    "JSONLSink",
    "MLflowSink",
    "MetricSink",
    "MetricWriter",
    "PrometheusSink",
    "SinkRun",
    "TensorBoardSink",
    "Undelivered",
    "WandbSink",
    "as_sinks",
    "export_metrics",
]
