import pytest

from art_core.backends import reward_watch
from art_core.backends.reward_watch import GROUPS, RewardWatch, must_stop
from art_core.config import GuardrailConfig
from benchmarks.audit_rewards import FAULTS, SOUND

EVERY_TWO = GuardrailConfig(audit_every=2)


def test_only_every_so_many_calls_are_audited_over_the_groups_since_the_last_audit():
    watch = RewardWatch()
    groups = FAULTS["constant"][0][1](1, 6, 4).groups
    said = [watch.after(groups, EVERY_TWO) for _ in range(5)]
    assert [event is not None for event in said] == [False, True, False, True, False]
    assert said[1] is not None
    assert said[1].kind == "reward_audit"
    assert said[1].data["groups"] == 12


def test_many_groups_are_looked_at_up_to_the_newest():
    watch = RewardWatch()
    event = watch.after(FAULTS["constant"][0][1](1, 90, 2).groups, GuardrailConfig(audit_every=1))
    assert event is not None
    assert event.data["groups"] == GROUPS


def test_sound_rewards_and_no_audits_make_no_event():
    groups = SOUND["mixed"](1, 24, 8).groups
    assert RewardWatch().after(groups, GuardrailConfig(audit_every=1)) is None
    bad = FAULTS["constant"][0][1](1, 6, 4).groups
    assert RewardWatch().after(bad, GuardrailConfig(audit_every=None)) is None


def test_training_is_stopped_by_critical_findings_alone_and_only_when_asked():
    critical = RewardWatch().after(FAULTS["constant"][0][1](1, 6, 4).groups, GuardrailConfig(audit_every=1))
    mild = RewardWatch().after(FAULTS["saturated"][0][1](1, 24, 8).groups, GuardrailConfig(audit_every=1))
    assert critical is not None
    assert mild is not None
    stops = GuardrailConfig(audit_stops=True)
    assert "constant" in (must_stop(critical, stops) or "")
    assert must_stop(critical, GuardrailConfig()) is None
    assert must_stop(mild, stops) is None
    assert must_stop(None, stops) is None


def test_an_audit_that_fails_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    def broken(groups: object) -> None:
        raise ZeroDivisionError("no groups")

    monkeypatch.setattr("art_core.rewards.audit.audit", broken)
    event = RewardWatch().after(SOUND["mixed"](1, 4, 4).groups, GuardrailConfig(audit_every=1))
    assert event is not None
    assert event.message == "the rewards could not be audited: ZeroDivisionError: no groups"
    assert must_stop(event, GuardrailConfig(audit_stops=True)) is None
    assert event.kind == reward_watch.EVENT
