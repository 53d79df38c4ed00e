"""The engine against a fake vLLM that is started, steered and stopped exactly as the real one is."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fakes.vllm_interpreter import fake_interpreter

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError
from art_core.inference.engine import EngineEvent
from art_core.inference.processes import ManagedProcess
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_start import StartProgress
from art_core.types import PolicyVersion

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")


def engine(tmp_path: Path, mode: str = "serve", timeout: float = 60, **more) -> VLLMEngine:
    python = fake_interpreter(tmp_path / "fake", mode)
    settings = {name: more.pop(name) for name in list(more) if name in EngineConfig.model_fields}
    config = EngineConfig(python=python, start_timeout=timeout, **settings)
    return VLLMEngine("org/model", config, LoRAConfig(rank=8), "agent", tmp_path / "logs", **more)


def adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return directory


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


def worker_pid(log: Path) -> int:
    found = re.search(r"^worker (\d+)", log.read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def served(base_url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{base_url}/models").json()["data"]]


async def test_it_starts_serves_versions_and_leaves_nothing_running(tmp_path: Path):
    vllm = engine(tmp_path)
    await vllm.start()
    log = vllm.log_path
    assert log is not None
    worker = worker_pid(log)
    assert (await vllm.health()).ok
    assert served(vllm.base_url) == ["agent@0", "agent"]

    v0, v1 = PolicyVersion("agent", 0), PolicyVersion("agent", 1)
    await vllm.publish(v0, None)
    await vllm.publish(v1, adapter(tmp_path / "a1"))
    assert vllm.versions() == (v0, v1)
    assert "agent@1" in served(vllm.base_url)
    await vllm.retire(v1)
    assert vllm.versions() == (v0,)
    assert "agent@1" not in served(vllm.base_url)

    await vllm.close()
    assert not alive(worker)
    assert vllm.versions() == ()
    await vllm.close()


async def test_a_version_that_was_retired_is_never_given_to_other_weights(tmp_path: Path):
    vllm = engine(tmp_path)
    await vllm.start()
    try:
        v1 = PolicyVersion("agent", 1)
        await vllm.publish(v1, adapter(tmp_path / "a1"))
        with pytest.raises(EngineError, match="agent@1 was already published"):
            await vllm.publish(v1, adapter(tmp_path / "a2"))
        await vllm.retire(v1)
        with pytest.raises(EngineError, match="need a new version number"):
            await vllm.publish(v1, tmp_path / "a2")
    finally:
        await vllm.close()


async def test_an_adapter_that_vllm_refuses_is_not_a_version(tmp_path: Path):
    vllm = engine(tmp_path)
    await vllm.start()
    try:
        broken = adapter(tmp_path / "a1")
        (broken / "broken").touch()
        with pytest.raises(EngineError, match=r"did not load adapter .*a1 as agent@1: 500 tensor q_proj"):
            await vllm.publish(PolicyVersion("agent", 1), broken)
        assert vllm.versions() == ()
        (broken / "broken").unlink()
        await vllm.publish(PolicyVersion("agent", 1), broken)
    finally:
        await vllm.close()


async def test_pause_and_resume_reach_the_server(tmp_path: Path):
    vllm = engine(tmp_path)
    await vllm.start()
    try:
        root = vllm.base_url.removesuffix("/v1")
        await vllm.pause()
        assert httpx.get(f"{root}/paused").json() is True
        await vllm.resume()
        assert httpx.get(f"{root}/paused").json() is False
    finally:
        await vllm.close()


def test_an_engine_started_under_one_event_loop_is_used_and_closed_under_others(tmp_path: Path):
    """C09, for the engine."""
    vllm = engine(tmp_path)
    asyncio.run(vllm.start())
    try:
        asyncio.run(vllm.publish(PolicyVersion("agent", 0), None))
        assert asyncio.run(vllm.health()).ok
    finally:
        asyncio.run(vllm.close())


async def test_the_way_up_can_be_watched(tmp_path: Path):
    seen: list[StartProgress] = []
    vllm = engine(tmp_path, on_progress=seen.append)
    await vllm.start()
    await vllm.close()
    assert seen
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    assert seen[-1].log == vllm.log_path
    assert "tool calls are read by 'hermes'" in seen[0].note
    assert not any(p.note for p in seen[1:])


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("dies", r"exit status 1 after .*\n.*\n.*weights are cursed|cursed"),
        ("out-of-memory", r"CUDA out of memory.*\n.*max_batch.*\nlast lines of .*\.log:"),
        ("killed", r"was ended by SIGKILL.*\n.*memory"),
    ],
)
async def test_a_server_that_dies_while_starting_is_an_error_with_its_last_lines(
    tmp_path: Path, mode: str, says: str
):
    """C43."""
    vllm = engine(tmp_path, mode)
    began = time.monotonic()
    with pytest.raises(EngineError, match=says):
        await vllm.start()
    assert time.monotonic() - began < 60
    with pytest.raises(EngineError, match="not been started"):
        _ = vllm.base_url


async def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path):
    """C43."""
    vllm = engine(tmp_path, "never-ready", timeout=2)
    with pytest.raises(EngineError, match=r"start_timeout=2 s(.*\n)+.*loading weights, for ever"):
        await vllm.start()
    process = vllm._keeper.process
    assert process is not None
    assert not alive(process.pid)


async def test_a_start_that_is_cancelled_leaves_nothing_running(tmp_path: Path):
    vllm = engine(tmp_path, "never-ready")
    starting = asyncio.create_task(vllm.start())
    await until(lambda: vllm._keeper.process is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    process = vllm._keeper.process
    assert process is not None
    assert not alive(process.pid)


async def test_a_server_that_dies_and_may_not_be_restarted_is_reported_and_can_be_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """C43."""
    events: list[EngineEvent] = []
    vllm = engine(tmp_path, max_restarts=0, on_event=events.append)
    await vllm.start()
    assert vllm.log_path is not None
    worker = worker_pid(vllm.log_path)
    with pytest.raises(httpx.TransportError):
        httpx.post(vllm.base_url.removesuffix("/v1") + "/die")
    await until(lambda: "vLLM ended with status 3" in caplog.text)
    health = await vllm.health()
    assert not health.ok
    assert "exit status 3" in health.detail
    assert "EngineCore died unexpectedly" in health.detail
    with pytest.raises(EngineError, match=r"exit status 3(.*\n)+.*EngineCore died unexpectedly"):
        await vllm.publish(PolicyVersion("agent", 1), adapter(tmp_path / "a1"))
    await until(lambda: [e.kind for e in events] == ["engine_failed"])
    assert "max_restarts=0" in events[0].message
    assert not alive(worker)

    await vllm.close()
    await vllm.start()
    assert (await vllm.health()).ok
    await vllm.close()


async def test_a_port_in_use_is_named_before_anything_is_started(tmp_path: Path):
    with socket.socket() as taken:
        # A server that allows sharing its port must not be joined, either.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        vllm = engine(tmp_path, port=port)
        with pytest.raises(EngineError, match=rf"port {port} of 127\.0\.0\.1 .*in use"):
            await vllm.start()
    assert vllm.log_path is None


async def test_the_configured_port_is_used(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = engine(tmp_path, port=port)
    await vllm.start()
    try:
        assert vllm.base_url == f"http://127.0.0.1:{port}/v1"
        with pytest.raises(EngineError, match="already runs"):
            await vllm.start()
    finally:
        await vllm.close()


async def test_another_server_at_our_address_is_not_taken_for_ours(tmp_path: Path):
    vllm = engine(tmp_path, "stranger")
    with pytest.raises(EngineError, match=r"another server, which serves \['somebody-else'\]"):
        await vllm.start()


async def test_a_server_that_ignores_being_asked_to_end_is_killed(tmp_path: Path):
    log = tmp_path / "deaf.log"
    python = str(fake_interpreter(tmp_path / "fake", "deaf"))
    entry = ("-m", "vllm.entrypoints.openai.api_server", "--port", "0", "--served-model-name", "agent@0")
    process = ManagedProcess(
        [python, *entry],
        env=dict(os.environ),
        log=log,
        grace=0.5,
    )
    await until(lambda: log.exists() and "worker" in log.read_text())
    worker = worker_pid(log)
    process.close()
    assert process.describe_exit() == "was ended by SIGKILL"
    assert not alive(process.pid)
    assert not alive(worker)


PARENT = """
import asyncio, os, sys, time
from pathlib import Path
from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.vllm import VLLMEngine

vllm = VLLMEngine("m", EngineConfig(python=Path(sys.argv[1])), LoRAConfig(), "agent", Path(sys.argv[2]))
asyncio.run(vllm.start())
if sys.argv[3] != "exits" and os.fork() == 0:
    os.close(1)  # a child of ours that lives on, with a copy of every other pipe
    time.sleep(60)
    os._exit(0)
print(vllm.log_path, flush=True)
if sys.argv[3] != "exits":
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["exits", "is-killed-with-a-fork-left"])
async def test_the_server_does_not_outlive_a_parent_that_ends_or_is_killed(tmp_path: Path, how: str):
    python = fake_interpreter(tmp_path / "fake")
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(python), str(tmp_path / "logs"), how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    try:
        worker = worker_pid(Path(parent.stdout.readline().strip()))
        if how != "exits":
            parent.kill()
        parent.wait(120)
        await until(lambda: not alive(worker))
    finally:
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


async def test_a_killed_guard_does_not_leave_the_server_running(tmp_path: Path):
    log = tmp_path / "sleep.log"
    process = ManagedProcess(["sleep", "600"], env=dict(os.environ), log=log)
    process._guard.kill()
    process._guard.wait()
    process.close()
    await until(lambda: not alive(process.pid))


def test_a_program_that_cannot_be_run_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(EngineError, match=r"cannot run /nowhere/python"):
        ManagedProcess(["/nowhere/python"], env=dict(os.environ), log=tmp_path / "a.log")
