from collections import Counter
from dataclasses import replace

from helpers.training import group, step, trajectory

from art_core.config import ReplayConfig
from art_core.selection import staleness
from art_core.training.replay import ReplayBuffer, fresh, reward_spread
from art_core.types import TrajectoryGroup


def scored(name: str, *rewards: float, version: int = 0) -> TrajectoryGroup:
    members = [
        trajectory(f"{name}-{i}", reward, step(f"{name}-{i}", [5], [6, 2], version=version))
        for i, reward in enumerate(rewards)
    ]
    made = group(*members, scenario=name)
    return TrajectoryGroup(made.scenario, made.trajectories, id=name)


def names(groups: list[TrajectoryGroup]) -> list[str]:
    return [g.id for g in groups]


def test_groups_that_teach_more_and_are_younger_are_drawn_more_often():
    drawn: Counter[str] = Counter()
    for seed in range(400):
        buffer = ReplayBuffer(ReplayConfig(groups=1, half_life=1.0), seed=seed)
        buffer.add([scored("wide", 0, 1), scored("narrow", 0.4, 0.6)], version=3)
        buffer.add([scored("old", 0, 1)], version=0)
        drawn.update(names(buffer.draw(version=3)))
    # Priorities: 0.5, 0.1 and 0.5 / 8.
    assert drawn["wide"] > 0.65 * 400
    assert 0.05 * 400 < drawn["narrow"] < 0.25 * 400
    assert drawn["old"] < drawn["narrow"]


def test_a_draw_depends_on_seed_and_version_and_repeats_nothing():
    buffer = ReplayBuffer(ReplayConfig(groups=3), seed=1)
    buffer.add([scored(str(i), 0, 1) for i in range(8)], version=1)
    first = names(buffer.draw(version=2))
    assert len(set(first)) == 3
    assert names(buffer.draw(version=2)) == first
    assert any(names(buffer.draw(version=v)) != first for v in (3, 4, 5))


def test_groups_without_spread_or_twice_or_too_old_are_not_kept():
    buffer = ReplayBuffer(ReplayConfig(max_age=2))
    buffer.add([scored("flat", 0.5, 0.5), scored("good", 0, 1)], version=1)
    buffer.add([scored("good", 0, 1)], version=2)
    assert len(buffer) == 1
    assert names(buffer.draw(version=3)) == ["good"]
    assert buffer.draw(version=4) == []
    assert len(buffer) == 0


def test_the_least_useful_groups_make_room():
    buffer = ReplayBuffer(ReplayConfig(groups=9, capacity=2))
    buffer.add([scored("narrow", 0.4, 0.6), scored("wide", 0, 1), scored("middle", 0.2, 0.8)], version=1)
    assert sorted(names(buffer.draw(version=1))) == ["middle", "wide"]


def test_a_buffer_goes_on_from_its_state():
    config = ReplayConfig(groups=2)
    groups = {str(i): scored(str(i), 0, 1) for i in range(5)}
    buffer = ReplayBuffer(config, seed=4)
    buffer.add(list(groups.values()), version=1)
    other = ReplayBuffer(config, seed=4)
    other.restore(buffer.state(), groups.__getitem__)
    assert names(other.draw(version=2)) == names(buffer.draw(version=2))
    assert other.state() == buffer.state()


def test_rollouts_that_are_too_old_leave_their_group_and_are_counted():
    mixed = scored("mixed", 0, 1)
    old = trajectory("older", 1.0, step("older", [5], [6, 2], version=1))
    young = [trajectory(f"y{i}", float(i), step(f"y{i}", [5], [6, 2], version=4)) for i in range(2)]
    groups = [mixed.with_trajectories([old, *young]), scored("gone", 0, 1, version=1)]
    kept, left_out = fresh(groups, 5, max_staleness=2)
    assert [[t.id for t in g] for g in kept] == [["y0", "y1"]]
    assert sum(left_out.values()) == 3
    assert "max_staleness=2" in next(iter(left_out))
    assert fresh(groups, 5, None) == (groups, Counter())
    assert staleness(old, 5) == 4


def test_spread_is_the_standard_deviation_of_what_was_scored():
    assert reward_spread(scored("a", 0, 1)) == 0.5
    assert reward_spread(scored("a", 1)) == 0.0


def weighed(name: str, *measured: tuple[float, float]) -> TrajectoryGroup:
    """A group whose rewards are quality - 0.1 * length."""
    made = scored(name, *(quality - 0.1 * length for quality, length in measured))
    members = [
        replace(
            member,
            components={"quality": quality, "length": length},
            metrics={"weight/quality": 1.0, "weight/length": -0.1},
        )
        for member, (quality, length) in zip(made, measured, strict=True)
    ]
    return made.with_trajectories(members)


def test_what_a_kept_group_teaches_is_told_by_the_weights_in_force():
    buffer = ReplayBuffer(ReplayConfig(groups=2))
    buffer.add([weighed("by length", (1, 0), (1, 5)), weighed("by quality", (0, 2), (1, 2))], version=1)
    assert sorted(names(buffer.draw(version=1))) == ["by length", "by quality"]
    buffer.reweigh({"length": 0.0})
    assert names(buffer.draw(version=1)) == ["by quality"]
    buffer.add([weighed("by length too", (1, 0), (1, 3))], version=1)
    buffer.reweigh({})
    assert sorted(names(buffer.draw(version=1))) == ["by length", "by quality"]
    assert all(t.metrics["weight/length"] == -0.1 for g in buffer.draw(version=1) for t in g)
