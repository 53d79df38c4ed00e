"""A real run writes to every sink, is stopped and goes on; each tracker's own reader finds each step once."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import wandb
from helpers.tiny import tiny_model
from helpers.wandb_file import history, run_record, written
from mlflow.tracking import MlflowClient
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from art_core import LocalBackend, TrainableModel
from art_core.config import TrainConfig
from art_core.observe.metrics import spec_of
from art_core.observe.sinks import (
    JSONLSink,
    MLflowSink,
    PrometheusSink,
    SinkRun,
    TensorBoardSink,
    WandbSink,
    export_metrics,
)
from art_core.store import RunState, Store

ASK = [{"role": "user", "content": "answer yes or no"}]
REWARDS = {1: [0.0, 1.0], 2: [0.5, 0.5], 3: [0.25, 0.75]}  # the second step can learn nothing


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def play(model: TrainableModel, rewards: list[float]) -> None:
    for reward in rewards:
        trajectory = model.start_trajectory()
        model.chat.completions.create(model=model.name, messages=ASK, max_tokens=3)
        model.rollout(trajectory).components["short"] = reward / 2
        model.end_trajectory(trajectory, reward=reward)


@pytest.fixture(scope="module")
def scraped(root: Path) -> Iterator[dict[str, float]]:
    """Two steps, the end of the process, a third one; and what Prometheus saw of the last."""
    base = str(tiny_model(root / "base"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its reader and writer want to be told
        patch.setenv("WANDB_SILENT", "true")
        seen: dict[str, float] = {}
        for steps in ((1, 2), (3,)):
            prometheus = PrometheusSink(0)
            sinks = [
                "jsonl",
                TensorBoardSink(root / "tb"),
                WandbSink(mode="offline", directory=root / "wb"),
                MLflowSink(root / "ml"),
                prometheus,
            ]
            config = TrainConfig(learning_rate=1e-2, success_reward=0.75)
            model = TrainableModel(base_model=base, project="p", name="agent", lora_rank=4, train=config)
            model.register(LocalBackend(root=root, dtype="float32", max_model_len=256, sinks=sinks))
            with model:
                for step in steps:
                    play(model, REWARDS[step])
                    model.train()
                    model.log_metrics({"eval/win_rate": step / 4})
                seen = scraped_until(steps[-1], prometheus)
        yield seen


def scraped_until(step: int, sink: PrometheusSink) -> dict[str, float]:
    """What Prometheus sees once it sees a step."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        text = "" if sink.url is None else httpx.get(sink.url).text
        families = text_string_to_metric_families(text)
        seen = {s.name: s.value for family in families for s in family.samples}
        if seen.get("art_step") == step:
            return seen
        time.sleep(0.05)
    raise AssertionError(f"Prometheus never saw step {step}")


@pytest.fixture
def store(root: Path, scraped: dict[str, float]) -> Iterator[Store]:
    with Store.open("p", root) as store:
        yield store


def in_store(store: Store, name: str) -> list[tuple[int, float]]:
    runs = store.runs()
    assert [run.continues for run in runs] == [None, runs[0].id]
    return [(m.step, m.value) for run in runs for m in store.metrics(run.id, name)]


def test_every_name_that_a_run_writes_is_in_the_catalogue(store: Store) -> None:
    names = {metric.name for run in store.runs() for metric in store.metrics(run.id)}
    assert [name for name in sorted(names) if spec_of(name) is None] == ["eval/win_rate"]  # the user's own
    assert {"reward/component/short", "success_rate", "tokens_sampled", "time/train"} <= names
    assert "gpu_memory_peak" not in names  # there is none: absent, not 0
    assert "judge_calls" not in names


def test_steps_go_on_over_a_restart_and_past_a_step_that_changed_nothing(store: Store) -> None:
    assert in_store(store, "reward_mean") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert in_store(store, "policy_version") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert in_store(store, "success_rate") == [(1, 0.5), (2, 0.0), (3, 0.5)]
    for run in store.runs():
        phases = ("rollout", "wait", "train", "publish")
        for step in {metric.step for metric in store.metrics(run.id)}:
            took = {m.name: m.value for m in store.metrics(run.id) if m.step == step}
            assert sum(took[f"time/{phase}"] for phase in phases) == pytest.approx(took["time/step"])
            assert took["tokens_per_second/rollout"] > 0


def test_what_was_trained_is_kept_token_by_token(store: Store) -> None:
    first, second = store.runs()
    for run, expected in ((first, {1}), (second, {3})):
        trained = [t for rollout in store.trajectories(run.id) for t in store.trained(rollout.id)]
        assert {t.train_step for t in trained} == expected  # nothing was trained in step 2
        assert {abs(t.advantage) for t in trained} == {0.5 if run is first else 0.25}
        for t in trained:
            assert all(t.trained)
            assert all(r is not None and 0.9 < r < 1.1 for r in t.ratio)
    rollout = next(iter(store.trajectories(first.id)))
    (tokens,) = [step.tokens for step in rollout.steps]
    assert tokens is not None
    assert len(store.trained(rollout.id)[0].ratio) == len(tokens.completion)


def test_tensorboards_reader_finds_each_step_once(root: Path, store: Store) -> None:
    (directory,) = (root / "tb").iterdir()
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    for name in ("reward_mean", "policy_version", "time/step", "eval/win_rate"):
        read = [(event.step, event.value) for event in reader.Scalars(name)]
        assert read == [(step, pytest.approx(value)) for step, value in in_store(store, name)]


def test_wandbs_file_holds_each_step_once(root: Path, store: Store) -> None:
    files = sorted((root / "wb").glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # one for each process, both of one run
    rows = [row for path in files for row in history(path)]
    for name in ("reward_mean", "eval/win_rate"):
        assert [(row["train_step"], row[name]) for row in rows if name in row] == in_store(store, name)
    assert [row["_step"] for row in rows if "reward_mean" in row] == [2, 4, 6]
    told = [run_record(path) for path in files]
    assert {run.run_id for run in told} == {store.runs()[0].id}
    assert {run.project for run in told} == {"p"}
    assert json.loads(next(i.value_json for i in told[0].config.update if i.key == "lora_rank")) == 4


def test_mlflows_client_finds_each_step_once(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client: Any = MlflowClient((root / "ml").as_uri())
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    for name in ("reward_mean", "reward/component/short", "eval/win_rate"):
        read = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
        assert read == in_store(store, name)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "0.01"


def test_lines_and_gauges_say_the_same(root: Path, store: Store, scraped: dict[str, float]) -> None:
    (path,) = (root / "p" / "agent" / "metrics").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["metrics"]["loss"]) for row in rows if "loss" in row["metrics"]] == in_store(
        store, "loss"
    )
    assert [row["step"] for row in rows if "reward_mean" in row["metrics"]] == [1, 2, 3]
    assert [(r["step"], v) for r in rows if (v := r["metrics"].get("eval/win_rate"))] == in_store(
        store, "eval/win_rate"
    )
    assert scraped["art_policy_version"] == 2
    assert scraped["art_time_train"] == pytest.approx(in_store(store, "time/train")[-1][1])


def test_a_sink_that_was_not_there_gets_the_whole_run_later(root: Path, store: Store) -> None:
    last = store.runs()[-1].id
    late = JSONLSink(root / "late")
    assert export_metrics(store, last, late) == 3
    assert export_metrics(store, last, late) == 0
    # What MLflow itself recommends, and our default: a database in one file.
    database = MLflowSink(f"sqlite:///{root / 'mlflow.db'}")
    assert export_metrics(store, last, database) == 3
    assert export_metrics(store, last, database) == 0


@pytest.mark.parametrize("given", ["offline", None])
def test_an_offline_export_with_nothing_new_begins_no_run_of_wandbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Literal["offline"] | None
) -> None:
    if given is None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        wandb.teardown()  # it reads its environment once
    sink = WandbSink(mode=given, directory=tmp_path / "wb")
    with Store.open("p", tmp_path) as store:
        run = store.begin_run("agent")
        assert export_metrics(store, run, sink) == 0
        assert not list(tmp_path.rglob("offline-run-*"))
        store.log_metrics(run, 1, {"loss": 0.5})
        assert [export_metrics(store, run, sink) for _ in range(2)] == [1, 0]
    assert [(row["train_step"], row["loss"]) for row in written(tmp_path, rows=1)] == [(1, 0.5)]
    assert len(list(tmp_path.rglob("offline-run-*"))) == 1
    wandb.teardown()


def test_numbers_that_are_added_to_a_step_reach_wandb_with_that_step(tmp_path: Path) -> None:
    run = SinkRun(id="r-1", project="p", model="agent", config={}, started_at=0.0, directory=tmp_path)
    sink = WandbSink(mode="offline")
    writer = sink.open(run)
    writer.log(1, {"loss": 0.5}, 1000.0)
    writer.log(1, {"eval/win_rate": 0.25}, 1001.0)
    writer.log(1, {"eval/length": 7.0}, 1002.0)
    writer.log(2, {"loss": 0.25}, 1003.0)
    writer.log(2, {"eval/win_rate": 0.75}, 1004.0)
    writer.close(RunState.FINISHED)
    again = sink.open(run)
    assert again.last_step == 2
    again.close(RunState.FINISHED)
    rows = written(tmp_path, rows=4)
    told = {
        name: [(r["train_step"], r[name]) for r in rows if name in r] for name in ("loss", "eval/win_rate")
    }
    assert told == {"loss": [(1, 0.5), (2, 0.25)], "eval/win_rate": [(1, 0.25), (2, 0.75)]}
    assert [(r["train_step"], r["eval/length"]) for r in rows if "eval/length" in r] == [(1, 7.0)]
