"""Metrics for MLflow: a tracking server, a database, or a directory of files.

Invariant: runs that continue each other are one MLflow run, found again by a tag; a tag that is written
together with a step's numbers says how far we are. A server is asked for nothing before it has shown that
it is there: MLflow's client would try for minutes.
"""

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_core.errors import SinkError
from art_core.observe.sinks.base import SinkRun, require
from art_core.store import RunState

_RUN, _REACHED = "art.run", "art.last_step"

_MOST_METRICS = 1000  # in one call of MLflow's
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
_ANSWER_SECONDS = 5.0
_DOWN = (502, 503, 504)  # said by what stands before a server
_STATUS = {RunState.FAILED: "FAILED", RunState.STOPPED: "KILLED"}


class MLflowSink:
    """Logs to MLflow.

    Args:
        tracking_uri: of the server (``http://...``) or database (``sqlite:///...``), or a directory, which
            MLflow takes with ``MLFLOW_ALLOW_FILE_STORE=true`` alone; None: what ``MLFLOW_TRACKING_URI`` says,
            else the database ``mlflow.db`` beside the model's checkpoints.
        experiment: MLflow's; None: our project.

    Raises:
        ConfigError: MLflow is not installed.
    """

    name = "mlflow"

    def __init__(self, tracking_uri: str | Path | None = None, *, experiment: str | None = None) -> None:
        require("mlflow", self.name, "mlflow")
        self._uri = tracking_uri
        self._experiment = experiment

    def open(self, run: SinkRun) -> "_Run":
        """Begin a run, or go on with it."""
        from mlflow.tracking import MlflowClient

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            run.directory.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        elif isinstance(uri, Path) or not ("://" in uri or uri.startswith(("file:", "databricks"))):
            uri = Path(uri).resolve().as_uri()
        return _Run(MlflowClient(uri), str(uri), run, self._experiment or run.project)


class _Run:
    def __init__(self, client: Any, uri: str, run: SinkRun, experiment: str) -> None:
        from mlflow.entities import Param

        self._client = client
        self._uri = uri
        _check_reachable(uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
        known = client.search_runs([experiment_id], f"tags.`{_RUN}` = '{run.id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self.last_step = self._newest = int(known[0].data.tags.get(_REACHED, 0))
            client.update_run(self._id, status="RUNNING")
            return
        self.last_step = self._newest = 0
        made = client.create_run(
            experiment_id, start_time=int(run.started_at * 1000), tags={_RUN: run.id}, run_name=run.title
        )
        self._id = made.info.run_id
        given = [Param(_name(name), value[:_LONGEST_PARAMETER]) for name, value in _flat("", run.config)]
        for i in range(0, len(given), _MOST_PARAMETERS):
            client.log_batch(self._id, params=given[i : i + _MOST_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric, RunTag

        _check_reachable(self._uri)
        when = int(at * 1000)
        numbers = [Metric(_name(name), value, when, step) for name, value in values.items()]
        last = max(0, len(numbers) - 1) // _MOST_METRICS * _MOST_METRICS
        for i in range(0, last + 1, _MOST_METRICS):
            reached = [RunTag(_REACHED, str(step))] if i == last and step > self._newest else []
            self._client.log_batch(self._id, metrics=numbers[i : i + _MOST_METRICS], tags=reached)
        self._newest = max(step, self._newest)

    def close(self, state: RunState | None) -> None:
        if state is not None:
            _check_reachable(self._uri)
            self._client.set_terminated(self._id, status=_STATUS.get(state, "FINISHED"))


def _check_reachable(uri: str) -> None:
    """Ask a server for any answer at all, on the way that MLflow's client takes (proxies included).

    Raises:
        SinkError: there is none within seconds.
    """
    import requests

    if not uri.startswith(("http://", "https://")):
        return
    try:
        found = requests.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_SECONDS, allow_redirects=False)
        why = f"status {found.status_code}" if found.status_code in _DOWN else None
    except requests.exceptions.SSLError:
        return  # somebody is there; MLflow knows which certificates to trust
    except requests.exceptions.RequestException as failure:
        why = str(failure)
    if why is not None:
        raise SinkError(
            f"the MLflow server at {uri} does not answer ({why}): check that it runs and can be reached from "
            "here, or give MLflowSink(tracking_uri=...) another one"
        )


def _name(name: str) -> str:
    """A name as MLflow allows it: it is a path there, of few characters."""
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    return posixpath.join(*("_" if part.strip(". ") == "" else part for part in parts))


def _flat(prefix: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings as MLflow's parameters: ``train.learning_rate``; what is None is left out."""
    found: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            inner: Mapping[str, Any] = value
            found += _flat(f"{prefix}{name}.", inner)
        elif value is not None:
            found.append((f"{prefix}{name}", str(value)))
    return found
