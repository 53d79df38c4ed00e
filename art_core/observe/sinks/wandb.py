"""Metrics for Weights & Biases, online or offline.

Invariant: runs that continue each other are one W&B run, under an id made of ours; what it has of a step is
not sent again.

Offline, W&B cannot say what it has: a file beside its own says how far we are, and W&B's own are begun
with the first step that is new.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from art_core.errors import ConfigError
from art_core.observe.sinks.base import SinkRun, require
from art_core.store import RunState

_STEP = "train_step"


class WandbSink:
    """Logs to Weights & Biases.

    Offline runs lie in ``<directory>/wandb`` and are sent with ``wandb sync DIRECTORY/wandb/offline-run-*``
    when there is a network.

    Args:
        project: W&B's; None: ours.
        entity: user or team; None: the default of whoever is logged in.
        directory: of W&B's files; None: beside the model's checkpoints.
        mode: ``online`` or ``offline``; None: what ``WANDB_MODE`` says, else online.
        tags: of the run.

    Raises:
        ConfigError: wandb is not installed, or there is no such mode.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        directory: str | Path | None = None,
        mode: Literal["online", "offline"] | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        require("wandb", self.name, "wandb")
        if mode not in (None, "online", "offline"):
            raise ConfigError(f"WandbSink(mode={mode!r}): expected 'online' or 'offline'")
        self._project = project
        self._entity = entity
        self._directory = None if directory is None else Path(directory)
        self._mode: Literal["online", "offline"] | None = mode
        self._tags = tags

    def open(self, run: SinkRun) -> "_Run":
        """Begin a run, or go on with it."""
        import wandb

        directory = self._directory or run.directory
        directory.mkdir(parents=True, exist_ok=True)
        offline = (self._mode or wandb.setup().settings.mode) == "offline"

        def begin() -> Any:
            return wandb.init(
                project=self._project or run.project,
                entity=self._entity,
                id=run.id,
                name=run.title,
                resume="allow",
                reinit="create_new",  # several models may be in training in this process
                mode=self._mode,
                dir=str(directory),
                config=dict(run.config),
                tags=self._tags or None,
                # What a server or trainer prints is in log files of ours; W&B is here for the numbers.
                settings=wandb.Settings(console="off", silent=True),
            )

        return _Run(begin, directory / "wandb" / f"{run.id}.step", offline)


class _Run:
    """A W&B run, whose rows come in order and take nothing more once the next one has come.

    Numbers may be added to a training step afterwards, as of an evaluation. So each training step has two
    rows, one for what is added, and the axis of all charts is the training step and not the row.
    """

    def __init__(self, begin: Callable[[], Any], reached: Path, offline: bool) -> None:
        self._begin = begin
        self._reached = reached
        self._run: Any = None
        self.last_step = json.loads(reached.read_text()) if reached.exists() else 0
        if not offline:
            self._open()
        self._newest = self.last_step

    def _open(self) -> Any:
        if self._run is None:
            self._run = self._begin()
            self._run.define_metric(_STEP)
            self._run.define_metric("*", step_metric=_STEP)
            if not self._run.offline:
                self.last_step = max(0, (self._run.step - 1) // 2)  # W&B says which row comes next
        return self._run

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        run = self._open()
        row = {**values, _STEP: step, "_timestamp": at}
        if step <= self._newest:
            run.log(row, step=2 * self._newest + 1)  # stays open for more of them
            return
        run.log(row, step=2 * step, commit=True)
        self._newest = step
        scratch = self._reached.with_suffix(".new")
        scratch.write_text(json.dumps(step))
        scratch.replace(self._reached)

    def close(self, state: RunState | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if state is RunState.FAILED else 0)
