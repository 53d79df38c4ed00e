"""What is exported when: again, later, to two projects, many at a bounded rate."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import LangfuseServer
from helpers.langfuse_rollouts import connection, played, scores, with_steps
from helpers.trajectories import a_step, a_trajectory

from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import TrajectoryGroup
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.export import ExportOptions, export_to_langfuse
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.ledger import Ledger


def test_exporting_twice_changes_nothing_and_a_new_reward_replaces_the_old_one(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    """C60: it can be repeated without duplicates."""
    store.save_trajectory(played())
    assert export_to_langfuse(store, client=client).confirmed == 1
    before = dict(server.observations), dict(server.scores)
    asked = len(server.asked)
    again = export_to_langfuse(store, client=client)
    assert (again.confirmed, again.unchanged, again.requests, len(server.asked)) == (0, 1, 0, asked)

    def without_times(observations: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        return {k: {**o, "createdAt": 0, "updatedAt": 0} for k, o in observations.items()}

    forced = export_to_langfuse(store, client=client, again=True)
    assert forced.confirmed == 1
    assert without_times(server.observations) == without_times(before[0])
    assert server.scores == before[1]
    store.score("t-1", 0.9, author="ada")
    sent = len(server.requests("/api/public/otel"))
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert len(server.requests("/api/public/otel")) == sent  # observations are final; the scores go alone
    assert len(server.scores) == len(before[1])
    assert scores(server)["reward"]["value"] == 0.9
    assert without_times(server.observations) == without_times(before[0])


def test_what_is_recorded_after_the_end_is_sent_too(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    rollout = Rollout(sink=store.sink(), rollout_id="t-1")
    rollout.record(a_step("t-1", 0))
    rollout.finish(1.0)
    export_to_langfuse(store, client=client)
    rollout.record(a_step("t-1", 1))  # of a background task that outlived its graph
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert len([o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION"]) == 2


def test_running_rollouts_wait_until_they_end(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    rollout = Rollout(sink=store.sink(), rollout_id="t-run")
    rollout.record(a_step("t-run"))
    assert export_to_langfuse(store, client=client).running == 1
    assert not server.observations
    rollout.finish(1.0)
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert scores(server, "t-run")["reward"]["value"] == 1.0


def test_two_projects_are_kept_apart_in_one_ledger(
    server: LangfuseServer, store: Store, tmp_path: Path
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    with LangfuseServer() as other, Ledger(tmp_path / "both") as ledger:
        for one in (server, other, server):
            with LangfuseClient(connection(one)) as client:
                export_to_langfuse(store, client=client, ledger=ledger)
        assert (len(server.trace_ids), len(other.trace_ids)) == (1, 1)
        assert len(server.requests("/api/public/otel")) == 1


def test_many_traces_go_at_the_rate_that_was_asked_for(
    server: LangfuseServer, store: Store, pytestconfig: pytest.Config
) -> None:
    count = pytestconfig.getoption("traces")
    scenario = a_trajectory("x").scenario
    step = a_step("x", tokens=None)
    for start in range(0, count, 1000):
        members = tuple(
            with_steps(f"t-{n}", replace(step, id=f"s-{n}", rollout_id=f"t-{n}"))
            for n in range(start, min(start + 1000, count))
        )
        store.save_group(TrajectoryGroup(scenario, members, id=f"g-{start}"))
    rate = 10  # requests a second: fewer than could be made meanwhile
    began = time.monotonic()
    with LangfuseClient(connection(server, requests_per_minute=60 * rate)) as client:
        result = export_to_langfuse(store, client=client, options=ExportOptions(batch=count // 40))
    assert (result.confirmed, result.left, len(server.trace_ids)) == (count, 0, count)
    assert result.scores == len(server.scores) == count
    times = sorted(a.at for a in server.asked)
    assert len(times) == result.requests >= 80
    assert times[-1] - began >= (len(times) - 1) / rate
    most = max(sum(1 for t in times if at <= t < at + 1) for at in times)
    assert most <= rate + 2, f"{most} requests within a second"  # one that was late, and the one after it
