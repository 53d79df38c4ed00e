"""RULER with judges that know the truth and err in known ways; `benchmarks/ruler.py` has the whole table."""

import pytest

from benchmarks.ruler import Erring, measure, theory

GROUPS = 100


async def test_a_perfect_judge_ranks_every_pair_right() -> None:
    assert (await measure(Erring(), GROUPS))["accuracy"] == 1.0


@pytest.mark.parametrize("noise", [0.1, 0.4])
@pytest.mark.parametrize("votes", [1, 5])
async def test_a_noisy_judge_is_as_accurate_as_theory_says(noise: float, votes: int) -> None:
    found = await measure(Erring(noise), GROUPS, votes=votes)
    assert abs(found["accuracy"] - theory(noise, votes)) < 4 * found["standard_error"]


async def test_votes_make_up_for_noise() -> None:
    one, five = [await measure(Erring(0.2), GROUPS, votes=votes) for votes in (1, 5)]
    assert five["accuracy"] - one["accuracy"] > 2 * (one["standard_error"] + five["standard_error"])


async def test_as_many_votes_as_runs_remove_a_liking_for_a_place() -> None:
    one, eight = [await measure(Erring(bias=0.5), GROUPS, votes=votes) for votes in (1, 8)]
    assert one["accuracy"] < 0.9
    assert eight["accuracy"] == 1.0


async def test_sets_of_a_judge_that_stretches_keep_nearly_every_pair_in_order() -> None:
    found = await measure(Erring(scale=True), 20, members=16, words=300, token_budget=4400)
    assert found["calls_per_group"] > 1
    assert found["accuracy"] > 0.99
