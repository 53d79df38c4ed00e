"""The page of a real run: a tiny model trains, is looked at, and is turned meanwhile."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import tiny_model
from starlette.testclient import TestClient

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig
from art_core.observe.dashboard.app import create_app
from art_core.store import Store

TRAIN = TrainConfig(learning_rate=1e-2, guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[TrainableModel]:
    base = str(tiny_model(tmp_path / "base"))
    trained = TrainableModel(base_model=base, project="p", name="agent", train=TRAIN, lora_rank=4)
    trained.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256))
    with trained:
        yield trained


def step(model: TrainableModel) -> float:
    """One training step; the learning rate that it used."""
    for seed, reward in enumerate((0.0, 1.0)):
        rollout = model.start_trajectory("colour")
        model.chat.completions.create(
            messages=[{"role": "user", "content": "name a colour"}], max_tokens=2, seed=seed
        )
        model.end_trajectory(rollout, reward=reward)
    return model.train().metrics["learning_rate"]


def test_a_run_is_seen_going_on_turned_from_its_page_and_ended(model: TrainableModel, tmp_path: Path) -> None:
    assert step(model) == 1e-2
    with Store.open("p", tmp_path) as store:  # as another process would
        (run,) = store.runs()
        client = TestClient(create_app(store, control=True))
        html = client.get(f"/runs/{run.id}").text
        assert 'class="badge live"' in html
        assert 'placeholder="0.01"' in html
        token = re.search(r'data-token="([^"]+)"', html)
        assert token
        turned = client.post(
            f"/runs/{run.id}/knobs", content='{"learning_rate": 5e-3}', headers={"x-art-control": token[1]}
        )
        assert turned.status_code == 200, turned.text
        assert step(model) == 5e-3
        html = client.get(f"/runs/{run.id}").text
        assert "as configured → 0.005" in html
        steps = client.get(f"/runs/{run.id}/series?name=learning_rate&name=time/step").json()["series"]
        assert steps["learning_rate"]["values"] == [1e-2, 5e-3]
        assert len(steps["time/step"]["steps"]) == 2
        assert client.get(f"/runs/{run.id}/step?step=1&show=best").status_code == 200
        model.close()
        html = client.get(f"/runs/{run.id}").text
        assert 'class="badge good"' in html
        assert "finished" in html
