"""What a real vLLM goes through in a long run: versions that change under load, and being killed."""

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
import torch
from helpers.engine_endpoint import EngineEndpoint
from langgraph.graph import END, START, StateGraph

from art_core.inference.engine import EngineEvent
from art_core.inference.vllm_stall import read_progress
from art_core.store import Store
from art_core.types import PolicyVersion, Scenario
from art_langgraph import ChatART, agather

from .conftest import Served, alive_in_group

CLIENTS = 16
FIRST = 1001
"""Number of the first version that is published here: other tests have their own."""
LONG = 200
"""Tokens of an answer during which several versions are published, also where a publish is slow."""
GROUP_SIZE = 8
EARLY = 10
"""Publishes after which whatever only grows at first has stopped growing."""


def write_adapter(trainer: Any, directory: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in trainer.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.08)
    directory.parent.mkdir(parents=True)
    trainer.save_weights(directory)


def request(version: PolicyVersion, number: int, **more: Any) -> dict[str, Any]:
    """Short, since the versions are to change often, and adapters cost a CPU most of its speed."""
    asked = {"logprobs": 1, "return_token_ids": True, "max_tokens": 4, "seed": number, **more}
    return {"model": version.name, "prompt": f"Animal {number} is", **asked}


@torch.no_grad()
def mean_difference(trainer: Any, version: PolicyVersion, body: dict[str, Any]) -> float:
    """Mean absolute difference of an answer's logprobs to the trainer's under a version, in nats."""
    (choice,) = body["choices"]
    prompt, sampled = choice["prompt_token_ids"], choice["token_ids"]
    served = torch.tensor(choice["logprobs"]["token_logprobs"])
    ids = torch.tensor([prompt + sampled])
    with trainer.using(version.name):
        hidden = trainer.hidden_states(input_ids=ids).last_hidden_state[0]
        logits = trainer.head(hidden[len(prompt) - 1 : -1]).float()
    mine = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float((served - mine).abs().mean())


class Footprint:
    """What a server's processes hold: open files, and memory in MiB."""

    def __init__(self, group: int) -> None:
        self.files = self.memory = 0
        for pid in alive_in_group(group):
            self.files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.memory += pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def test_many_publishes_under_load_mix_nothing_up_fail_nothing_and_leak_nothing(
    served: Served, tmp_path: Path, pytestconfig: pytest.Config
):
    """C40, C41."""
    engine, trainer = served.engine, served.trainer
    publishes = max(2 * EARLY, pytestconfig.getoption("publishes"))
    endpoint = EngineEndpoint(engine, tmp_path)

    def write(number: int) -> None:
        write_adapter(trainer, endpoint.adapter_dir(number), number)
        # What is pruned here is needed for scoring.
        shutil.copytree(endpoint.adapter_dir(number), tmp_path / "kept" / str(number), copy_function=os.link)

    write(FIRST)
    await endpoint.publish(FIRST)
    answers: list[tuple[PolicyVersion, dict[str, Any]]] = []
    answered: Counter[PolicyVersion] = Counter()
    stop = asyncio.Event()
    url = f"{engine.base_url}/completions"

    async with httpx.AsyncClient(timeout=300) as http:

        async def client(number: int) -> None:
            while not stop.is_set():
                with endpoint.lease() as version:
                    response = await http.post(url, json=request(version, number))
                assert response.status_code == 200, response.text
                answered[version] += 1
                if answered[version] == 1:
                    answers.append((version, response.json()))
                number += CLIENTS

        async def ask_long() -> tuple[dict[str, Any], int]:
            """A long answer of the first version, and how many versions were published meanwhile."""
            body = request(PolicyVersion("agent", FIRST), 0, max_tokens=LONG, ignore_eos=True)
            with endpoint.lease():
                answer = await http.post(url, json=body)
                return answer.json(), endpoint.current_version().number - FIRST

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client(number)) for number in range(CLIENTS)]
            long = group.create_task(ask_long())
            began, seconds = time.monotonic(), []
            while not answered[endpoint.current_version()]:
                await asyncio.sleep(0.02)
            for number in range(FIRST + 1, FIRST + publishes):
                await asyncio.to_thread(write, number)
                if number == FIRST + publishes - 3:
                    await asyncio.wait([long])  # so that its version goes while the last ones come
                before = time.monotonic()
                await endpoint.publish(number)
                seconds.append(time.monotonic() - before)
                while not answered[endpoint.current_version()]:
                    await asyncio.sleep(0.02)
                if number == FIRST + EARLY:
                    early = Footprint(engine.pid)
            stop.set()
        took = time.monotonic() - began
        late = Footprint(engine.pid)
        names = [c["id"] for c in (await http.get(f"{engine.base_url}/models")).json()["data"]]
        progress = read_progress((await http.get(engine.base_url.removesuffix("v1") + "metrics")).text)
    assert all(task.done() for task in clients)
    assert progress is not None, "a stuck engine would not be seen"
    assert progress.steps > publishes

    # Everything was answered, each version by itself, also the long one: without it, its version would have
    # left the server when the second one after it was published.
    long_answer, outlived = long.result()
    assert outlived >= 2, "the long answer was too quick to need its version kept"
    answers.append((PolicyVersion("agent", FIRST), long_answer))
    assert len(answered) == publishes
    differences = []
    for number in range(FIRST, FIRST + publishes):
        version = PolicyVersion("agent", number)
        trainer.snapshot(version.name, tmp_path / "kept" / str(number))
        for said_to_be, body in answers:
            if said_to_be == version:
                assert body["model"] == version.name
                differences.append(mean_difference(trainer, version, body))
        if number == FIRST + 7:
            other = mean_difference(trainer, version, long_answer)
        trainer.drop(version.name)
    mean = sum(differences) / len(differences)
    print(
        f"{publishes} publishes and {answered.total()} answers in {took:.0f} s; a publish took "
        f"{sum(seconds) / len(seconds):.2f} s, at most {max(seconds):.2f}; logprobs differ from the "
        f"trainer's by {mean:.4f} nats, at most {max(differences):.3f}, and by {other:.2f} from another "
        f"version's; the long answer outlived {outlived} versions; files {early.files} -> {late.files}, "
        f"MiB {early.memory} -> {late.memory}"
    )
    assert len(long_answer["choices"][0]["token_ids"]) == LONG
    assert mean < 0.1
    assert max(differences) < 0.8
    assert other > 4 * mean

    # Nothing stays: not in the server, not on disk, no files and no memory.
    last = FIRST + publishes - 1
    ours = [name for name in names if name.startswith("agent@1")]
    assert ours == ["agent@1", f"agent@{last - 1}", f"agent@{last}"]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert late.files <= early.files + CLIENTS
    assert late.memory < early.memory + 100
    for number in (last - 1, last):
        await engine.retire(PolicyVersion("agent", number))


class State(TypedDict):
    topic: str
    said: list[str]


def build(llm: ChatART) -> Any:
    async def ask(state: State) -> State:
        answer = await llm.ainvoke(f"{state['topic']}, part {len(state['said'])}")
        return {"topic": state["topic"], "said": [*state["said"], answer.text]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda s: "ask" if len(s["said"]) < 2 else END, ["ask", END])
    return graph.compile()


def server_process(pid: int) -> int:
    """The whole server's first process, which answers HTTP."""
    return pid


def engine_process(pid: int) -> int:
    """The one that computes, without which the first one gives up."""
    (found,) = [p for p in alive_in_group(pid) if "VLLM::Engine" in Path(f"/proc/{p}/comm").read_text()]
    return found


@pytest.mark.timeout(3600)
async def test_a_vllm_that_is_killed_again_and_again_during_rollouts_costs_time_and_nothing_else(
    served: Served, tmp_path: Path, pytestconfig: pytest.Config
):
    """C43."""
    engine, kills = served.engine, pytestconfig.getoption("kills")
    scenarios = max(4, 5 * kills // 2)
    rollouts = GROUP_SIZE * scenarios
    store = Store.open("chaos", tmp_path)
    run = store.begin_run("agent", {})

    def keep(event: EngineEvent) -> None:
        store.add_event(run, event.kind, event.message, event.data)

    engine.on_event = keep
    endpoint = EngineEndpoint(engine, tmp_path, sink=store.sink(run))
    write_adapter(served.trainer, endpoint.adapter_dir(900), 900)
    await endpoint.publish(900)
    ended = 0

    def count(progress: Any) -> None:
        nonlocal ended
        ended = progress.done

    async def kill(after: int, which: Callable[[int], int]) -> None:
        while ended < after or not engine.versions():
            await asyncio.sleep(0.05)
        os.kill(which(engine.pid), signal.SIGKILL)

    try:
        victims = [
            asyncio.create_task(
                kill((2 * i + 1) * rollouts // (2 * kills), (server_process, engine_process)[i % 2])
            )
            for i in range(kills)
        ]
        groups = await agather(
            build(ChatART(endpoint, max_tokens=8, max_retries=0)),
            [
                Scenario(id=f"s{i}", inputs={"topic": f"Tell me about {i}", "said": []})
                for i in range(scenarios)
            ],
            group_size=GROUP_SIZE,
            reward=lambda trajectory: float(len(trajectory.steps)),
            concurrency=8,
            sink=endpoint.sink,
            progress=count,
        )
        for task in victims:
            task.cancel()
        assert [len(group) for group in groups] == [GROUP_SIZE] * scenarios
        assert not groups.failed
        for trajectory in (t for group in groups for t in group):
            kept = store.trajectory(trajectory.id)
            assert len(kept.steps) == 2
            assert all(step.trainable for step in kept.steps)
            assert {step.policy for step in kept.steps} == {PolicyVersion("agent", 900)}
        restarts = store.events(run, "engine_restarted")
        print([(event.data["seconds"], event.data["cause"]) for event in restarts])
        assert len(restarts) == kills
        for number, event in enumerate(restarts):
            ended_by_us = event.data["cause"] == "vLLM was ended by SIGKILL: killed from outside"
            assert ended_by_us or number % 2, (
                "the server's death is known at once, its engine's by the server"
            )
            assert event.data["cause"].startswith("vLLM ")
        assert all("agent@900" in event.data["versions"] for event in restarts)
        assert all(Path(event.data["log"]).exists() for event in restarts)
    finally:
        engine.on_event = None
        await engine.retire(PolicyVersion("agent", 900))
        store.close()
