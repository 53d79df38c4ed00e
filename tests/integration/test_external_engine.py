"""Servers that somebody else runs: what they can do is found out, said, and not exceeded. Real HTTP."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.loopback_server import send
from fakes.vllm_server import FakeVLLM, logprob
from fakes.vllm_wire import error_body
from helpers.tiny import tiny_model

from art_core import LocalBackend, TrainableModel
from art_core.config import GuardrailConfig, TrainConfig
from art_core.errors import EngineError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.engine import EngineEvent
from art_core.inference.external import ExternalEngine
from art_core.inference.replicas import ReplicaSet
from art_core.recording import Rollout, recording
from art_core.training import batch
from art_core.types import PolicyVersion, Scenario, TrajectoryGroup
from art_langgraph import ChatART, capture

V0, V1, V2 = (PolicyVersion("agent", n) for n in range(3))
BASE = "org/base-model"


class TheirVLLM(FakeVLLM):
    """A vLLM as somebody else starts it: other names, perhaps a key, perhaps no adapters."""

    def __init__(self, *, loads: bool = True, tools: bool = True, key: str | None = None, **settings: Any):
        super().__init__(lambda request: f"answered by {request['model']}", models=(BASE,), **settings)
        self.loads = loads
        self.takes_tools = tools
        self.key = key
        self.adapters: dict[str, str] = {}
        self.acts: list[tuple[str, str]] = []

    def restart(self) -> None:
        """Lose what was loaded."""
        self.adapters.clear()
        self.models = (BASE,)

    async def _respond(self, method: str, path: str, headers: dict[str, str], raw: bytes, *rest: Any) -> None:
        writer = rest[1]
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            send(writer, 401, error_body("no such key"))
        elif path.endswith("completions") and not self.takes_tools and b'"tools"' in raw:
            send(writer, 400, error_body('"auto" tool choice requires --enable-auto-tool-choice'))
        else:
            await super()._respond(method, path, headers, raw, *rest)

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, bytes]:
        if path == "/version":
            return 200, b'{"version": "0.30.0"}'
        if path == "/v1/models":
            cards = [
                {"id": name, "owned_by": "vllm", "root": self.adapters.get(name, name),
                 "parent": BASE if name in self.adapters else None}
                for name in self.models or ()
            ]  # fmt: skip
            return 200, json.dumps({"data": cards}).encode()
        if self.loads and path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            if method != "POST":
                return 405, b'{"detail": "Method Not Allowed"}'
            body = json.loads(raw)
            name = body["lora_name"]
            self.acts.append((path.split("/")[-1].split("_")[0], name))
            if "unload" in path:
                del self.adapters[name]
            elif not Path(body["lora_path"]).joinpath("adapter_config.json").exists():
                return 404, f'{{"error": {{"message": "No adapter found for {body["lora_path"]}"}}}}'.encode()
            else:
                self.adapters[name] = body["lora_path"]
            self.models = (BASE, *self.adapters)
            return 200, b"{}"
        return super()._plain(method, path, raw)


def adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    return directory


@asynccontextmanager
async def engine_at(server: FakeVLLM, **settings: Any) -> AsyncIterator[ExternalEngine]:
    engine = ExternalEngine(server.base_url, served_model="agent", base_model=BASE, **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


# -- what it can do ------------------------------------------------------------------------------------


async def test_a_full_vllm_can_everything_and_says_so_in_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with TheirVLLM() as server:
        async with engine_at(server) as engine:
            can = engine.capabilities
    assert can.server == "vLLM 0.30.0"
    assert can.models == (BASE,)
    assert can.token_ids
    assert can.logprobs
    assert can.tempered_logprobs
    assert can.stream_token_ids
    assert can.tools
    assert can.load_adapters
    assert can.untrainable is None
    (said,) = [r for r in caplog.records if r.name == "art_core.inference.external"]
    assert said.levelno == logging.INFO
    assert f"{server.base_url}: vLLM 0.30.0, serves {BASE}; can: return token ids" in said.getMessage()
    assert server.acts == []


@pytest.mark.parametrize(
    ("settings", "missing", "says"),
    [
        (
            {"token_ids": False},
            "token_ids",
            "cannot return token ids: steps are recorded with trainable=False",
        ),
        ({"logprobs": False}, "logprobs", "cannot return logprobs: steps are recorded with trainable=False"),
        (
            {"tempered_logprobs": False},
            "tempered_logprobs",
            "cannot return logprobs at other temperatures than 1: steps that are sampled at another "
            "temperature are trained without them, and nothing corrects for stale rollouts (vLLM: "
            "--logprobs-mode processed_logprobs",
        ),
        ({"tools": False}, "tools", "cannot take tools: requests with tools are refused"),
        (
            {"loads": False},
            "load_adapters",
            "cannot load adapters: a trained version cannot be published; start",
        ),
    ],
)
async def test_what_a_server_cannot_do_is_found_out_and_said_with_the_way_out(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], missing: str, says: str
) -> None:
    with TheirVLLM(**settings) as server:
        async with engine_at(server) as engine:
            shown = {
                name: getattr(engine.capabilities, name)
                for name in {"token_ids", "logprobs", "tools", "load_adapters", missing}
            }
    assert [name for name, can in shown.items() if not can] == [missing]
    assert says in caplog.text


async def test_steps_from_a_server_without_token_ids_are_not_trainable_and_say_why() -> None:
    with TheirVLLM(token_ids=False) as server:
        async with engine_at(server) as engine:
            reason = engine.capabilities.untrainable
            with capture() as rollout:
                await ChatART(StaticEndpoint(engine.base_url, BASE)).ainvoke("hi")
    (step,) = rollout.snapshot().steps
    assert not step.trainable
    assert step.untrainable == reason
    assert reason is not None
    assert "token ids" in reason


async def test_a_key_that_is_refused_is_said_and_the_right_one_is_sent_everywhere(tmp_path: Path) -> None:
    with TheirVLLM(key="secret") as server:
        with pytest.raises(EngineError, match=r"refuses the key \(401\): set EngineConfig.api_key"):
            await ExternalEngine(server.base_url, "wrong", served_model="agent").start()
        async with engine_at(server, api_key="secret") as engine:
            await engine.publish(V1, adapter(tmp_path / "a1"))
            assert (await engine.health()).ok


async def test_an_address_where_nothing_or_something_else_answers_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(EngineError, match=r"does not answer .*must end in /v1"):
            await ExternalEngine(url, served_model="agent").start()
    with pytest.raises(EngineError, match="expected an http"):
        ExternalEngine("localhost:8000", served_model="agent")
    with (
        FakeVLLM() as server,
        pytest.raises(EngineError, match=r"and none is the base model: serve it as one of"),
    ):
        await ExternalEngine(server.base_url, served_model="agent").start()


# -- versions ------------------------------------------------------------------------------------------


async def test_versions_are_loaded_from_their_directories_and_given_back_at_the_end(tmp_path: Path) -> None:
    with TheirVLLM() as server:
        async with engine_at(server) as engine:
            assert engine.wire_name(V0) == BASE
            await engine.publish(V0, None)
            await engine.publish(V1, adapter(tmp_path / "a1"))
            await engine.publish(V2, adapter(tmp_path / "a2"))
            await engine.retire(V1)
            assert engine.versions() == (V0, V2)
            assert server.adapters == {"agent@2": str(tmp_path / "a2")}
            with pytest.raises(EngineError, match="agent@2 was already published"):
                await engine.publish(V2, tmp_path / "a2")
        assert server.adapters == {}


async def test_publishing_to_a_server_that_cannot_load_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with TheirVLLM(loads=False) as server:
        async with engine_at(server) as engine:
            with pytest.raises(
                EngineError, match=r"agent@1 cannot be published.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"
            ):
                await engine.publish(V1, adapter(tmp_path / "a1"))
            assert engine.versions() == ()


async def test_an_adapter_that_the_server_does_not_see_names_the_directory_to_share(tmp_path: Path) -> None:
    with TheirVLLM() as server:
        async with engine_at(server) as engine:
            with pytest.raises(
                EngineError, match=rf"No adapter found.*must be able to read {tmp_path}/elsewhere"
            ):
                await engine.publish(V1, tmp_path / "elsewhere")


async def test_a_name_that_belongs_to_other_weights_is_not_taken_over(tmp_path: Path) -> None:
    with TheirVLLM() as server:
        server.adapters = {"agent@1": "/somewhere/else", "agent@2": str(adapter(tmp_path / "a2"))}
        server.models = (BASE, *server.adapters)
        async with engine_at(server) as engine:
            with pytest.raises(EngineError, match=r"serves /somewhere/else under that name"):
                await engine.publish(V1, adapter(tmp_path / "a1"))
            await engine.publish(V2, tmp_path / "a2")  # its own, of a process that is gone
            assert server.acts == []


async def test_replicas_at_addresses_get_back_what_a_restart_lost(tmp_path: Path) -> None:
    events: list[EngineEvent] = []
    with TheirVLLM() as one, TheirVLLM(key="secret") as two:
        engines = [
            ExternalEngine(s.base_url, s.key, served_model="agent", base_model=BASE) for s in (one, two)
        ]
        replicas = ReplicaSet(engines, on_event=events.append)
        await replicas.start()
        try:
            await replicas.publish(V0, None)
            await replicas.publish(V1, adapter(tmp_path / "a1"))
            assert one.adapters == two.adapters == {"agent@1": str(tmp_path / "a1")}
            two.restart()
            async with openai.AsyncOpenAI(
                base_url=replicas.base_url, api_key="none", max_retries=0
            ) as client:
                while not any(event.kind == "replica_back" for event in events):
                    for number in range(4):
                        answer = await client.chat.completions.create(
                            model="agent@1", messages=[{"role": "user", "content": f"question {number}"}]
                        )
                        assert answer.choices[0].message.content == "answered by agent@1"
            assert two.adapters == {"agent@1": str(tmp_path / "a1")}
            assert [event.kind for event in events] == ["replica_out", "replica_back"]
            assert "agent@1" in events[0].message
        finally:
            await replicas.close()


# -- through the backend -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tempered", "temperature", "used"),
    [(False, 0.7, False), (False, 1.0, True), (False, 0.0, True), (True, 0.7, True)],
)
async def test_logprobs_before_temperature_are_kept_and_not_trained_with(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tempered: bool,
    temperature: float,
    used: bool,
) -> None:
    monkeypatch.setattr(batch, "_said", set[str]())
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": temperature}
    with TheirVLLM(tempered_logprobs=tempered) as server:
        async with TrainableModel(
            base_model=str(tiny_model(tmp_path / "model")),
            name="agent",
            lora_rank=4,
            train=TrainConfig(learning_rate=1e-3, guardrails=GuardrailConfig(max_kl=None)),
        ) as model:
            await model.aregister(LocalBackend(root=tmp_path, kind="external", base_url=server.base_url))
            rollouts = [Rollout(Scenario("s")) for _ in range(2)]
            with recording(rollouts[0]):
                await model.chat.completions.acreate(**asked)
            chat = ChatART(model, temperature=temperature)
            with recording(rollouts[1]):
                await chat.ainvoke("hi")
            by_address = Rollout(Scenario("s"))
            async with openai.AsyncOpenAI(
                base_url=model.gateway.register(by_address), api_key="none"
            ) as client:
                await client.chat.completions.create(model="agent", **asked)
            played = [r.snapshot().with_reward(float(n)) for n, r in enumerate([*rollouts, by_address])]
            report = await model.atrain([TrajectoryGroup(Scenario("s"), tuple(played))])
            events = [e.kind for e in model.store.events()]
            kept = [model.store.trajectory(t.id).steps[0] for t in played]
    assert report.updated
    assert all(step.raw_logprobs is not tempered for step in kept)
    for step in kept:  # what the server said stays on record
        assert step.tokens is not None
        assert step.tokens.logprobs == tuple(
            pytest.approx(logprob(t, i)) for i, t in enumerate(step.tokens.completion)
        )
    assert report.metrics["steps_raw_logprobs"] == (0 if used else 3)
    assert report.metrics["null_logprobs"] == (0 if used else report.metrics["entries"])
    assert (report.metrics["importance_mean"] == 1) is not used
    assert ("kl_old_new" in report.metrics) is used
    assert events.count("raw_logprobs") == (not tempered)
    said = [r for r in caplog.records if "log-probabilities are the model's own" in r.getMessage()]
    assert [r.getMessage()[:23] for r in said] == ([] if used else ["3 of 3 steps were sampl"])


async def test_a_model_learns_on_a_server_of_somebody_elses(tmp_path: Path) -> None:
    with TheirVLLM(key="secret") as server:
        backend = LocalBackend(root=tmp_path, kind="external", base_url=server.base_url, api_key="secret")
        async with TrainableModel(
            base_model=str(tiny_model(tmp_path / "model")),
            name="agent",
            lora_rank=4,
            train=TrainConfig(learning_rate=1e-3, guardrails=GuardrailConfig(max_kl=None)),
        ) as model:
            await model.aregister(backend)
            trajectories = []
            for number in range(2):
                rollout_id = await model.astart_trajectory("s")
                answer = await model.chat.completions.acreate(messages=[{"role": "user", "content": "hi"}])
                assert answer.choices[0].message.content == f"answered by {BASE}"
                trajectories.append(await model.aend_trajectory(rollout_id, float(number)))
            await model.atrain([TrajectoryGroup(trajectories[0].scenario, tuple(trajectories))])
            assert str(model.current_version()) == "agent@1"
            assert Path(server.adapters["agent@1"]).joinpath("adapter_model.safetensors").exists()
            answer = await model.chat.completions.acreate(messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "answered by agent@1"
            # A stock client of the same address names the policy, and is captured.
            async with httpx.AsyncClient() as client:
                got = await client.post(
                    f"{model.base_url}/chat/completions",
                    json={"model": "agent", "messages": [{"role": "user", "content": "hi"}]},
                )
            assert got.json()["model"] == "agent@1"
            assert got.json()["system_fingerprint"].startswith("art-")
        assert server.adapters == {}
