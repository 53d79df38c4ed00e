"""Charts: which metrics of a run are drawn, together with what, and in which order.

Invariant: every metric that a run has is in exactly one chart; those that tell whether it learns come first.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from art_core.observe.dashboard.series import Series
from art_core.observe.metrics import METRICS, MetricSpec, spec_of

PHASES = ("rollout", "judge", "train", "publish", "wait")
"""Of a training step; their times add up to ``time/step``."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        title: for people.
        names: metrics that are drawn as lines.
        spread: metric that is drawn as a band around the first line, above and below.
        key: whether it is shown first.
        wide: whether it takes a whole row.
        kind: ``lines``, or ``bars`` that are stacked.
    """

    title: str
    names: tuple[str, ...]
    spread: str | None = None
    key: bool = True
    wide: bool = False
    kind: str = "lines"

    @property
    def needed(self) -> tuple[str, ...]:
        """All the metrics that it reads."""
        return self.names if self.spread is None else (*self.names, self.spread)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A chart, if a run has some of these metrics; names are patterns, as of files."""

    title: str
    names: tuple[str, ...]
    spread: str | None = None
    wide: bool = False
    kind: str = "lines"


_FIRST = (
    _Rule("Reward", ("reward_mean",), spread="reward_std", wide=True),
    _Rule("Reward as scored", ("reward_mean_scored",)),
    _Rule("Success rate", ("success_rate",)),
    _Rule("Reward by component", ("reward/component/*",)),
    _Rule("Failed rollouts", ("trajectories_failed", "failures/*")),
    _Rule("Groups without spread", ("groups_without_spread",)),
    _Rule("Spread within groups", ("reward_group_std",)),
    _Rule("KL divergence (nats)", ("kl_old_new", "kl_base")),
    _Rule("Entropy (nats)", ("entropy",)),
    _Rule("Importance ratio", ("behaviour_ratio_p50", "behaviour_ratio_p99")),
    _Rule("Effective sample size", ("effective_sample_size",)),
    _Rule("Clipped tokens", ("clip_fraction",)),
    _Rule("Gradient norm", ("grad_norm",)),
    _Rule("Learning rate", ("learning_rate",)),
    _Rule("Staleness (versions)", ("staleness_mean", "staleness_max")),
    _Rule("Calls by node (per rollout)", ("node/*/calls",)),
    _Rule("Reward by node", ("node/*/reward",)),
    _Rule("Tokens per second", ("tokens_per_second/*",)),
    _Rule("Judge (cost)", ("judge_cost",)),
    _Rule("Where the time goes (s)", tuple(f"time/{p}" for p in PHASES), wide=True, kind="bars"),
)


def charts_of(names: Collection[str]) -> list[Chart]:
    """The charts of a run that has these metrics: the ones to look at first, then all others by group."""
    left = dict.fromkeys(sorted(names))
    made: list[Chart] = []
    for rule in _FIRST:
        found = [n for pattern in rule.names for n in left if fnmatchcase(n, pattern)]
        if found:
            spread = rule.spread if rule.spread in left else None
            made.append(Chart(rule.title, tuple(dict.fromkeys(found)), spread, True, rule.wide, rule.kind))
            for name in made[-1].needed:
                left.pop(name, None)
    return [*made, *(Chart(name, (name,), key=False) for name in sorted(left, key=_place))]


def hints_of(chart: Chart) -> list[MetricSpec]:
    """What the catalogue says about a chart's metrics, each entry once."""
    return list(dict.fromkeys(spec for name in chart.needed if (spec := spec_of(name)) is not None))


def group_of(name: str) -> str:
    """The catalogue's heading for a metric."""
    spec = spec_of(name)
    return "Not in the catalogue" if spec is None else spec.group


def _place(name: str) -> tuple[int, str]:
    """Where a metric stands in the catalogue; those that it lacks come last."""
    spec = spec_of(name)
    return len(METRICS) if spec is None else list(METRICS).index(spec.name), name


def polyline(values: Sequence[float | None], width: float, height: float) -> str:
    """Points of an SVG polyline that fills a box; values that are None are left out."""
    finite = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    span = high - low
    across = width / max(1, len(values) - 1)

    def down(value: float) -> float:
        return height * (1 - (value - low) / span) if span > 0 and math.isfinite(span) else height / 2

    return " ".join(f"{i * across:.1f},{down(v):.1f}" for i, v in finite)


def still(series: Series | None) -> str:
    """A series as an SVG polyline in a box of 100 by 100, for pages whose script has not run."""
    return "" if series is None else polyline(series.thinned(120).values, 100, 100)
