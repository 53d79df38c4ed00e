"""A backend whose vLLM is a fake that sleeps and reloads: training, publishing and the record together."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_sleeper import MAIN, fingerprint
from helpers.tiny import tiny_model

from art_core import LocalBackend, ParallelConfig, TrainableModel
from art_core.config import EngineConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.merging import merge
from art_core.store import Store
from art_core.types import PolicyVersion

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

LESSON = [[{"role": "user", "content": "yes?"}, {"role": "assistant", "content": "no"}]]


@pytest.fixture
def train_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainableModel]]:
    models: list[TrainableModel] = []

    def start(fault: str = "", **settings: Any) -> TrainableModel:
        python = fake_interpreter(tmp_path / "fake", "answers", "vllm")
        (tmp_path / "fake/site/vllm/entrypoints/openai/api_server.py").write_text(MAIN)
        monkeypatch.setenv("FAKE_SLEEP_FAULT", fault)
        monkeypatch.setenv("FAKE_LIVES", str(tmp_path / "lives"))
        base = tiny_model(tmp_path / "base")
        model = TrainableModel(base_model=str(base), name="agent", project="p", lora_rank=4)
        model.register(LocalBackend(root=tmp_path / "art", kind="vllm", python=python, **settings))
        models.append(model)
        return model

    yield start
    for model in models:
        model.close()


def says(model: TrainableModel) -> str:
    trajectory = model.start_trajectory()
    answer = model.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], trajectory_id=trajectory
    )
    model.end_trajectory(trajectory, reward=1.0)
    return answer.choices[0].message.content or ""


def events(root: Path) -> list[Any]:
    with Store.open("p", root) as store:
        return [e for e in store.events() if e.kind.startswith(("sleep", "engine"))]


def test_training_in_turns_puts_vllm_to_sleep_and_publishes_to_one_that_is_awake(
    train_here: Callable[..., TrainableModel], tmp_path: Path
):
    model = train_here(colocate=True)
    engine = model._registered.engine  # type: ignore[attr-defined]
    for number in (1, 2):
        assert model.sft(LESSON, steps=1, learning_rate=1e-2).updated
        assert model.endpoint.current_version().number == number
        assert says(model) == fingerprint(str(tmp_path / "base"))
    acts = "\n".join(_acts(engine))
    order = ("canary agent@1", "pause", "sleep 0 running", "wake", "canary agent@1", "load agent@2", "resume")
    place = 0
    for act in order:
        place = acts.index(act, place) + len(act)
    assert events(tmp_path / "art") == []


def test_answers_that_sleep_has_changed_are_told_in_the_record(
    train_here: Callable[..., TrainableModel], tmp_path: Path
):
    """C42."""
    model = train_here("adapters-for-good", colocate=True)
    for _ in range(2):  # the first time there is no adapter to lose
        model.sft(LESSON, steps=1, learning_rate=1e-2)
    assert model.endpoint.current_version().number == 2
    assert [e.kind for e in events(tmp_path / "art")] == ["sleep_changed_answers", "engine_restarted"]
    assert "agent@1" in events(tmp_path / "art")[0].message


def test_merged_versions_are_the_trained_weights_and_go_on_after_a_restart_of_ours(
    train_here: Callable[..., TrainableModel], tmp_path: Path
):
    base, root = tmp_path / "base", tmp_path / "art"
    model = train_here(publish="merged")
    assert says(model) == fingerprint(str(base))
    for number in (1, 2):
        model.sft(LESSON, steps=1, learning_rate=1e-2)
        adapter = tmp_path / f"saved-{number}"
        model.save_lora_adapter(adapter)
        expected = fingerprint(str(merge(base, adapter, tmp_path / f"expected-{number}")))
        assert says(model) == expected
        assert says(model) != fingerprint(str(base))
        with (
            pytest.raises(EngineError, match=rf"agent@{number - 1} is not served any more"),
            model.lease(PolicyVersion("agent", number - 1)),
        ):
            pass
        with pytest.raises(EngineError, match="one version at a time"):
            model.serve(number - 1)
    assert [p.name for p in (root / "p" / "agent" / "merged").glob("*/*")] == ["agent@2"]
    model.close()

    again = TrainableModel(base_model=str(base), name="agent", project="p", lora_rank=4)
    again.register(
        LocalBackend(root=root, kind="vllm", python=tmp_path / "fake" / "python", publish="merged")
    )
    with again:
        assert again.endpoint.current_version().number == 2
        assert says(again) == expected


def test_turns_with_trainer_processes_are_refused_before_anything_starts(tmp_path: Path):
    backend = LocalBackend(
        root=tmp_path, engine=EngineConfig(kind="vllm", colocate=True), parallel=ParallelConfig(processes=1)
    )
    model = TrainableModel(base_model="org/m", name="agent", project="p")
    with pytest.raises(ConfigError, match=r"colocate=True with trainer processes"):
        model.register(backend)


def _acts(engine: Any) -> list[str]:
    return httpx.get(engine.base_url.removesuffix("/v1") + "/acts").json()
