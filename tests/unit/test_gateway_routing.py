"""The choice between replicas: sticky, bounded, and only those that can answer."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.gateway_routing import (
    ALWAYS_TAKEN,
    SPREAD,
    Replica,
    ReplicaState,
    Router,
    routing_key,
)
from art_core.types import PolicyVersion

V1, V2 = PolicyVersion("agent", 1), PolicyVersion("agent", 2)


def router(count: int) -> Router:
    return Router([Replica(str(number), f"http://127.0.0.1:{number}/v1") for number in range(count)])


def places(routed: Router, keys: int = 300) -> list[str]:
    chosen = [routed.choose(None, lambda key=key: f"rollout-{key}") for key in range(keys)]
    return [replica.name for replica in chosen if replica is not None]


def test_a_key_always_goes_to_the_same_replica_and_keys_are_spread_evenly() -> None:
    assert places(router(3)) == places(router(3))
    counts = Counter(places(router(3), 3000))
    assert min(counts.values()) > 900


def test_a_replica_that_goes_down_takes_only_its_own_keys_elsewhere_and_gets_them_back() -> None:
    routed = router(4)
    before = places(routed)
    routed.suspect(routed.replicas[2], "refused")
    without = places(routed)
    assert "2" not in without
    assert all(now == then for now, then in zip(without, before, strict=True) if then != "2")
    routed.set_state(routed.replicas[2], ReplicaState.UP)
    assert places(routed) == before


@given(count=st.integers(2, 6), calls=st.integers(1, 200))
def test_no_replica_gets_more_than_its_bounded_share_even_of_one_key(count: int, calls: int) -> None:
    routed = router(count)
    for _ in range(calls):
        replica = routed.choose(None, lambda: "the same")
        assert replica is not None
        routed.began(replica)
    assert sum(r.busy for r in routed.replicas) == calls
    assert max(r.busy for r in routed.replicas) <= max(ALWAYS_TAKEN, SPREAD * calls / count + 1)
    for replica in routed.replicas:
        for _ in range(replica.busy):
            routed.ended(replica)
    assert all(r.busy == 0 for r in routed.replicas)


def test_only_replicas_that_serve_the_version_are_chosen() -> None:
    routed = router(3)
    for replica, versions in zip(routed.replicas, ([V1], [V1, V2], [V2]), strict=True):
        replica.versions = frozenset(versions)
    for version, able in ((V1, {"0", "1"}), (V2, {"1", "2"}), (None, {"0", "1", "2"})):
        chosen = {routed.choose(version, lambda k=key: f"{k}") for key in range(100)}
        assert {replica.name for replica in chosen if replica} == able
    # Nobody knows this one: whoever is asked says so.
    assert routed.choose(PolicyVersion("agent", 9), lambda: "k") is not None


def test_a_version_whose_only_replica_is_down_is_waited_for() -> None:
    routed = router(2)
    routed.replicas[0].versions, routed.replicas[1].versions = frozenset([V1]), frozenset([V2])
    routed.suspect(routed.replicas[0], "refused")
    assert routed.choose(V1, lambda: "k") is None


def test_draining_replicas_get_nothing_not_even_as_a_last_resort() -> None:
    routed = router(2)
    routed.set_state(routed.replicas[0], ReplicaState.DRAINING)
    routed.suspect(routed.replicas[1], "refused")
    assert routed.choose(None, lambda: "k") is None
    last = routed.last_resort(())
    assert last is routed.replicas[1]
    assert routed.last_resort([last]) is None


def test_a_suspicion_is_told_once_and_with_its_reason() -> None:
    routed = router(2)
    told: list[tuple[str, str]] = []
    routed.on_suspect = lambda replica: told.append((replica.name, replica.detail))
    routed.suspect(routed.replicas[0], "refused")
    routed.suspect(routed.replicas[0], "refused again")
    assert told == [("0", "refused")]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            [("system", "s"), ("user", "q")],
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "b")],
            True,
        ),
        ([("system", "s"), ("user", "q")], [("system", "s"), ("user", "other")], False),
        ([("system", "s"), ("user", "q")], [("system", "t"), ("user", "q")], False),
    ],
)
def test_a_conversation_is_known_by_how_it_begins(
    one: list[tuple[str, str]], other: list[tuple[str, str]], same: bool
) -> None:
    keys = [routing_key({"messages": [{"role": r, "content": c} for r, c in said]}) for said in (one, other)]
    assert (keys[0] == keys[1]) is same


def test_what_openai_calls_a_cache_key_wins() -> None:
    said = [{"role": "user", "content": "q"}]
    assert routing_key({"messages": said, "prompt_cache_key": "k"}) == "k"
    assert routing_key({"prompt": "once upon"}) == "once upon"
    assert routing_key({}) == routing_key({"prompt": None})
