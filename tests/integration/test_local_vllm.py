"""LocalBackend with a vLLM (a fake one, in a real process): its life is in the record."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.vllm_interpreter import fake_interpreter
from helpers.tiny import tiny_model

from art_core import LocalBackend, TrainableModel
from art_core.inference.vllm import VLLMEngine
from art_core.store import Store
from art_langgraph import ChatART

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[TrainableModel]:
    base_model = str(tiny_model(tmp_path / "model"))
    model = TrainableModel(base_model=base_model, project="p", name="agent", lora_rank=4)
    python = fake_interpreter(tmp_path / "fake", "answers")
    model.register(LocalBackend(root=tmp_path / "art", kind="vllm", python=python, max_model_len=256))
    with model:
        yield model


def engine_of(model: TrainableModel) -> VLLMEngine:
    engine = model._registered.engine  # type: ignore[attr-defined]
    assert isinstance(engine, VLLMEngine)
    return engine


def kill(model: TrainableModel) -> None:
    pid = engine_of(model).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def said(answer: object) -> str:
    return answer.choices[0].message.content  # type: ignore[attr-defined]


def test_a_restart_is_an_event_of_the_run_and_costs_a_call_nothing_but_time(
    model: TrainableModel, tmp_path: Path
):
    trajectory = model.start_trajectory()
    assert said(model.chat.completions.create(messages=ASK)) == "answered by agent@0"
    log = engine_of(model).log_path
    kill(model)
    assert said(model.chat.completions.create(messages=ASK)) == "answered by agent@0"
    kill(model)
    chunks = model.chat.completions.create(messages=ASK, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "answered by agent@0"
    ended = model.end_trajectory(trajectory, reward=1.0)
    assert [step.message() for step in ended.steps] == ["answered by agent@0"] * 3
    assert all(step.trainable for step in ended.steps)

    store = Store.open("p", tmp_path / "art")
    events = store.events(kind="engine_restarted")
    (run,) = store.runs()
    store.close()
    assert len(events) == 2
    assert {event.run_id for event in events} == {run.id}
    assert events[0].data["log"] == str(log)
    assert "SIGKILL" in events[0].message


async def test_the_async_face_waits_for_a_restart_too(model: TrainableModel):
    kill(model)
    answers = await asyncio.gather(*(model.chat.completions.acreate(messages=ASK) for _ in range(4)))
    assert [said(answer) for answer in answers] == ["answered by agent@0"] * 4


def test_two_versions_answer_side_by_side_after_a_restart_too(model: TrainableModel, tmp_path: Path):
    checkpoint = tmp_path / "art" / "p" / "agent" / "checkpoints" / "checkpoint-00000012" / "adapter"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with model.serve(12) as earlier, model.serve(0) as base:
        for _ in range(2):
            assert ChatART(earlier).invoke("hi").text == "answered by agent@12"
            assert ChatART(base).invoke("hi").text == "answered by agent@0"
            kill(model)
    assert ChatART(model).invoke("hi").text == "answered by agent@0"
    served: list[str] = []
    deadline = time.monotonic() + 60
    while served != ["agent@0", "agent"]:
        assert time.monotonic() < deadline, served
        served = [card["id"] for card in httpx.get(f"{model.base_url}/models").json()["data"]]
