"""Knobs of a run, turned on its page by those who may."""

from pathlib import Path
from typing import Any

import pytest
from helpers.page_documents import page
from helpers.trajectories import a_trajectory
from starlette.testclient import TestClient

from art_core.config import TrainableModelConfig, TrainConfig
from art_core.observe.dashboard.app import create_app
from art_core.store import Store
from art_core.training.knobs import KnobBoard


class Control:
    """A dashboard that may turn the knobs of one run."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.directory = directory
        model = TrainableModelConfig(base_model="any", train=TrainConfig(learning_rate=2e-5))
        self.config = model.train_config
        # As a registration writes it.
        self.run = store.begin_run("agent", {**model.model_dump(mode="json"), "checkpoints": str(directory)})
        self.client = TestClient(create_app(store, control=True))
        document = page(self.client, f"/runs/{self.run}")
        self.token = next(a["data-token"] for _, a in document.elements if "data-token" in a)

    def turn(self, body: str, token: str | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"x-art-control": self.token if token is None else token}
        answer = self.client.post(f"/runs/{self.run}/knobs", content=body, headers=headers)
        return answer.status_code, answer.json()

    @property
    def file(self) -> Path:
        return self.directory / "knobs.json"


@pytest.fixture
def control(empty: Store, tmp_path: Path) -> Control:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return Control(empty, directory)


def test_a_knob_that_is_turned_on_the_page_is_what_the_run_reads(control: Control) -> None:
    run = KnobBoard(control.directory, control.config)  # as the run has it
    assert control.turn('{"learning_rate": 3e-5, "temperature": 0.5}')[0] == 200
    assert [(t.name, t.before, t.after) for t in run.read()] == [
        ("learning_rate", None, 3e-5),
        ("temperature", None, 0.5),
    ]
    assert control.turn('{"temperature": null}') == (200, {"knobs": {"learning_rate": 3e-5}})
    assert run.read()[0].after is None
    assert run.config.learning_rate == 3e-5
    fields = page(control.client, f"/runs/{control.run}").all("input")
    shown = next(a for a in fields if a.get("name") == "learning_rate")
    assert (shown["value"], shown["placeholder"]) == ("3e-05", "2e-05")


def test_weights_of_the_rewards_components_are_knobs_where_they_can_be_turned(
    empty: Store, control: Control
) -> None:
    told = {"reward": 0.9, "components": {"right, or <b>not</b>": 1.0, "steps": 10.0, "steps/late": 1.0}}
    recorded = {"weight/right, or <b>not</b>": 1.0, "weight/steps": -0.01, "moves": 3.0}
    rows = [
        a_trajectory("sum", metrics=recorded, **told),
        a_trajectory("by hand", metrics={"weight/polite": 1.0}, reward=0.5, components={"polite": 1.0}),
        a_trajectory("elsewhere", metrics={"weight/other": 1.0}, reward=1.0, components={"other": 1.0}),
    ]
    for row, run in zip(rows, (control.run, control.run, empty.begin_run("other")), strict=True):
        empty.save_trajectory(row, run_id=run)
    fields = page(control.client, f"/runs/{control.run}").all("input")
    weights = {a["name"]: a["placeholder"] for a in fields if a.get("name", "").startswith("reward_weights/")}
    assert weights == {"reward_weights/right, or <b>not</b>": "1", "reward_weights/steps": "-0.01"}
    status, said = control.turn('{"reward_weights": {"steps": "few", "right, or <b>not</b>": 2}}')
    assert (status, list(said["errors"])) == (422, ["reward_weights/steps"])
    assert not control.file.exists()
    assert control.turn('{"reward_weights": {"steps": -0.05}}') == (
        200,
        {"knobs": {"reward_weights/steps": -0.05}},
    )
    assert control.turn('{"reward_weights": {"gone": 1}}')[0] == 200
    run = KnobBoard(control.directory, control.config)
    assert {t.name: t.after for t in run.read()} == {
        "reward_weights/steps": -0.05,
        "reward_weights/gone": 1.0,
    }
    fields = page(control.client, f"/runs/{control.run}").all("input")
    shown = {a["name"]: a["value"] for a in fields if a.get("name", "").startswith("reward_weights/")}
    assert shown == {
        "reward_weights/right, or <b>not</b>": "",
        "reward_weights/steps": "-0.05",
        "reward_weights/gone": "1",
    }
    assert control.turn('{"reward_weights": {"gone": null}}')[0] == 200
    assert run.read()[0].after is None


def test_a_run_that_goes_on_from_another_has_fields_for_what_that_one_was_scored_with(
    empty: Store, control: Control
) -> None:
    scored = a_trajectory("t", reward=-0.5, components={"steps": 5.0}, metrics={"weight/steps": -0.1})
    empty.save_trajectory(scored, run_id=control.run)
    after = empty.begin_run("agent", {"checkpoints": str(control.directory)}, continues=control.run)
    fields = page(control.client, f"/runs/{after}").all("input")
    assert [a["placeholder"] for a in fields if a.get("name") == "reward_weights/steps"] == ["-0.1"]


def test_a_weight_that_was_turned_is_shown_with_what_it_was_scored_with(empty: Store) -> None:
    run = empty.begin_run("agent", {"checkpoints": "/not/on/this/machine"})
    scored = a_trajectory("t", reward=-0.5, components={"steps": 5.0}, metrics={"weight/steps": -0.1})
    empty.save_trajectory(scored, run_id=run)
    for before, after in ((None, -0.25), (-0.25, None), (None, -0.75)):
        data = {"name": "reward_weights/steps", "before": before, "after": after}
        empty.add_event(run, "knob_turned", "reward_weights/steps turned", data)
    text = page(TestClient(create_app(empty)), f"/runs/{run}").text
    assert "reward_weights/steps -0.1 -0.75" in text
    assert "reward_weights/steps -0.25 → as scored" in text


def test_every_turn_of_a_knob_is_on_its_page(empty: Store, control: Control) -> None:
    for before, after in ((None, 3e-5), (3e-5, None)):
        data = {"name": "learning_rate", "before": before, "after": after}
        empty.add_event(control.run, "knob_turned", "learning_rate turned", data)
    text = page(control.client, f"/runs/{control.run}").text
    assert "learning_rate 3e-05 → as configured" in text
    assert "learning_rate as configured → 3e-05" in text


def test_a_knob_that_does_not_go_there_is_refused_beside_it_and_nothing_is_turned(control: Control) -> None:
    status, said = control.turn('{"learning_rate": -1, "temperature": 0.5}')
    assert status == 422
    assert list(said["errors"]) == ["learning_rate"]
    assert "greater than 0" in said["errors"]["learning_rate"]
    status, said = control.turn('{"kl_target": 0.1}')
    assert (status, list(said["errors"])) == (422, [""])
    assert "give kl_coef > 0" in said["errors"][""]
    assert "no such setting" in control.turn('{"speed": 1}')[1]["errors"]["speed"]
    for body in ("[1]", "{", "", "{}"):
        assert control.turn(body)[0] == 422
    assert control.turn('{"learning_rate": 1' + " " * 20_000 + "}")[0] == 413
    assert not control.file.exists()


def test_only_the_servers_own_pages_turn_knobs(control: Control) -> None:
    """A form or a script of another site can send neither the header nor the token."""
    for token in ("", "guess", "é"):
        headers = {"x-art-control": token.encode()}
        answer = control.client.post(
            f"/runs/{control.run}/knobs", content='{"temperature": 1}', headers=headers
        )
        assert answer.status_code == 403
    assert not control.file.exists()


def test_a_read_only_dashboard_turns_nothing_and_tells_no_token(empty: Store, control: Control) -> None:
    client = TestClient(create_app(empty))
    assert not any("data-token" in a for _, a in page(client, f"/runs/{control.run}").elements)
    answer = client.post(
        f"/runs/{control.run}/knobs", content='{"temperature": 1}', headers={"x-art-control": control.token}
    )
    assert answer.status_code == 403
    assert "--control" in answer.json()["errors"][""]
    assert not control.file.exists()


def test_a_file_of_knobs_that_cannot_be_used_is_not_written_over(control: Control) -> None:
    control.file.write_text("{broken")
    status, said = control.turn('{"temperature": 1}')
    assert status == 422
    assert "mend or remove" in said["errors"][""]
    assert control.file.read_text() == "{broken"
    assert "mend or remove" in page(control.client, f"/runs/{control.run}").text


def test_knobs_of_a_run_on_another_machine_are_shown_as_recorded(empty: Store) -> None:
    run = empty.begin_run("agent", {"checkpoints": "/not/on/this/machine"})
    data = {"name": "temperature", "before": None, "after": 0.25}
    empty.add_event(run, "knob_turned", "temperature turned", data)
    document = page(TestClient(create_app(empty, control=True)), f"/runs/{run}")
    assert "is not on this machine" in document.text
    assert "0.25" in document.text
