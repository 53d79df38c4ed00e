"""Scores from overlapping sets on one scale: what the alternating least squares must and must not do."""

import random
import statistics

import pytest

from art_core.rewards import scales
from art_core.rewards.scales import one_scale, overlapping_sets


@pytest.mark.parametrize(("items", "size"), [(3, 2), (7, 3), (9, 8), (16, 8), (17, 8), (31, 5)])
def test_every_item_is_in_two_sets_at_least_where_there_are_several(items: int, size: int) -> None:
    sets = overlapping_sets(items, size, random.Random(0))
    times = [sum(i in chosen for chosen in sets) for i in range(items)]
    assert min(times) >= 2


def test_who_is_with_whom_is_drawn() -> None:
    drawn = {tuple(map(tuple, overlapping_sets(12, 4, random.Random(seed)))) for seed in range(5)}
    assert len(drawn) == 5
    alone = {tuple(overlapping_sets(6, 8, random.Random(seed))[0]) for seed in range(5)}
    assert len(alone) == 5


def test_a_judge_that_contradicts_itself_does_not_turn_a_set_around() -> None:
    """Items that only one set has keep its order, and are told apart, however little the set agrees."""
    agreeing = {i: i / 7 for i in range(8)}
    reversed_ = {**{i: 1 - i / 7 for i in range(8)}, 8: 0.45, 9: 0.55}
    found = one_scale([agreeing, agreeing, agreeing, reversed_])
    assert found[8] < found[9] - 0.01
    assert [found[i] for i in range(8)] == sorted(found[i] for i in range(8))


def test_a_set_in_which_all_are_alike_is_no_division_by_zero() -> None:
    found = one_scale([{0: 0.5, 1: 0.5, 2: 0.5}, {1: 0.2, 2: 0.8, 3: 0.9}])
    assert all(0 <= score <= 1 for score in found.values())


def test_a_judge_that_stretches_and_shifts_without_noise_is_seen_through() -> None:
    true = [i / 23 for i in range(24)]
    sets = overlapping_sets(24, 8, random.Random(2))
    lines = [(0.5, 0.0), (0.7, 0.3), (0.9, 0.05), (0.6, 0.2), (0.8, 0.2), (0.55, 0.4)]
    given = [{i: a * true[i] + b for i in s} for s, (a, b) in zip(sets, lines, strict=True)]
    found = one_scale(given)
    slope, intercept = statistics.linear_regression(true, [found[i] for i in range(24)])
    assert max(abs(found[i] - slope * true[i] - intercept) for i in range(24)) < 0.025


def test_noise_does_not_shrink_the_scale_to_a_point() -> None:
    """Each round fits noisy scores, whose slopes are below 1: without a fixed mean they would go on to 0."""
    rng = random.Random(5)
    true = [i / 31 for i in range(32)]
    sets = overlapping_sets(32, 8, rng)
    given = [{i: min(max(true[i] + rng.gauss(0, 0.15), 0.0), 1.0) for i in s} for s in sets]
    found = [score for _, score in sorted(one_scale(given).items())]
    assert statistics.stdev(found) > 0.8 * statistics.stdev(true)


def test_how_far_a_set_is_believed_does_not_depend_on_its_size() -> None:
    points = [(0.1, 0.3), (0.5, 0.4), (0.9, 0.8)]
    once, twice = scales._line(points), scales._line(points * 2)  # type: ignore[attr-defined]
    assert once == pytest.approx(twice)
