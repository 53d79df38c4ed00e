"""Rollouts captured by their address alone: bare HTTP and stock clients, no LangChain."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_server import FakeVLLM, completion_ids

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_sessions import read_trajectory
from art_core.recording import NullSink, Rollout
from art_core.types import PolicyVersion, RolloutStatus, Step, Trajectory

HI = [{"role": "user", "content": "hi"}]


class Kept(NullSink):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.ended: list[Trajectory] = []

    def append(self, step: Step) -> Any:
        self.steps.append(step)
        return super().append(step)

    def end(self, trajectory: Trajectory) -> Any:
        self.ended.append(trajectory)
        return super().end(trajectory)


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(lambda request: f"re: {request['messages'][-1]['content']}") as server:
        yield server


@pytest.fixture
def sink() -> Kept:
    return Kept()


@pytest.fixture
def gateway(fake: FakeVLLM, sink: Kept) -> Iterator[Gateway]:
    with Gateway(StaticEndpoint(fake.base_url, "m@1", sink=sink)) as started:
        yield started


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=120) as client:
        yield client


def test_a_rollout_over_http_from_start_to_reward(http: httpx.Client, sink: Kept) -> None:
    scenario = {"id": "s-1", "inputs": {"board": "123"}}
    started = http.post("/rollouts", json={"scenario": scenario, "group": "g-1"})
    assert started.status_code == 201
    rollout = started.json()
    client = openai.OpenAI(base_url=rollout["base_url"], api_key="none")
    client.chat.completions.create(model="m", messages=HI)
    list(client.chat.completions.create(model="m", messages=HI, stream=True))
    ended = http.post(f"/rollouts/{rollout['id']}/end", json={"reward": 0.5})
    assert ended.status_code == 200
    trajectory = read_trajectory(ended.content)
    assert trajectory == read_trajectory(http.get(f"/rollouts/{rollout['id']}").content)
    assert (trajectory.reward, trajectory.status) == (0.5, RolloutStatus.FINISHED)
    assert (trajectory.scenario.id, trajectory.scenario.inputs, trajectory.group_id) == (
        "s-1", {"board": "123"}, "g-1",
    )  # fmt: skip
    assert [s.tokens.completion for s in trajectory.steps if s.tokens] == [completion_ids("re: hi")] * 2
    assert [s.identity.call_index for s in trajectory.steps] == [0, 1]
    assert all(s.trainable and s.policy == PolicyVersion("m", 1) for s in trajectory.steps)
    assert [s.id for s in sink.steps] == [s.id for s in trajectory.steps]
    assert [t.id for t in sink.ended] == [trajectory.id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_is_in_its_rollout_before_the_client_has_the_last_byte(gateway: Gateway, stream: bool) -> None:
    rollout = Rollout()
    client = openai.OpenAI(base_url=gateway.register(rollout), api_key="none")
    for number in range(20):
        answer = client.chat.completions.create(model="m", messages=HI, stream=stream)
        if stream:
            list(answer)
        assert len(rollout.steps) == number + 1


async def test_forty_rollouts_at_once_never_mix(gateway: Gateway) -> None:
    """C05."""
    rollouts = [Rollout() for _ in range(40)]

    async def one(number: int) -> None:
        async with openai.AsyncOpenAI(base_url=gateway.register(rollouts[number]), api_key="none") as client:
            for turn in range(3):
                said = [{"role": "user", "content": f"{number}.{turn}"}]
                await client.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]

    await asyncio.gather(*(one(n) for n in range(40)))
    for number, rollout in enumerate(rollouts):
        assert [s.message() for s in rollout.steps] == [f"re: {number}.{t}" for t in range(3)]
        assert {s.rollout_id for s in rollout.steps} == {rollout.id}


def test_an_unknown_rollout_is_a_404_that_says_how_to_start_one(http: httpx.Client) -> None:
    body = {"model": "m", "messages": HI}
    for answer in (
        http.post("/rollouts/t-0/v1/chat/completions", json=body),
        http.get("/rollouts/t-0"),
        http.post("/rollouts/t-0/end", json={"reward": 1}),
    ):
        assert answer.status_code == 404
        assert "no rollout 't-0'" in answer.json()["error"]["message"]
        assert "POST /rollouts" in answer.json()["error"]["message"]


def test_an_ended_rollout_takes_no_calls_and_no_second_end(http: httpx.Client, fake: FakeVLLM) -> None:
    rollout = http.post("/rollouts").json()
    body = {"model": "m", "messages": HI}
    http.post(f"{rollout['base_url']}/chat/completions", json=body)
    http.post(f"/rollouts/{rollout['id']}/end", json={"reward": 1})
    client = openai.OpenAI(base_url=rollout["base_url"], api_key="none", max_retries=2)
    with pytest.raises(openai.ConflictError, match="has ended already"):
        client.chat.completions.create(model="m", messages=HI)
    assert len(fake.bodies) == 1
    again = http.post(f"/rollouts/{rollout['id']}/end", json={"reward": 1})
    assert again.status_code == 409
    assert "has ended already (finished)" in again.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('{"reward": NaN}', "the reward is nan"),
        ('{"reward": "high"}', "reward: Input should be a valid number"),
        ('{"reward": 1, "failure": {"message": "x"}}', "a failure has no reward"),
        ('{"rewards": 1}', "rewards: Extra inputs are not permitted"),
        ("[", "Invalid JSON"),
    ],
)
def test_a_wrong_end_is_refused_and_the_rollout_goes_on(
    http: httpx.Client, body: str, complaint: str
) -> None:
    rollout = http.post("/rollouts").json()
    http.post(f"{rollout['base_url']}/chat/completions", json={"model": "m", "messages": HI})
    refused = http.post(f"/rollouts/{rollout['id']}/end", content=body)
    assert refused.status_code == 400
    assert complaint in refused.json()["error"]["message"]
    assert http.post(f"/rollouts/{rollout['id']}/end", json={"reward": 1}).status_code == 200


def test_a_failed_rollout_keeps_its_steps_and_has_no_reward(http: httpx.Client) -> None:
    """C10."""
    rollout = http.post("/rollouts").json()
    http.post(f"{rollout['base_url']}/chat/completions", json={"model": "m", "messages": HI})
    ended = http.post(f"/rollouts/{rollout['id']}/end", json={"failure": {"message": "the tool broke"}})
    trajectory = read_trajectory(ended.content)
    assert trajectory.failure is not None
    assert (trajectory.failure.message, trajectory.reward) == ("the tool broke", None)
    assert len(trajectory.steps) == 1


def test_a_reward_without_a_single_call_is_a_failure_that_says_where_to_call(http: httpx.Client) -> None:
    """C02."""
    rollout = http.post("/rollouts").json()
    http.post("/v1/chat/completions", json={"model": "m", "messages": HI})
    trajectory = read_trajectory(http.post(f"/rollouts/{rollout['id']}/end", json={"reward": 0}).content)
    assert trajectory.failure is not None
    assert trajectory.failure.cause == "no_policy_calls"
    assert f"/rollouts/{rollout['id']}/v1" in trajectory.failure.message
    assert trajectory.reward is None


def test_a_rollout_may_be_limited_in_its_calls(http: httpx.Client, fake: FakeVLLM) -> None:
    rollout = http.post("/rollouts", json={"max_calls": 1}).json()
    body = {"model": "m", "messages": HI}
    assert http.post(f"{rollout['base_url']}/chat/completions", json=body).status_code == 200
    refused = http.post(f"{rollout['base_url']}/chat/completions", json=body)
    assert refused.status_code == 409
    assert "may make 1 calls" in refused.json()["error"]["message"]
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("kind", ["500", "garbage", "drop", "cut_stream"])
def test_a_failed_call_is_a_step_of_its_rollout(fake: FakeVLLM, gateway: Gateway, kind: str) -> None:
    fake.fail(1.0, [kind])
    rollout = Rollout()
    client = openai.OpenAI(base_url=gateway.register(rollout), api_key="none", max_retries=0)
    with pytest.raises(Exception, match=r"."):
        list(client.chat.completions.create(model="m", messages=HI, stream=True))
    (step,) = rollout.steps
    assert step.error
    assert (step.response, step.tokens) == (None, None)


def test_completions_under_a_prefix_are_not_kept_a_second_time(gateway: Gateway) -> None:
    rollout = Rollout()
    client = openai.OpenAI(base_url=gateway.register(rollout), api_key="none")
    client.chat.completions.create(model="m", messages=HI)
    assert len(gateway.completions) == 0


def test_a_capture_is_handed_out_over_http_once(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "m", "messages": HI}).json()
    assert http.get(f"/captures/{answer['system_fingerprint']}").json()["policy"] == {
        "model": "m",
        "number": 1,
    }
    again = http.get(f"/captures/{answer['system_fingerprint']}")
    assert again.status_code == 404
    assert "was handed out already" in again.json()["error"]["message"]
