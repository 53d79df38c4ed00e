"""When a version that came back from sleep counts as changed: noise does not, a loss does."""

import math
import random

import pytest

from art_core.inference.vllm_canary import (
    NOISE_FACTOR,
    READINGS,
    TOLERANCE,
    TRIES,
    Check,
    Reading,
    Reference,
    best,
    median,
)
from art_core.types import PolicyVersion

BASE, V1 = PolicyVersion("agent", 0), PolicyVersion("agent", 1)
SILENT = Reading((-2.0,) * 40, (-1.0,) * 8)
"""What the base model says."""


def shifted(by: float, reading: Reading = SILENT) -> Reading:
    return Reading(tuple(v + by for v in reading.prefill), tuple(v + by for v in reading.decode))


def noisy(reading: Reading, noise: float, seed: int) -> Reading:
    source = random.Random(seed)
    return Reading(
        tuple(v + source.uniform(-noise, noise) for v in reading.prefill),
        tuple(v + source.uniform(-noise, noise) for v in reading.decode),
    )


def noisy_reference(truth: Reading, noise: float, seed: int) -> Reference:
    readings = [noisy(truth, noise, 1000 * seed + n) for n in range(READINGS)]
    return Reference.of(V1, readings, SILENT)


@pytest.mark.parametrize("seed", range(50))
def test_a_noisy_adapter_is_not_changed_by_its_noise(seed: int):
    truth = shifted(-1.1)
    before = noisy_reference(truth, 0.2, seed)
    check = before.check(noisy(truth, 0.2, 1000 * seed + 500))
    assert before.noise > 3 * TOLERANCE
    assert TOLERANCE < check.difference < check.limit == NOISE_FACTOR * before.noise
    assert not check.lost
    assert not check.changed


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("seed", range(20))
def test_a_lost_adapter_answers_like_the_base_model_and_is_found_however_noisy(noise: float, seed: int):
    before = noisy_reference(shifted(-1.5), noise, seed)
    tries = [before.check(noisy(SILENT, noise, 1000 * seed + 500 + n)) for n in range(TRIES)]
    assert all(check.lost for check in tries)
    assert best(tries).changed


def test_being_nearer_to_the_base_model_tells_a_loss_that_noise_would_excuse():
    before = Reference(V1, shifted(-1.0), noise=0.45, base=SILENT)
    check = before.check(SILENT)
    assert check.difference == 1.0 < check.limit
    assert check.changed
    assert "like the base model now" in str(check)


def test_an_adapter_that_came_back_as_another_is_found_where_its_noise_does_not_reach():
    before = Reference.of(V1, [shifted(-1.0), shifted(-1.1), shifted(-1.0)], SILENT)
    assert before.noise == pytest.approx(0.1)
    check = before.check(shifted(-1.4))
    assert check.changed
    assert not check.lost


def test_noise_excuses_no_base_model():
    before = Reference.of(BASE, [SILENT, shifted(0.3), SILENT])
    assert before.noise == pytest.approx(0.3)
    assert before.limit == TOLERANCE
    assert not before.check(SILENT).changed
    assert before.check(shifted(2 * TOLERANCE)).changed


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("seed", range(20))
def test_an_adapter_that_says_what_the_base_model_says_has_nothing_to_lose(noise: float, seed: int):
    before = noisy_reference(SILENT, noise, seed)
    for reading in (SILENT, noisy(SILENT, noise, 1000 * seed + 500)):
        assert not before.check(reading).changed


def test_one_that_differs_by_less_than_the_tolerance_may_be_nearer_to_the_base_model():
    before = Reference.of(V1, [shifted(-0.9 * TOLERANCE)] * READINGS, SILENT)
    assert not before.check(SILENT).changed


def test_the_reference_is_the_median_of_each_token():
    one = Reading((-1.0, -5.0), (-3.0,))
    other = Reading((-2.0, -4.0), (-9.0,))
    third = Reading((-2.5, -0.5), (-3.5,))
    assert median([one, other, third]) == Reading((-2.0, -4.0), (-3.5,))
    assert Reference.of(V1, [one, other, third], SILENT).noise == 6.0


def test_one_try_that_is_as_before_is_enough_and_otherwise_the_nearest_is_told():
    right, wrong, lost = (
        Check(V1, 0.3, 0.1, 0.3),
        Check(V1, 0.4, 0.1, 0.3),
        Check(V1, 0.2, 0.1, 0.3, lost=True),
    )
    assert best([wrong, right]) is right
    assert best([lost, wrong, right]) is right
    assert best([wrong, lost]) is lost
    assert best([Check(V1, math.inf, 0.1, 0.3), wrong]) is wrong


def test_readings_of_other_lengths_or_without_numbers_are_never_the_same():
    some = Reading((-1.0, -2.0), (-3.0,))
    assert some.difference(some) == 0
    assert some.difference(Reading((-1.0,), (-3.0,))) == math.inf
    assert some.difference(Reading((-1.0, -2.0), (math.nan,))) == math.inf
    assert some.difference(Reading((math.nan, -2.0), (-3.0,))) == math.inf
    assert some.difference(Reading((-1.0, -2.5), (-3.0,))) == 0.25
    assert some.difference(Reading((-1.0, -2.0), (-4.0,))) == 1.0


@pytest.mark.parametrize(
    "broken", [Reading((math.nan,) * 40, (-1.0,) * 8), Reading((-2.0,) * 39, (-1.0,) * 8)]
)
def test_a_canary_that_was_broken_before_excuses_nothing(broken: Reading):
    before = Reference.of(V1, [shifted(-1.0), broken, shifted(-1.0)], SILENT)
    assert before.noise == math.inf
    assert before.limit == TOLERANCE
    assert before.check(shifted(-1.5)).changed


def test_a_check_tells_difference_and_noise():
    check = Reference(V1, shifted(-1.0), noise=0.136, base=SILENT).check(shifted(-2.11))
    assert str(check) == "agent@1 (by 1.11 nats per token, noise 0.136)"
