import math

import pytest

from art_core.config import GuardrailConfig
from art_core.errors import TrainingStoppedError
from art_core.training.guardrails import LOWEST, NORMS_NEEDED, Guardrails

CALM = {
    "groups": 4.0,
    "groups_without_spread": 0.0,
    "reward_mean": 0.5,
    "reward_std": 0.4,
    "clip_fraction": 0.0,
}
CLIPPED = CALM | {"clip_fraction": 0.9}


def check(guardrails: Guardrails, grad_norm: float = 1.0, loss: float = 0.1, kl: float = 0.0):
    return guardrails.check(update=7, loss=loss, grad_norm=grad_norm, kl_old_new=kl)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"loss": math.nan}, "its loss is nan"),
        ({"grad_norm": math.inf}, "its gradient norm is inf"),
        ({"kl": 1.5}, "max_kl=1"),
    ],
)
def test_a_poisoned_update_is_refused_and_the_event_says_why(seen: dict[str, float], said: str):
    event = check(Guardrails(GuardrailConfig()), **seen)
    assert event is not None
    assert event.kind == "update_skipped"
    assert "update 7" in event.message
    assert said in event.message


def test_a_gradient_far_beyond_the_usual_is_refused_until_it_is_the_usual():
    guardrails = Guardrails(GuardrailConfig(max_norm_growth=10))
    assert check(guardrails, grad_norm=1e6) is None  # nothing is usual yet
    guardrails = Guardrails(GuardrailConfig(max_norm_growth=10))
    for _ in range(NORMS_NEEDED):
        assert check(guardrails, grad_norm=0.5) is None
    event = check(guardrails, grad_norm=5.1)
    assert event is not None
    assert "max_norm_growth=10" in event.message
    refused = [check(guardrails, grad_norm=5.1) is not None for _ in range(25)]
    assert refused[0]
    assert not refused[-1]


def test_calls_in_trouble_halve_the_rate_down_to_a_floor_and_then_end_the_training():
    guardrails = Guardrails(GuardrailConfig(patience=2))
    kinds: list[str] = []
    rates: list[float] = []
    for _ in range(10):
        events = guardrails.after(CLIPPED)
        kinds += [e.kind for e in events]
        rates.append(guardrails.rate_scale)
    assert kinds == ["learning_rate_lowered"] * 4 + ["training_stopped"]
    assert rates[1::2] == [0.5, 0.25, 0.125, LOWEST, LOWEST]
    with pytest.raises(TrainingStoppedError, match=r"clipped tokens is 0\.9 .*resume_training"):
        guardrails.require_going()
    assert "although the learning rate is down to" in (guardrails.stopped or "")
    guardrails.resume()
    guardrails.require_going()
    assert guardrails.rate_scale == 1.0


def test_trouble_that_does_not_last_changes_nothing_and_calm_raises_the_rate_again():
    guardrails = Guardrails(GuardrailConfig(patience=2, calm=3))
    assert not guardrails.after(CLIPPED)
    assert not guardrails.after(CALM)
    assert not guardrails.after(CLIPPED)
    assert [e.kind for e in guardrails.after(CLIPPED)] == ["learning_rate_lowered"]
    assert [e.kind for _ in range(3) for e in guardrails.after(CALM)] == ["learning_rate_raised"]
    assert guardrails.rate_scale == 1.0


def test_a_reward_that_was_gained_and_is_lost_again_is_trouble_and_noise_is_not():
    guardrails = Guardrails(GuardrailConfig(patience=1))
    for reward in (0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8):
        assert not guardrails.after(CALM | {"reward_mean": reward})
    noisy = [e for r in (0.75, 0.85, 0.7, 0.8) for e in guardrails.after(CALM | {"reward_mean": r})]
    assert not noisy
    lost = [e for _ in range(6) for e in guardrails.after(CALM | {"reward_mean": 0.1})]
    assert lost
    assert "running mean reward" in lost[0].message


def test_entropy_that_explodes_is_trouble():
    guardrails = Guardrails(GuardrailConfig(patience=1))
    assert not guardrails.after(CALM | {"entropy": 0.5})
    assert not guardrails.after(CALM | {"entropy": 0.01})
    assert guardrails.after(CALM | {"entropy": 2.6})


def test_calls_without_any_spread_are_told_of_and_do_not_stop_the_training():
    guardrails = Guardrails(GuardrailConfig(spread_patience=3))
    flat = CALM | {"groups_without_spread": 4.0}
    kinds = [[e.kind for e in guardrails.after(flat)] for _ in range(6)]
    assert kinds == [[], [], ["no_spread"]] * 2
    guardrails.require_going()


def test_each_guardrail_can_be_switched_off():
    off = GuardrailConfig(
        max_kl=None,
        max_norm_growth=None,
        max_clip_fraction=None,
        max_entropy_growth=None,
        max_reward_drop=None,
        spread_patience=None,
        patience=1,
    )
    guardrails = Guardrails(off)
    for norm in [1.0] * 10 + [1e9]:
        assert check(guardrails, grad_norm=norm, kl=50.0) is None
    bad = CLIPPED | {"entropy": 1.0, "groups_without_spread": 4.0}
    assert not [e for r in (0.0, 1.0, 1.0, 0.0, 0.0) for e in guardrails.after(bad | {"reward_mean": r})]


def test_decisions_go_on_from_a_state_as_if_nothing_had_been_between():
    config = GuardrailConfig(patience=2, calm=2, max_norm_growth=3)
    straight, other = Guardrails(config), Guardrails(config)
    calls = [CLIPPED, CALM, CLIPPED, CLIPPED, CALM, CALM, CLIPPED | {"reward_mean": 0.1}, CLIPPED]
    for i, metrics in enumerate(calls):
        check(straight, grad_norm=1.0 + i)
        check(other, grad_norm=1.0 + i)
        resumed = Guardrails(config)
        resumed.load_state_dict(other.state_dict())
        other = resumed
        assert other.after(metrics) == straight.after(metrics)
        assert other.state_dict() == straight.state_dict()


def test_rewards_on_another_scale_are_no_loss_of_what_was_gained():
    def told(forgets: bool) -> list[str]:
        guardrails = Guardrails(GuardrailConfig(patience=2))
        for i in range(8):
            guardrails.after(CALM | {"reward_mean": 0.1 * i, "reward_std": 0.1})
        if forgets:
            guardrails.forget_rewards()
        return [
            e.kind
            for _ in range(4)
            for e in guardrails.after(CALM | {"reward_mean": -5.0, "reward_std": 0.1})
        ]

    assert told(forgets=False)[0] == "learning_rate_lowered"
    assert told(forgets=True) == []
