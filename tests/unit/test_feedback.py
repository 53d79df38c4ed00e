"""What people say, from the store to labels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.trajectories import a_trajectory

from art_core.errors import RewardError, UnknownTrajectoryError
from art_core.rewards.feedback import prefer, rate, thumb
from art_core.rewards.labels import Labels, Preference, labels_of
from art_core.rewards.preferences import preference_rewards
from art_core.store import Store
from art_core.types import Scenario, TrajectoryGroup


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        members = tuple(a_trajectory(name, 1, reward=0.25) for name in "abc")
        store.save_group(TrajectoryGroup(members[0].scenario, members, "g"))
        store.save_trajectory(a_trajectory("other", 1, scenario=Scenario("elsewhere")))
        yield store


def test_what_people_said_is_kept_with_author_and_time_and_changes_no_reward(store: Store):
    thumb(store, "a", up=False, author="ann", comment="wrong town")
    rate(store, "b", 0.75, author="bob")
    prefer(store, "b", over="a", author="ann")
    thumb_, score, choice = store.feedback()
    assert (thumb_.kind, thumb_.value, thumb_.author, thumb_.comment) == ("thumb", -1.0, "ann", "wrong town")
    assert (score.kind, score.value) == ("score", 0.75)
    assert (choice.kind, choice.value, choice.over) == ("choice", 1.0, "a")
    assert thumb_.created_at <= score.created_at <= choice.created_at
    assert [store.trajectory(name).reward for name in "ab"] == [0.25, 0.25]


def test_labels_are_the_latest_word_of_each_person_averaged_over_people(store: Store):
    thumb(store, "a", up=True, author="ann")
    thumb(store, "a", up=False, author="ann")
    rate(store, "a", 0.5, author="bob")
    thumb(store, "c", up=True, author="bob")
    prefer(store, "a", over="b", author="ann")
    prefer(store, "b", over="a", author="ann")
    prefer(store, "a", over="b", author="bob", tie=True)
    labels = labels_of(store.feedback())
    assert labels.scores == {"a": 0.25, "c": 1.0}
    assert labels.preferences == (Preference("b", "a"), Preference("a", "b", tie=True))
    assert labels_of([]) == Labels()


def test_a_choice_between_scenarios_is_refused_and_nothing_is_kept(store: Store):
    with pytest.raises(RewardError, match=r"'board-1' and other of 'elsewhere'.*one scenario"):
        prefer(store, "a", over="other", author="ann")
    with pytest.raises(UnknownTrajectoryError):
        prefer(store, "a", over="nobody", author="ann")
    with pytest.raises(RewardError, match="from 0 to 1"):
        rate(store, "a", 7, author="ann")
    with pytest.raises(RewardError, match="author"):
        thumb(store, "a", up=True, author=" ")
    with pytest.raises(RewardError, match="over another trajectory"):
        prefer(store, "a", over="a", author="ann")
    with pytest.raises(RewardError, match="up is True or False, got 'down'"):
        thumb(store, "a", up="down", author="ann")  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="tie is True or False, got 'no'"):
        prefer(store, "a", over="b", tie="no", author="ann")  # type: ignore[arg-type]
    assert not store.feedback()


def test_choices_become_rewards_in_the_history_of_a_group(store: Store):
    prefer(store, "a", over="b", author="ann")
    prefer(store, "b", over="c", author="bob")
    group = store.group("g")
    found = preference_rewards(group, labels_of(store.feedback()).preferences)
    saved = found.save(store, group)
    first, second, third = (t.reward or 0.0 for t in store.group("g"))
    assert 1 > first > second > third > 0
    assert [t.reward for t in saved] == [first, second, third]
    before, now = store.scores("a")
    assert (before.reward, now.reward, now.author) == (0.25, first, "preferences")
    assert now.components["preferred"] == first
    assert now.explanation == "2 choices in its group"
