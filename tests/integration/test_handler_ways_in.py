"""The callback handler and other ways in: models without a gateway, and a gateway in another process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.vllm_server import FakeVLLM, ToolCall
from helpers.stock_agents import ask, echo, exact, one_node, stock, thread
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_langgraph.capturing import capture
from art_langgraph.chat_model import ChatART


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(echo) as server:
        yield server


@pytest.fixture
def gateway(fake: FakeVLLM) -> Iterator[Gateway]:
    with Gateway(fake.base_url) as started:
        yield started


# -- other ways in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_art_under_the_handler_is_recorded_once(fake: FakeVLLM, stream: bool) -> None:
    art = ChatART(StaticEndpoint(fake.base_url, "m@1"))
    with capture() as rollout:
        graph = one_node(ask(art))
        if stream:
            list(graph.stream({"topic": "tea"}, thread(), stream_mode="messages"))
        else:
            graph.invoke({"topic": "tea"}, thread())
    (step,) = rollout.steps
    assert exact(step)
    assert step.identity.node == "work"
    assert [s.name for s in rollout.snapshot().spans if s.kind == "llm"] == ["ChatART"]


def test_a_model_without_a_gateway_is_a_step_of_text_that_says_why() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("yes", id="1")]))
    with capture() as rollout:
        one_node(
            lambda state: {"said": [str(model.invoke([("system", "s"), ("user", "u")]).content)]}
        ).invoke({}, thread())
    (step,) = rollout.steps
    assert step.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert step.message() == "yes"
    assert not step.trainable
    assert step.untrainable is not None
    assert "is not served through a gateway" in step.untrainable
    assert step.identity.node == "work"


def test_a_model_that_completes_text_is_a_step_too() -> None:
    with capture() as rollout:
        FakeListLLM(responses=["there"]).invoke("once")
    (step,) = rollout.steps
    assert (step.messages, step.message()) == (({"role": "user", "content": "once"},), "there")
    assert not step.trainable


def test_malformed_tool_calls_are_kept_at_the_level_of_text(fake: FakeVLLM) -> None:
    """C08."""
    fake.script(ToolCall("weather", '{"city": '))
    with capture() as rollout:
        stock(fake.base_url).invoke("hi")
    (step,) = rollout.steps
    assert step.response is not None
    assert step.response["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": '}


def test_a_cache_hit_is_a_step_without_tokens(fake: FakeVLLM, gateway: Gateway) -> None:
    """C02."""
    model = stock(gateway.base_url, cache=InMemoryCache())
    with capture() as rollout:
        model.invoke("tea")
        model.invoke("tea")
    asked, cached = rollout.steps
    assert exact(asked)
    assert cached.untrainable == "cache hit: the policy was not asked"
    assert cached.message() == "re: tea"
    assert len(fake.bodies) == 1


def test_all_choices_of_one_call_are_steps(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.script(lambda request: ["first", "second"])
    with capture() as rollout:
        stock(gateway.base_url, n=2).generate([[HumanMessage("hi")]])
    assert [s.message() for s in rollout.steps] == ["first", "second"]
    assert len({s.call_id for s in rollout.steps}) == 1
    assert rollout.snapshot().faults == {}


def test_calls_under_a_rollouts_prefix_are_not_recorded_twice(gateway: Gateway) -> None:
    with capture() as rollout:
        stock(gateway.register(rollout)).invoke("tea")
    assert [s.message() for s in rollout.steps] == ["re: tea"]
    assert rollout.snapshot().faults == {"recorded_by_prefix": 1}


# -- the gateway in another process --------------------------------------------------------------------

SERVE = """
import sys
from art_core.inference.gateway import Gateway
with Gateway(sys.argv[1]) as gateway:
    print(gateway.base_url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def remote(fake: FakeVLLM) -> Iterator[str]:
    """The base URL of a gateway in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, fake.base_url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.communicate(timeout=120)


async def test_completions_of_a_remote_gateway_are_fetched_before_the_rollout_ends(remote: str) -> None:
    model = stock(remote)
    async with capture() as rollout:
        for topic in "abc":
            await model.ainvoke(topic)
    with capture() as streamed:
        list(model.stream("d"))
    assert [s.message() for s in rollout.steps] == ["re: a", "re: b", "re: c"]
    assert all(exact(s) for s in (*rollout.steps, *streamed.steps))
    assert rollout.snapshot().faults == {}


async def test_a_rollout_without_time_for_background_work_waits_for_the_tokens_of_calls_that_have_ended(
    remote: str,
) -> None:
    async with capture(drain=0) as rollout:
        await stock(remote).ainvoke("a")
    with capture(drain=0) as blocking:
        stock(remote).invoke("b")
    assert [exact(s) for s in (*rollout.steps, *blocking.steps)] == [True, True]
    assert (rollout.snapshot().faults, blocking.snapshot().faults) == ({}, {})


def test_a_gateway_that_cannot_be_reached_leaves_a_step_that_names_it(remote: str) -> None:
    with capture(gateway="http://127.0.0.1:9") as rollout:
        stock(remote).invoke("tea")
    (step,) = rollout.steps
    assert step.message() == "re: tea"
    assert step.untrainable is not None
    assert "the gateway at http://127.0.0.1:9 did not answer" in step.untrainable
    assert rollout.snapshot().faults == {"unjoined_completions": 1}
