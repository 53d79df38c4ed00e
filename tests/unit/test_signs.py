"""What is said of a run's figures: on its page, in a terminal, in its report."""

import random

import pytest

from art_core.observe.dashboard.charts import charts_of, polyline
from art_core.observe.dashboard.standing import Standing
from art_core.observe.signs import Sign, signs_of
from art_core.store.records import Event
from art_core.views.curves import Curve
from art_core.views.numbers import duration, number
from art_core.views.text import shown

GOING = Standing("running", "live", 0.0)


def series(**values: list[float]) -> dict[str, Curve]:
    return {name: Curve(name, tuple(range(1, len(some) + 1)), tuple(some)) for name, some in values.items()}


def titles(found: list[Sign]) -> list[str]:
    return [sign.title for sign in found]


def noisy(levels: list[float], seed: int = 0, noise: float = 0.02) -> list[float]:
    chance = random.Random(seed)
    return [level + chance.gauss(0, noise) for level in levels]


def test_a_reward_that_rises_is_called_learning() -> None:
    found = signs_of(series(reward_mean=noisy([0.2 + n * 0.02 for n in range(20)])), [], GOING)
    assert titles(found) == ["It learns."]
    assert found[0].tone == "good"


def test_a_reward_that_only_trembles_is_not_called_learning() -> None:
    """Of a hundred runs of pure noise hardly one may be called anything else."""
    said = [titles(signs_of(series(reward_mean=noisy([0.4] * 20, seed)), [], GOING)) for seed in range(100)]
    assert sum(one == ["The reward does not move."] for one in said) >= 90


def test_a_reward_that_was_better_before_is_said_to_have_fallen_back() -> None:
    levels = [0.2 + 0.05 * n for n in range(10)] + [0.65 - 0.04 * n for n in range(10)]
    assert titles(signs_of(series(reward_mean=noisy(levels)), [], GOING)) == ["The reward has fallen back."]


def test_a_reward_that_rises_while_success_falls_is_called_gamed() -> None:
    found = signs_of(
        series(
            reward_mean=noisy([0.2 + n * 0.02 for n in range(20)]),
            success_rate=noisy([0.6 - n * 0.02 for n in range(20)]),
        ),
        [],
        GOING,
    )
    assert "The reward is being gamed." in titles(found)


@pytest.mark.parametrize(
    ("values", "title"),
    [
        ({"groups": [8.0] * 6, "groups_without_spread": [7.0] * 6}, "Most groups teach nothing."),
        ({"trajectories": [64.0] * 6, "trajectories_failed": [10.0] * 6}, "Many rollouts fail."),
        ({"updates_skipped": [0.0, 1.0]}, "Updates were refused."),
        ({"kl_old_new": [0.001, 0.5]}, "The samples are from another policy."),
        ({"entropy": [1.0, 0.8, 0.5, 0.3, 0.1, 0.05]}, "The policy has stopped exploring."),
        ({"calls": [100.0] * 6, "steps_truncated": [30.0] * 6}, "Answers are cut off."),
    ],
)
def test_what_stands_out_is_said(values: dict[str, list[float]], title: str) -> None:
    assert titles(signs_of(series(**values), [], GOING)) == [title]


def test_where_nothing_stands_out_nothing_is_said() -> None:
    assert signs_of({}, [], GOING) == []
    usual = series(
        reward_mean=[0.1, 0.2],  # too few to speak of
        groups=[8.0] * 6,
        groups_without_spread=[1.0] * 6,
        trajectories=[64.0] * 6,
        trajectories_failed=[1.0] * 6,
        updates_skipped=[0.0] * 6,
        kl_old_new=[0.01] * 6,
        entropy=[1.0] * 6,
    )
    assert signs_of(usual, [], GOING) == []


def test_a_stop_is_said_until_training_goes_on() -> None:
    stopped = Event(run_id="r", kind="training_stopped", message="it ran away", data={}, created_at=1.0)
    resumed = Event(run_id="r", kind="training_resumed", message="", data={}, created_at=2.0)
    assert titles(signs_of({}, [stopped], GOING)) == ["Training was stopped."]
    assert signs_of({}, [stopped, resumed], GOING) == []


def test_every_metric_is_in_exactly_one_chart() -> None:
    names = [
        "reward_mean",
        "reward_std",
        "time/train",
        "time/step",
        "node/a/b/calls",
        "mine",
        "failures/x",
        "loss",
    ]
    drawn = [name for chart in charts_of(names) for name in chart.needed]
    assert sorted(drawn) == sorted(names)
    assert charts_of(names)[0].names == ("reward_mean",)


def test_a_line_of_equal_values_lies_in_the_middle_and_gaps_are_left_out() -> None:
    assert polyline([1.0, 1.0], 100, 100) == "0.0,50.0 100.0,50.0"
    assert polyline([0.0, None, 1.0], 100, 100) == "0.0,100.0 100.0,0.0"
    assert polyline([1.0], 100, 100) == ""


MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"), (0.0, "0"), (0.4821, "0.482"), (12.345, "12.3"), (1234.5, "1,234"),
        (-0.5, f"{MINUS}0.500"), (3.1e-5, "3.10e-05"), (float("nan"), "NaN"), (float("-inf"), f"{MINUS}∞"),
        (-12, f"{MINUS}12"), (0.99996, "1.000"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_keep_their_sign(value: float | None, text: str) -> None:
    assert number(value) == text


def test_durations_are_in_words() -> None:
    assert [duration(s) for s in (0.42, 12, 200, 7500, 273_600)] == [
        "0.4 s",
        "12 s",
        "3 min 20 s",
        "2 h 05 min",
        "3 d 4 h",
    ]


def test_a_text_of_megabytes_is_short_and_harmless() -> None:
    text = shown("\x1b[31m\u202e" + "x" * 5_000_000)
    assert len(text) < 400
    assert not set(text) & {"\x1b", "\u202e"}


def test_rewards_that_are_weighed_anew_are_no_fall_of_the_reward() -> None:
    rising = noisy([0.2 + n * 0.02 for n in range(20)])
    turned = [value if n < 12 else value - 3.0 for n, value in enumerate(rising)]
    assert titles(signs_of(series(reward_mean=turned), [], GOING)) == ["The reward has fallen back."]
    scored = Curve("reward_mean_scored", tuple(range(13, 21)), tuple(rising[12:]))
    found = signs_of({**series(reward_mean=turned), "reward_mean_scored": scored}, [], GOING)
    assert titles(found) == ["It learns."]
    assert found[0].message.endswith("over 20 steps, as it was scored.")


def test_a_run_of_thousands_of_steps_is_judged_by_some_of_them_and_says_how_many_there_were() -> None:
    long = series(reward_mean=noisy([n / 4000 for n in range(4000)]), updates_skipped=[0.0] * 3999 + [1.0])
    found = signs_of(long, [])
    assert titles(found) == ["It learns.", "Updates were refused."]
    assert "over 3,981 steps" in found[0].message  # from the first that was read
    read = [n for n in range(4000) if (n + 1) % 20 == 0 or n >= 3995]
    some = {
        name: Curve(name, tuple(c.steps[n] for n in read), tuple(c.values[n] for n in read))
        for name, c in long.items()
    }
    assert signs_of(some, []) == found  # as a page does, which reads no more than those
