import math
from collections import Counter
from typing import Any

import pytest
import torch

from art_core.errors import EngineError
from art_core.inference.embedded.sampling import Draw, SamplingParams, sample
from art_core.inference.embedded.shaping import Shaping, shape


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def uniforms(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


def test_tokens_come_with_their_probabilities() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    draws = [Draw(0, params(), u) for u in uniforms(800)]
    counts = Counter(s.token for s in sample(probs.log()[None], draws))
    assert counts == {0: 400, 1: 200, 2: 100, 3: 100}


def test_a_large_vocabulary_is_sampled_evenly_across_blocks() -> None:
    draws = [Draw(0, params(), u) for u in uniforms(1000)]
    tokens = [s.token for s in sample(torch.zeros(1, 1000), draws)]
    assert tokens == list(range(1000))


def test_logprobs_are_those_at_the_temperature_that_was_sampled_at_and_at_one_when_greedy() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 0.5, 1.0, 2.0):
        own = torch.log_softmax(logits / (temperature or 1.0), dim=-1)[0]
        (sampled,) = sample(logits, [Draw(0, params(temperature=temperature, top_logprobs=3), 0.7)])
        assert sampled.logprob == pytest.approx(own[sampled.token].item(), abs=1e-5)
        assert [p for _, p in sampled.top] == pytest.approx(own.topk(3).values.tolist(), abs=1e-5)


def test_how_often_a_token_comes_is_what_its_logprob_says() -> None:
    """Temperature, top_p and a bias together, beside draws without any."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    wanted = params(temperature=0.7, top_p=0.9, shaping=Shaping(bias={1: 0.5}), top_logprobs=4)
    draws = [draw for u in uniforms(4000) for draw in (Draw(0, wanted, u), Draw(0, params(), u))]
    found = sample(logits, draws)[::2]
    counts = Counter(s.token for s in found)
    assert len(counts) == 3
    for s in found:
        assert math.exp(s.logprob) == pytest.approx(counts[s.token] / 4000, abs=1e-3)
        assert [t for t, _ in s.top] == [t for t, _ in counts.most_common()]


def test_temperature_sharpens_what_is_sampled() -> None:
    probs = torch.tensor([0.8, 0.2])
    draws = [Draw(0, params(temperature=0.5), u) for u in uniforms(1700)]
    counts = Counter(s.token for s in sample(probs.log()[None], draws))
    assert counts[0] == pytest.approx(1700 * 16 / 17, abs=1)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert {s.token for s in sample(logits, [Draw(0, params(temperature=0), u) for u in uniforms(20)])} == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    tokens = {s.token for s in sample(logits, [Draw(0, params(top_p=0.6), u) for u in uniforms(200)])}
    assert tokens == {0, 1}


def test_min_p_leaves_out_what_is_too_unlikely() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    tokens = {s.token for s in sample(logits, [Draw(0, params(min_p=0.6), u) for u in uniforms(200)])}
    assert tokens == {0, 1}


def test_a_bias_changes_what_is_sampled_and_its_logprob() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    wanted = params(shaping=Shaping(bias={1: 100.0, 0: -100.0}))
    draws = [Draw(0, wanted, 0.5), Draw(0, params(temperature=0), 0.5)]
    biased, plain = sample(logits, draws)
    assert (biased.token, plain.token) == (1, 0)
    assert biased.logprob == pytest.approx(0.0)
    assert plain.logprob == pytest.approx(math.log(0.5))


def test_penalties_are_openais_and_count_what_was_sampled() -> None:
    logits = torch.zeros(5)
    shaped = shape(logits, Shaping(presence=0.5, frequency=0.25), prompt=[4], sampled=[1, 1, 2])
    assert shaped.tolist() == [0.0, -1.0, -0.75, 0.0, 0.0]


def test_a_repetition_penalty_counts_the_prompt_too() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0])
    assert shape(logits, Shaping(repetition=2.0), prompt=[0], sampled=[1]).tolist() == [1.0, -4.0, 2.0]
    assert logits.tolist() == [2.0, -2.0, 2.0]


def test_no_end_token_comes_before_the_least_length() -> None:
    wanted = Shaping(min_tokens=2, ends=frozenset({1}))
    assert shape(torch.zeros(2), wanted, [], [0]).tolist() == [0.0, -math.inf]
    assert shape(torch.zeros(2), wanted, [], [0, 0]).tolist() == [0.0, 0.0]


def test_top_k_keeps_that_many() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    tokens = {s.token for s in sample(logits, [Draw(0, params(top_k=3), u) for u in uniforms(200)])}
    assert tokens == {1, 2, 3}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform: float) -> None:
    logits = torch.full((1, 500), -math.inf)
    logits[0, 200] = 0.0
    for chosen in (params(), params(top_p=0.5), params(top_k=5)):
        assert sample(logits, [Draw(0, chosen, uniform)])[0].token == 200


def test_what_a_draw_gives_does_not_depend_on_the_others() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(0, params(), 0.3),
        Draw(1, params(temperature=0.7), 0.9),
        Draw(2, params(top_p=0.8), 0.5),
        Draw(3, params(temperature=0), 0.1),
        Draw(0, params(temperature=1.3, top_k=20), 0.6),
    ]
    together = sample(logits, draws)
    alone = [sample(logits[d.row][None], [Draw(0, d.params, d.uniform)])[0] for d in draws]
    assert together == alone


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
    draws = [Draw(0, SamplingParams(max_tokens=1, top_logprobs=2), 0.0), Draw(0, params(), 0.0)]
    with_top, without = sample(logits, draws)
    assert [token for token, _ in with_top.top] == [2, 1]
    assert with_top.top[0][1] == pytest.approx(math.log(0.7))
    assert without.top == ()


def test_logits_that_are_not_finite_are_an_error_and_not_a_token() -> None:
    with pytest.raises(EngineError, match="not finite"):
        sample(torch.tensor([[0.0, math.nan]]), [Draw(0, params(), 0.5)])


def test_a_seed_gives_each_choice_its_own_numbers_again_and_again() -> None:
    seeded = SamplingParams(max_tokens=1, seed=7)
    first, again, other = seeded.generator(0), seeded.generator(0), seeded.generator(1)
    numbers = [first.random() for _ in range(3)]
    assert numbers == [again.random() for _ in range(3)]
    assert numbers != [other.random() for _ in range(3)]
