"""Merged publishing: against a fake vLLM that reloads, and the real door in front of a real ASGI server."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_sleeper import MAIN, fingerprint
from fastapi import FastAPI, Request
from helpers.embedded import disturb, tiny_policy

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.engine import EngineEvent
from art_core.inference.merging import merge
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_plugin import OWNER_HEADERS
from art_core.inference.vllm_plugin.art_versions import OneVersion
from art_core.types import PolicyVersion

BASE, V1, V2, V3 = (PolicyVersion("agent", n) for n in range(4))
posix = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")


@dataclass
class Model:
    """A tiny base model, adapters of it, and the fingerprints of what each version's weights are."""

    base: Path
    adapters: dict[PolicyVersion, Path]
    says: dict[PolicyVersion, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("model")
    policy = tiny_policy(root / "base")
    adapters: dict[PolicyVersion, Path] = {}
    says = {BASE: fingerprint(str(root / "base"))}
    for version in (V1, V2, V3):
        disturb(policy, version.number)
        adapters[version] = root / version.name
        policy.save_weights(adapters[version])
        merged = merge(root / "base", adapters[version], root / f"merged-{version.number}")
        says[version] = fingerprint(str(merged))
    assert len(set(says.values())) == 4
    return Model(root / "base", adapters, says)


class Merged:
    """An engine that publishes merged weights."""

    def __init__(self, vllm: VLLMEngine, directory: Path, http: httpx.AsyncClient) -> None:
        self.vllm = vllm
        self.directory = directory
        self._http = http
        self.events: list[EngineEvent] = []
        vllm.on_event = self.events.append

    async def acts(self) -> list[str]:
        return (await self._http.get(self.vllm.base_url.removesuffix("/v1") + "/acts")).json()

    async def chat(self, version: PolicyVersion) -> httpx.Response:
        """A request straight to the server, of a client that asks nobody first."""
        body = {"model": version.name, "messages": [{"role": "user", "content": "hi"}]}
        return await self._http.post(f"{self.vllm.base_url}/chat/completions", json=body)

    async def says(self, version: PolicyVersion) -> str:
        response = await self.chat(version)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]


@pytest.fixture
def merged(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(fault: str = "", latency: float = 0.0, **settings: Any) -> AsyncIterator[Merged]:
        python = fake_interpreter(tmp_path / "fake", "answers", "vllm", latency)
        (tmp_path / "fake/site/vllm/entrypoints/openai/api_server.py").write_text(MAIN)
        monkeypatch.setenv("FAKE_SLEEP_FAULT", fault)
        monkeypatch.setenv("FAKE_LIVES", str(tmp_path / "lives"))
        config = EngineConfig(python=python, start_timeout=60, publish="merged", **settings)
        vllm = VLLMEngine(str(model.base), config, LoRAConfig(rank=4), "agent", tmp_path / "logs")
        await vllm.start()
        try:
            await vllm.publish(BASE, None)
            anew = httpx.Limits(max_keepalive_connections=0)  # the server may be another one by now
            async with httpx.AsyncClient(timeout=120, limits=anew) as http:
                yield Merged(vllm, tmp_path / "merged", http)
        finally:
            await vllm.close()

    return start


@posix
async def test_a_version_takes_the_place_of_the_one_before(merged: Callable[..., Any], model: Model):
    async with merged() as it:
        assert await it.says(BASE) == model.says[BASE]
        await it.vllm.publish(V1, model.adapters[V1])
        assert it.vllm.versions() == (V1,)
        assert await it.says(V1) == model.says[V1]
        gone = await it.chat(BASE)
        assert gone.status_code == 404, "an old name never answers with new weights"
        await it.vllm.publish(V2, model.adapters[V2])
        assert await it.says(V2) == model.says[V2]
        await it.vllm.retire(V1)
        assert it.vllm.versions() == (V2,)
        assert [p.name for p in it.directory.glob("*/*")] == ["agent@2"], "one copy of the model is kept"
        assert await it.acts() == [
            *("resume", "hold", "reload", "reset_prefix_cache", "rename agent@1 agent"),
            *("resume", "hold", "reload", "reset_prefix_cache", "rename agent@2 agent"),
        ]
        log = it.vllm.log_path
        assert log is not None
        assert "--enable-lora" not in log.read_text()


@posix
async def test_under_load_every_answer_is_by_the_weights_of_the_name_that_was_asked(
    merged: Callable[..., Any], model: Model
):
    async with merged(latency=0.02) as it:
        served, done = BASE, False
        answers: list[tuple[PolicyVersion, httpx.Response]] = []

        async def client() -> None:
            while not done:
                asked = served
                answers.append((asked, await it.chat(asked)))

        async def more() -> None:
            """Each client has had time for a request of the version that is served now."""
            before = len(answers)
            while len(answers) < before + 16:
                await asyncio.sleep(0.01)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await more()
        for version in (V1, V2, V3):
            await it.vllm.publish(version, model.adapters[version])
            served = version
            await more()
        done = True
        await asyncio.gather(*clients)
        for asked, response in answers:
            if response.status_code == 404:  # it came when its version had been replaced
                assert asked != V3
                continue
            assert response.status_code == 200
            assert response.json()["choices"][0]["message"]["content"] == model.says[asked]
        assert {asked for asked, r in answers if r.status_code == 200} == {BASE, V1, V2, V3}


@posix
@pytest.mark.parametrize("fault", ["no-reload", "reload-dies"])
async def test_a_server_that_cannot_reload_is_restarted_on_the_new_weights(
    merged: Callable[..., Any], model: Model, fault: str
):
    async with merged(fault) as it:
        await it.vllm.publish(V1, model.adapters[V1])
        assert await it.says(V1) == model.says[V1]
        assert (await it.chat(BASE)).status_code == 404
        assert [e.kind for e in it.events] == ["engine_restarted"]


@posix
async def test_a_server_that_dies_later_comes_back_with_the_merged_version(
    merged: Callable[..., Any], model: Model
):
    async with merged() as it:
        await it.vllm.publish(V1, model.adapters[V1])
        life = it.vllm.availability.ready()
        assert it.vllm.pid is not None
        os.killpg(it.vllm.pid, signal.SIGKILL)
        assert await it.vllm.availability.alost(life)
        assert it.vllm.versions() == (V1,)
        assert await it.says(V1) == model.says[V1]


@posix
async def test_one_gpu_in_turns_works_with_merged_versions(merged: Callable[..., Any], model: Model):
    async with merged(colocate=True) as it:
        for version in (V1, V2):
            await it.vllm.pause()
            await it.vllm.publish(version, model.adapters[version])
            await it.vllm.resume()
            assert await it.says(version) == model.says[version]
        assert it.events == []
        assert "canary agent@1" in await it.acts()


@posix
async def test_versions_that_cannot_be_next_are_refused(merged: Callable[..., Any], model: Model):
    async with merged() as it:
        await it.vllm.publish(V2, model.adapters[V2])
        with pytest.raises(
            EngineError, match=r"agent@1: publish='merged' serves one version at a time, agent@2"
        ):
            await it.vllm.publish(V1, model.adapters[V1])
        with pytest.raises(EngineError, match="agent@2"):
            await it.vllm.publish(V2, model.adapters[V2])
        with pytest.raises(ConfigError, match="no PEFT adapter directory"):
            await it.vllm.publish(V3, model.base)
        assert await it.says(V2) == model.says[V2], "what is served stays served"
        assert it.vllm.versions() == (V2,)


@posix
async def test_copies_of_the_model_go_with_their_engine_even_if_its_process_was_killed(
    merged: Callable[..., Any], model: Model, tmp_path: Path
):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphan = tmp_path / "merged" / f"{dead.pid}-1" / "agent@7"
    orphan.mkdir(parents=True)
    async with merged() as it:
        await it.vllm.publish(V1, model.adapters[V1])
        assert [p.name for p in it.directory.glob("*/*")] == ["agent@1"]
    assert list(it.directory.glob("*/*")) == []


def test_settings_that_cannot_tell_versions_apart_are_refused(tmp_path: Path):
    def engine(**settings: Any) -> VLLMEngine:
        config = EngineConfig(publish="merged", **settings)
        return VLLMEngine("m", config, LoRAConfig(), "agent", tmp_path / "logs")

    with pytest.raises(ConfigError, match=r"host='0\.0\.0\.0'"):
        engine(host="0.0.0.0")
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        engine(data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"publish='merged' with kind='embedded'"):
        EngineConfig(kind="embedded", publish="merged")


# -- the door itself ------------------------------------------------------------------------------------


@dataclass
class Door:
    """A server behind the middleware: its address, the paths that it was asked for, and when it answers."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    answering: threading.Event = field(default_factory=threading.Event)

    async def reached(self, path: str, times: int = 1) -> None:
        while self.asked.count(path) < times:
            await asyncio.sleep(0.005)


class Arrivals:
    """Outermost: it sees a request before the door does."""

    def __init__(self, app: Any, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.door.asked.append(scope["path"])
        await self.app(scope, receive, send)


@pytest.fixture
def door() -> Iterator[Door]:
    """It looks its name up as vLLM does."""
    door, app = Door(), FastAPI()
    app.state.openai_serving_models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name="agent@0", model_path="/m")]
    )

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        paths = request.app.state.openai_serving_models.base_model_paths
        if body["model"] not in [path.name for path in paths]:
            return {"refused": body["model"]}
        while body.get("slow") and not door.answering.is_set():
            await asyncio.sleep(0.005)
        return {"model": paths[0].name}

    @app.post("/steer")
    async def steer() -> dict[str, bool]:
        return {"steered": True}

    app.add_middleware(OneVersion)
    app.add_middleware(Arrivals, door=door)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    door.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield door
    server.should_exit = server.force_exit = True  # whoever waits at the shut door is not waited for
    thread.join(60)


async def test_the_door_shuts_when_the_last_request_is_out_and_opens_under_the_new_name(door: Door):
    async with httpx.AsyncClient(base_url=door.url, timeout=120) as client:

        async def complete(model: str, slow: bool = False) -> Any:
            return (await client.post("/v1/completions", json={"model": model, "slow": slow})).json()

        inside = asyncio.create_task(complete("agent@0", slow=True))
        await door.reached("/v1/completions")
        holding = asyncio.create_task(client.post("/art/version/hold"))
        await door.reached("/art/version/hold")
        before = [asyncio.create_task(complete(name)) for name in ("agent@0", "agent@1")]
        await door.reached("/v1/completions", 3)
        await asyncio.sleep(0.05)
        assert not holding.done(), "a request is inside"
        door.answering.set()
        assert (await holding).status_code == 200
        assert await inside == {"model": "agent@0"}
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in before), "the door is shut"
        assert (await client.post("/steer")).json() == {"steered": True}, "steering goes on"
        renamed = await client.post("/art/version", json={"names": ["agent@1", "agent"]})
        assert renamed.json() == {"names": ["agent@1", "agent"]}
        assert await asyncio.gather(*before) == [{"refused": "agent@0"}, {"model": "agent@1"}]
        assert await complete("agent") == {"model": "agent@1"}


async def test_a_name_that_cannot_be_given_is_an_error_and_leaves_the_door_shut(door: Door):
    async with httpx.AsyncClient(base_url=door.url, timeout=120) as client:
        await client.post("/art/version/hold")
        wrong = await client.post("/art/version", content=b"not json")
        assert wrong.status_code == 500
        assert "JSONDecodeError" in wrong.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"model": "agent@0"}, timeout=1)


async def test_the_door_lets_those_in_who_steer_and_all_when_it_is_released(door: Door):
    async with httpx.AsyncClient(base_url=door.url, timeout=120) as client:
        body = {"model": "agent@0"}
        assert (await client.post("/art/version/hold", json={"seconds": 60, "why": "so"})).status_code == 200
        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        await door.reached("/v1/completions")
        steered = await client.post("/v1/completions", json=body, headers=OWNER_HEADERS)
        assert steered.json() == {"model": "agent@0"}
        assert not waiting.done()
        assert (await client.post("/art/version/release")).json() == {"held": False}
        assert (await waiting).json() == {"model": "agent@0"}


async def test_who_waits_at_the_door_for_too_long_is_refused_and_the_next_may_come_in(door: Door):
    async with httpx.AsyncClient(base_url=door.url, timeout=120) as client:
        await client.post("/art/version/hold", json={"seconds": 0.05, "why": "it sleeps; ask later"})
        refused = await client.post("/v1/completions", json={"model": "agent@0"})
        assert refused.status_code == 503
        assert refused.headers["x-should-retry"] == "false"
        message = refused.json()["error"]["message"]
        assert message == "the request was held for 0.05 s: it sleeps; ask later"
        # Who was refused is not inside: nobody waits for him to come out.
        assert (await client.post("/art/version/hold", json={"seconds": "soon"})).status_code == 400
        assert (await client.post("/art/version/hold", content=b"")).json() == {"held": True}
        await client.post("/art/version/release")
        assert (await client.post("/v1/completions", json={"model": "agent@0"})).json() == {
            "model": "agent@0"
        }


def test_the_door_needs_no_package_of_ours():
    source = Path(sys.modules[OneVersion.__module__].__file__ or "").read_text()
    assert "art_core" not in source
