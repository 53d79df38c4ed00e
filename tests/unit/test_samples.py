"""What a step's sampling settings say of how it is trained."""

import logging
from dataclasses import replace

import pytest
import torch
from helpers.training import group, sample, step, trajectory

from art_core.config import TrainConfig
from art_core.training import batch
from art_core.training.samples import (
    Sample,
    canonical,
    fork_rate,
    is_greedy,
    is_reshaped,
    trained_temperature,
    trajectory_samples,
)


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [({}, 1.0), ({"temperature": None}, 1.0), ({"temperature": 0.7}, 0.7), ({"temperature": 2}, 2.0)],
)
def test_a_step_is_trained_at_the_temperature_that_it_was_sampled_at(sampling, temperature):
    played = trajectory("t", 1.0, step("s", [1], [2], sampling=sampling))
    (found,), _ = trajectory_samples(played, {"s": 1.0})
    assert found.temperature == trained_temperature(sampling) == temperature


def test_a_greedy_step_is_trained_at_temperature_one_where_its_logprobs_are():
    assert trained_temperature({"temperature": 0}) == 1.0
    assert is_greedy({"temperature": 0})
    assert not is_greedy({})
    assert not is_reshaped({"temperature": 0, "top_p": 0.5})


@pytest.mark.parametrize(
    ("raw", "sampling", "known"),
    [
        (True, {"temperature": 0.7}, False),
        (True, {"temperature": 1.5}, False),
        (True, {"temperature": 1}, True),
        (True, {"temperature": 0}, True),  # trained at 1
        (True, {}, True),
        (False, {"temperature": 0.7}, True),
    ],
)
def test_logprobs_of_another_distribution_than_what_was_sampled_are_unknown(raw, sampling, known):
    played = trajectory("t", 1.0, replace(step("s", [1], [2, 3], sampling=sampling), raw_logprobs=raw))
    (found,), _ = trajectory_samples(played, {"s": 1.0})
    assert found.logprobs == ((-1.0, -1.0) if known else (None, None))


def test_imitation_knows_no_temperature():
    played = trajectory("t", 1.0, step("s", [1], [2], sampling={"temperature": 0.7}))
    (found,), _ = trajectory_samples(played)
    assert found.temperature == 1.0


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_ids_that_are_no_tokens_are_refused(wrong):
    with pytest.raises(ValueError, match="sample of step s holds an id that is no token's"):
        canonical([Sample((1,), (wrong,), (None,), 1.0, "s", "r")])


def test_samples_are_in_the_order_of_their_ids():
    """Of numbers, not of their bytes as a machine stores them; what is continued comes first."""
    rows = [(1, 2), (1, 2, 0), (1, 255), (1, 256), (2, 0), (70_000, 1)]
    mixed = [Sample(row[:1], row[1:], (None,) * (len(row) - 1), 1.0, "s", "r") for row in rows[::-1]]
    assert [tuple(sample.row.tolist()) for sample in canonical(mixed)] == rows
    assert fork_rate(mixed) == 4.0  # the first continues into the second


def test_a_sample_needs_a_temperature_above_zero():
    with pytest.raises(ValueError, match="temperature 0"):
        sample([1], [2], temperature=0.0)


@pytest.mark.parametrize(
    ("sampling", "reshaped"),
    [
        ({"temperature": 0.7, "max_tokens": 5}, False),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0.0, "logit_bias": {}}, False),
        ({"top_k": 0, "repetition_penalty": 1.0, "presence_penalty": None}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"min_p": 0.1}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {"5": 1}}, True),
    ],
)
def test_cuts_penalties_and_biases_are_another_distribution(sampling, reshaped):
    assert is_reshaped(sampling) is reshaped


def test_steps_that_were_not_sampled_as_the_policy_would_are_counted_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch, "_said", set[str]())
    played = group(
        trajectory("t0", 0.0, step("a", [1], [2], sampling={"temperature": 0})),
        trajectory("t1", 1.0, step("b", [1], [3], sampling={"top_p": 0.9})),
        trajectory("t2", 1.0, step("c", [1], [4], sampling={"temperature": 0.7})),
    )
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        found = batch.prepare([played], TrainConfig(), torch.Generator())
        assert found.metrics["steps_greedy"] == found.metrics["steps_reshaped"] == 1
    assert sorted(found.minibatches[0].tree.entries.temperature.tolist()) == [0.7, 1.0, 1.0]
    greedy, reshaped = (r.getMessage() for r in caplog.records if r.name.startswith("art_"))
    assert "1 of 3 steps were sampled at temperature 0" in greedy
    assert "1 of 3 steps were sampled with top_p" in reshaped
