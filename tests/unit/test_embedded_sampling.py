import math
from collections import Counter

import pytest
import torch

from art_core.errors import EngineError
from art_core.inference.embedded.sampling import Draw, SamplingParams, sample


def params(**changes: float) -> SamplingParams:
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


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    raw = torch.log_softmax(logits, dim=-1)[0]
    for temperature in (0.0, 0.5, 1.0, 2.0):
        (sampled,) = sample(logits, [Draw(0, params(temperature=temperature), 0.7)])
        assert sampled.logprob == pytest.approx(raw[sampled.token].item(), abs=1e-5)


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
    assert [s.token for s in together] == [s.token for s in alone]


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
