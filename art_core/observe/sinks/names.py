"""Sinks by name, for settings: ``sinks=["tensorboard", "jsonl"]``."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from art_core.errors import ConfigError
from art_core.observe.sinks.base import MetricSink
from art_core.observe.sinks.jsonl import JSONLSink
from art_core.observe.sinks.mlflow import MLflowSink
from art_core.observe.sinks.prometheus import PrometheusSink
from art_core.observe.sinks.tensorboard import TensorBoardSink
from art_core.observe.sinks.wandb import WandbSink

SINKS: Mapping[str, Callable[[], MetricSink]] = MappingProxyType(
    {
        "jsonl": JSONLSink,
        "tensorboard": TensorBoardSink,
        "wandb": WandbSink,
        "mlflow": MLflowSink,
        "prometheus": PrometheusSink,
    }
)
"""What makes each sink with its defaults."""


def as_sinks(given: Iterable[str | MetricSink]) -> tuple[MetricSink, ...]:
    """Sinks, of their names or as they are.

    Raises:
        ConfigError: there is no sink of that name, it is named twice, or its package is not installed.
    """
    if isinstance(given, str):
        raise ConfigError(f"sinks={given!r}: give a list, as in sinks=[{given!r}]")
    given = list(given)
    sinks: list[MetricSink] = []
    for each in given:
        if not isinstance(each, str):
            if not callable(getattr(each, "open", None)):
                raise ConfigError(f"{each!r} is no sink: give a name ({', '.join(SINKS)}) or a MetricSink")
            sinks.append(each)
        elif given.count(each) > 1:
            raise ConfigError(f"sinks: {each!r} is named twice, and would be told of every step twice")
        elif each in SINKS:
            sinks.append(SINKS[each]())
        else:
            raise ConfigError(f"there is no sink {each!r}; there are {', '.join(SINKS)}")
    return tuple(sinks)
