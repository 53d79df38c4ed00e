"""Signs: whether a run learns, and if not, why, in a few sentences.

Invariant: every sentence names the figures that it rests on; what the record does not tell is not guessed,
and where nothing stands out nothing is said.

The page of a run, the commands, the report and the notebook say the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from art_core.views.curves import Curve
from art_core.views.numbers import number
from art_core.views.text import shown

if TYPE_CHECKING:
    from art_core.observe.dashboard.standing import Standing
    from art_core.store.records import Event

LATELY = 5
"""Steps that "lately" is about."""

SURE = 3.0
"""Standard errors that a change of the mean reward must exceed to be called one."""

SAMPLED = 200
"""Steps that are read of a long run, evenly spaced, and those of `LATELY`."""

_FEWEST = 6  # steps before a trend is spoken of

READ = (
    "reward_mean",
    "reward_mean_scored",
    "success_rate",
    "groups",
    "groups_without_spread",
    "trajectories",
    "trajectories_failed",
    "kl_old_new",
    "entropy",
    "updates",
    "updates_skipped",
    "calls",
    "steps_truncated",
    "behaviour_ratio_p99",
)
"""Metrics that signs are read from."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that stands out.

    Attributes:
        tone: ``good``, ``warn``, ``bad``, or empty.
        title: it in a few words.
        message: the figures, and what to do.
        about: the metric that tells most of it; empty for what is no metric's.
    """

    tone: str
    title: str
    message: str
    about: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def signs_of(
    curves: Mapping[str, Curve], events: "Sequence[Event]", now: "Standing | None" = None
) -> list[Sign]:
    """What stands out in a run, the most important first.

    Args:
        curves: by name of the metric, at least those of `READ` that there are.
        events: of the run, oldest first; those of stops and of going on are read.
        now: how the run stands, where that is known.
    """
    last = max((curves[name].steps[-1] for name in READ if name in curves), default=0)
    series = {name: _sampled(curves[name], last) for name in READ if name in curves}
    reward = _as_scored(series)
    found = [
        _stopped(events, now),
        trend(reward),
        _gamed(reward, series.get("success_rate")),
        _without_spread(series),
        _failing(series),
        _skipped(series),
        _far(series),
        _sure_of_itself(series.get("entropy")),
        _cut(series),
    ]
    return [sign for sign in found if sign is not None]


def _sampled(curve: Curve, last: int) -> Curve:
    """Of a long run every so many steps, so that it is judged alike whoever asks."""
    stride = max(1, last // SAMPLED)
    kept = [
        (step, value)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if step % stride == 0 or step > last - LATELY
    ]
    return Curve(curve.name, tuple(step for step, _ in kept), tuple(value for _, value in kept))


def _as_scored(series: Mapping[str, Curve]) -> Curve | None:
    """The mean reward on the scale that it was scored on, also where its weights were turned later."""
    reward, scored = series.get("reward_mean"), series.get("reward_mean_scored")
    if reward is None or scored is None:
        return reward
    known = dict(zip(scored.steps, scored.values, strict=True))
    values = tuple(known.get(step, value) for step, value in zip(reward.steps, reward.values, strict=True))
    return replace(reward, name=scored.name, values=values)


def _values(series: Curve | None) -> list[float]:
    return [] if series is None else [value for _, value in series.finite]


def _change(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the first and the last stretch, and the standard error of their difference.

    The noise is told from neighbours, since the trend itself must not count as noise: the variance of first
    differences is twice that of independent noise (von Neumann et al. 1941).
    """
    length = max(3, len(values) // 5)
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / 2)
    return fmean(values[:length]), fmean(values[-length:]), noise * math.sqrt(2 / length)


def trend(reward: Curve | None) -> Sign | None:
    """Whether the mean reward rises, falls or stays."""
    values = _values(reward)
    if reward is None or len(values) < _FEWEST:
        return None
    before, after, error = _change(values)
    as_scored = ", as it was scored" if reward.name != "reward_mean" else ""
    steps = reward.finite[-1][0] - reward.finite[0][0] + 1
    said = f"from {number(before)} to {number(after)} over {number(steps)} steps{as_scored}"
    length = max(3, len(values) // 5)
    peaks = [fmean(values[i : i + length]) for i in range(len(values) - length + 1)]
    if max(peaks) - after > SURE * error > 0 and max(peaks) - after > 0.25 * (max(peaks) - min(peaks)):
        return Sign(
            "bad",
            "The reward has fallen back.",
            f"It was {number(max(peaks))} at its best and is {number(after)} now. Look at KL, entropy and "
            "the events from there on, or go on from the checkpoint of that time (fork).",
            about="reward_mean",
        )
    if after - before > SURE * error:
        return Sign("good", "It learns.", f"The mean reward rose {said}.", about="reward_mean")
    if before - after > SURE * error:
        return Sign("bad", "The reward falls.", f"Its mean went {said}.", about="reward_mean")
    return Sign(
        "warn",
        "The reward does not move.",
        f"Its mean went {said}, which is within its noise (± {number(SURE * error)}). Look at the spread "
        "within groups, at the worst rollouts, and at the learning rate.",
        about="reward_mean",
    )


def _gamed(reward: Curve | None, success: Curve | None) -> Sign | None:
    rewards, successes = _values(reward), _values(success)
    if min(len(rewards), len(successes)) < _FEWEST:
        return None
    before, after, error = _change(rewards)
    good_before, good_after, good_error = _change(successes)
    if after - before > SURE * error and good_before - good_after > SURE * good_error:
        return Sign(
            "bad",
            "The reward is being gamed.",
            f"It rose from {number(before)} to {number(after)} while the success rate fell from "
            f"{number(good_before)} to {number(good_after)}. Audit the reward before going on.",
            about="success_rate",
        )
    return None


def _lately(series: Mapping[str, Curve], part: str, whole: str) -> tuple[float, float] | None:
    """Sums of two counts over the last steps; None where there are no such counts."""
    parts, wholes = _values(series.get(part))[-LATELY:], _values(series.get(whole))[-LATELY:]
    return (sum(parts), sum(wholes)) if parts and sum(wholes) else None


def _share(
    series: Mapping[str, Curve], part: str, whole: str, least: float, title: str, said: str
) -> Sign | None:
    """What a count says that has lately been a large part of another; ``said`` names both as ``{}``."""
    found = _lately(series, part, whole)
    if found is None or found[0] < least * found[1]:
        return None
    return Sign("warn", title, f"In the last steps {said.format(*map(number, found))}.", about=part)


def _without_spread(series: Mapping[str, Curve]) -> Sign | None:
    return _share(
        series,
        "groups_without_spread",
        "groups",
        0.5,
        "Most groups teach nothing.",
        "{} of {} groups had equal rewards: the scenarios are too easy or too hard, or the reward is too "
        "coarse",
    )


def _failing(series: Mapping[str, Curve]) -> Sign | None:
    return _share(
        series,
        "trajectories_failed",
        "trajectories",
        0.1,
        "Many rollouts fail.",
        "{} of {} ended without a reward; their causes are in the list of rollouts",
    )


def _skipped(series: Mapping[str, Curve]) -> Sign | None:
    skipped = sum(_values(series.get("updates_skipped"))[-LATELY:])
    if not skipped:
        return None
    return Sign(
        "warn",
        "Updates were refused.",
        f"{number(skipped)} in the last steps; the events say why.",
        about="updates_skipped",
    )


def _far(series: Mapping[str, Curve]) -> Sign | None:
    kl, ratio = _values(series.get("kl_old_new")), _values(series.get("behaviour_ratio_p99"))
    if kl and kl[-1] > 0.1:
        return Sign(
            "warn",
            "The samples are from another policy.",
            f"KL from the policy that sampled is {number(kl[-1])} nats: they are stale, or server and "
            "trainer compute differently.",
            about="kl_old_new",
        )
    if ratio and ratio[-1] > 3:
        return Sign(
            "warn",
            "Some tokens count for much.",
            f"One in a hundred has an importance ratio above {number(ratio[-1])}.",
            about="behaviour_ratio_p99",
        )
    return None


def _sure_of_itself(entropy: Curve | None) -> Sign | None:
    values = _values(entropy)
    if len(values) < _FEWEST or values[0] <= 0 or values[-1] > 0.1 * values[0]:
        return None
    return Sign(
        "warn",
        "The policy has stopped exploring.",
        f"Its entropy fell from {number(values[0])} to {number(values[-1])} nats. Good if the task is "
        "solved; otherwise raise entropy_coef or the temperature, or lower the learning rate.",
        about="entropy",
    )


def _cut(series: Mapping[str, Curve]) -> Sign | None:
    return _share(
        series, "steps_truncated", "calls", 0.1, "Answers are cut off.", "max_tokens cut {} of {} answers"
    )


def _stopped(events: "Sequence[Event]", now: "Standing | None") -> Sign | None:
    acts = [event for event in events if event.kind in ("training_stopped", "training_resumed")]
    if acts and acts[-1].kind == "training_stopped":
        return Sign("bad", "Training was stopped.", shown(acts[-1].message))
    if now is not None and now.word == "silent":
        return Sign(
            "bad" if now.gone else "warn",
            "Nothing more comes." if now.gone else "It is silent.",
            "The run never ended, and "
            + ("its process is gone" if now.gone else "nothing was heard of it since")
            + ". If nobody runs it any more, register the model again: it goes on from its last checkpoint.",
        )
    return None
