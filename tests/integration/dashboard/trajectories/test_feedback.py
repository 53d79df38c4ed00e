"""What people say of rollouts, on the pages of trajectories and of groups."""

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.page_texts import client, page
from helpers.trajectories import a_trajectory

from art_core.store import Store
from art_core.types import TrajectoryGroup


def token_of(web: TestClient, address: str) -> dict[str, str]:
    found = re.search(r'data-token="([^"]+)"', web.get(address).text)
    assert found is not None
    return {"X-ART-Control": found[1]}


def test_thumbs_scores_and_choices_of_people_are_kept_beside_the_reward(empty: Store) -> None:
    members = a_trajectory("one"), a_trajectory("two")
    group = empty.save_group(TrajectoryGroup(members[0].scenario, members))
    web = client(empty, control=True)
    token = token_of(web, "/trajectories/one")
    assert token_of(web, f"/groups/{group}") == token
    given = {"trajectory_id": "one", "author": "ann"}
    for body in (
        {**given, "kind": "thumb", "value": -1},
        {**given, "kind": "score", "value": 0.25, "comment": "too <short>"},
        {**given, "kind": "choice", "value": 0, "over": "two"},
        {**given, "kind": "choice", "value": 0.5, "over": "two"},
    ):
        answer = web.post("/feedback", json=body, headers=token)
        assert answer.status_code == 200, answer.text
        assert "ann" in answer.json()["said"]
    kept = [(f.trajectory_id, f.kind, f.value, f.over) for f in empty.feedback()]
    assert kept == [
        ("one", "thumb", -1.0, None),
        ("one", "score", 0.25, None),
        ("two", "choice", 1.0, "one"),  # the second was better
        ("one", "choice", 0.5, "two"),
    ]
    assert empty.trajectory("one").reward == 0.5
    text = web.get("/trajectories/one").text
    assert "too &lt;short&gt;" in text
    assert "thumb down" in text


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"value": 3}, 422, "value"),
        ({"author": ""}, 422, "author"),
        ({"trajectory_id": "nobody"}, 404, "nobody"),
        ({"kind": "choice"}, 422, "choice"),
        ({"reward": 1.0}, 422, "reward"),
        ({"comment": "x" * 40_000}, 413, "bytes"),
    ],
)
def test_feedback_that_says_nothing_is_refused_by_name_and_keeps_nothing(
    empty: Store, change: dict[str, Any], status: int, said: str
) -> None:
    empty.save_trajectory(a_trajectory("one"))
    web = client(empty, control=True)
    body = {"trajectory_id": "one", "author": "ann", "kind": "thumb", "value": 1} | change
    answer = web.post("/feedback", json=body, headers=token_of(web, "/trajectories/one"))
    assert answer.status_code == status
    assert said in str(answer.json()["errors"])
    assert empty.feedback() == []


def test_feedback_needs_control_and_a_page_of_this_server(empty: Store) -> None:
    empty.save_trajectory(a_trajectory("one"))
    body = {"trajectory_id": "one", "author": "ann", "kind": "thumb", "value": 1}
    assert '<form class="feedback' not in page(empty, "/trajectories/one")
    assert client(empty).post("/feedback", json=body).status_code == 403
    web = client(empty, control=True)
    assert web.post("/feedback", json=body).status_code == 403
    assert web.post("/feedback", json=body, headers={"X-ART-Control": "é".encode()}).status_code == 403
    assert empty.feedback() == []
