"""Knobs: settings that can be turned while a run goes on, by a program or by editing a file.

Invariant: a value that cannot be used is refused with its name and changes nothing; every change is told of,
with what it was before; what a run was turned to is in its file, so that a resumed run goes on with it.

The file is JSON beside the checkpoints, such as ``{"temperature": 0.8, "reward_weights": {"steps": -0.02}}``.
It is read before each call of ``train``; a missing knob, or null, stands for the configured value, and a
missing weight for the one that rewards were scored with.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from pydantic import Field, FiniteFloat, field_validator

from art_core.config import Settings, TrainConfig
from art_core.errors import ConfigError

FILE = "knobs.json"

REWARD_WEIGHTS = "reward_weights"

Turn: TypeAlias = float | Mapping[str, float | None] | None
"""What a knob is turned to: a number; for weights of rewards, numbers by component; None: as it was."""


class Knobs(Settings):
    """What can be turned. None: as configured."""

    learning_rate: float | None = Field(default=None, gt=0, le=1, description="AdamW's peak learning rate")
    kl_coef: float | None = Field(default=None, ge=0, description="weight of KL to the base model")
    kl_target: float | None = Field(default=None, gt=0, description="KL to the base model that kl_coef seeks")
    entropy_coef: float | None = Field(default=None, ge=0, description="weight of the entropy bonus")
    entropy_target: float | None = Field(default=None, gt=0, description="entropy that the bonus seeks")
    clip_low: float | None = Field(
        default=None, gt=0, lt=1, description="ratio is clipped below 1 - clip_low"
    )
    clip_high: float | None = Field(default=None, gt=0, description="ratio is clipped above 1 + clip_high")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="of calls whose chat model names no temperature of its own"
    )
    temperature_final: float | None = Field(
        default=None, ge=0, le=2, description="where temperature goes, in a straight line over the versions"
    )
    temperature_since: int | None = Field(
        default=None, ge=0, description="the version up to which it is temperature (none: 0)"
    )
    temperature_until: int | None = Field(
        default=None, ge=1, description="the version from which on it is temperature_final"
    )
    reward_weights: dict[str, FiniteFloat] | None = Field(
        default=None,
        description="by component of a weighted sum of rewards, in place of those that it was scored with",
    )

    @field_validator(REWARD_WEIGHTS, mode="before")
    @classmethod
    def _turned_only(cls, given: Any) -> Any:
        """Without the components that stand as they were scored."""
        if not isinstance(given, Mapping):
            return given
        weights = cast("Mapping[Any, Any]", given)
        return {name: weight for name, weight in weights.items() if weight is not None} or None

    def temperature_at(self, version: int) -> float | None:
        """The temperature for calls that name none of their own; None: the server's default.

        Where ``temperature_final`` is turned, a straight line from ``temperature`` at version
        ``temperature_since`` to it at version ``temperature_until``. It depends on the version alone, so a
        resumed run goes on with it.

        Args:
            version: number of the policy version that is called.
        """
        start, end, until = self.temperature, self.temperature_final, self.temperature_until
        if start is None or end is None or until is None:
            return start
        since = self.temperature_since or 0
        share = min(max((version - since) / (until - since), 0.0), 1.0)
        return start + share * (end - start)

    def _require_whole_schedule(self) -> None:
        ends = {"temperature_final": self.temperature_final, "temperature_until": self.temperature_until}
        named = {**ends, "temperature_since": self.temperature_since}
        if all(value is None for value in named.values()):
            return
        needed = {"temperature": self.temperature, **ends}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ConfigError(
                f"a schedule of the temperature needs {', '.join(needed)}; {', '.join(missing)} not given"
            )
        since, until = self.temperature_since or 0, self.temperature_until or 0
        if since >= until:
            raise ConfigError(f"temperature_since={since} must be below temperature_until={until}")

    def values(self) -> dict[str, float]:
        """What was turned, by name; weights of rewards as ``reward_weights/<component>``."""
        turned = self.model_dump(exclude_none=True)
        weights = turned.pop(REWARD_WEIGHTS, {})
        return {**turned, **{weight_knob(name): weight for name, weight in weights.items()}}

    def applied(self, config: TrainConfig) -> TrainConfig:
        """A configuration with the knobs' values.

        Raises:
            ConfigError: the values contradict each other or the configuration.
        """
        self._require_whole_schedule()
        names = self.model_fields_set & set(TrainConfig.model_fields)
        turned = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return config.replace(**turned) if turned else config


def weight_knob(component: str) -> str:
    """The name of the knob that is one component's weight."""
    return f"{REWARD_WEIGHTS}/{component}"


def unturned(name: str) -> str:
    """What a knob stands at that nobody has turned, for a person."""
    return "as scored" if name.startswith(f"{REWARD_WEIGHTS}/") else "as configured"


@dataclass(frozen=True, slots=True)
class Turned:
    """A knob that was turned, or a file that could not be used.

    Attributes:
        kind: ``knob_turned`` or ``knobs_refused``.
        message: what changed, for a person.
        name: of the knob, ``reward_weights/<component>`` for one weight; empty for a refusal.
        before: its value; None: `unturned`.
        after: its value; None: `unturned`.
    """

    kind: str
    message: str
    name: str = ""
    before: float | None = None
    after: float | None = None


class KnobBoard:
    """The knobs of one model.

    Args:
        directory: where their file is.
        config: what they start from.
    """

    def __init__(self, directory: Path, config: TrainConfig) -> None:
        self.path = directory / FILE
        self.knobs = Knobs()
        self._config = config
        self._seen: tuple[int, int] | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration as the knobs stand."""
        return self.knobs.applied(self._config)

    def turn(self, **values: Turn) -> list[Turned]:
        """Turn knobs, and write their file. Weights of rewards that are not named stay as they are.

        Raises:
            ConfigError: there is no such knob, or it does not go there. Nothing is changed.
        """
        given: dict[str, Any] = {k: getattr(self.knobs, k) for k in self.knobs.model_fields_set} | values
        weights = values.get(REWARD_WEIGHTS)
        if isinstance(weights, Mapping):
            given[REWARD_WEIGHTS] = {**(self.knobs.reward_weights or {}), **weights}
        knobs = Knobs(**given)
        knobs.applied(self._config)
        self._write(knobs)
        self._seen = self._stamp()
        return self._take(knobs, "by call")

    def read(self) -> list[Turned]:
        """Take the file's values, if it has changed; a file that cannot be used is told of once."""
        stamp = self._stamp()
        if stamp == self._seen:
            return []
        self._seen = stamp
        try:
            knobs = Knobs() if stamp is None else Knobs(**_mapping(self.path))
            knobs.applied(self._config)
        except (OSError, ValueError) as unusable:  # ConfigError and JSON's errors are ValueErrors
            return [Turned("knobs_refused", f"{self.path.name} is ignored: {unusable}")]
        return self._take(knobs, f"in {self.path.name}")

    def _take(self, knobs: Knobs, how: str) -> list[Turned]:
        before, after, self.knobs = self.knobs.values(), knobs.values(), knobs
        return [
            Turned(
                "knob_turned",
                f"{name} turned {how}: {_said(name, before.get(name))} to {_said(name, after.get(name))}",
                name,
                before=before.get(name),
                after=after.get(name),
            )
            for name in dict.fromkeys([*before, *after])
            if before.get(name) != after.get(name)
        ]

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size

    def _write(self, knobs: Knobs) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{FILE}-", dir=self.path.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(knobs.model_dump(exclude_none=True), out, indent=2, sort_keys=True)
        os.replace(scratch, self.path)


def _mapping(path: Path) -> Mapping[str, Any]:
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ConfigError(f"expected a JSON object of knobs, found {type(values).__name__}")
    return values


def _said(name: str, value: float | None) -> str:
    return unturned(name) if value is None else f"{value:g}"
