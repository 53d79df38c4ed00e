"""What the design takes for granted about LangGraph and LangChain. One that fails here changes the design."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import add
from typing import Annotated, Any, TypedDict
from uuid import UUID

import httpx
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_core.tracers.context import register_configure_hook
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


class Said(TypedDict, total=False):
    said: Annotated[list[str], add]


class Watcher(BaseCallbackHandler):
    """Keeps the events of chat model calls."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.ends: list[Any] = []
        self.errors: list[dict[str, Any]] = []
        self.chunks: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **event: Any) -> None:
        self.starts.append({"serialized": serialized, **event})

    def on_llm_new_token(self, token: str, **event: Any) -> None:
        self.chunks.append(event.get("chunk"))

    def on_llm_end(self, response: Any, **event: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **event: Any) -> None:
        self.errors.append({"error": error, **event})

    def metadata(self, key: str) -> list[Any]:
        return [start["metadata"].get(key) for start in self.starts]


_ambient: ContextVar[BaseCallbackHandler | None] = ContextVar("facts_ambient", default=None)
register_configure_hook(_ambient, inheritable=True)


@contextmanager
def ambient(handler: BaseCallbackHandler) -> Iterator[None]:
    token = _ambient.set(handler)
    try:
        yield
    finally:
        _ambient.reset(token)


def says(*words: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter([AIMessage(w) for w in words or ["yes"] * 100]))


def one_node(node: Callable[..., Any], **options: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("work", node, **options)
    builder.add_edge(START, "work")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())


def thread(name: str = "1") -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


# -- branches ------------------------------------------------------------------------------------------


def test_only_the_full_checkpoint_namespace_tells_two_branches_of_one_subgraph_apart() -> None:
    model = says()

    def call(state: State) -> State:
        model.invoke("first")
        model.invoke("second")
        return {"said": ["x"]}

    inner = StateGraph(State, output_schema=Said)
    inner.add_node("inner", call)
    inner.add_edge(START, "inner")
    outer = StateGraph(State)
    outer.add_node("work", inner.compile())
    outer.add_conditional_edges(START, lambda state: [Send("work", {"topic": t}) for t in "ab"], ["work"])
    watcher = Watcher()
    outer.compile().invoke({}, {"callbacks": [watcher]})
    assert watcher.metadata("langgraph_node") == ["inner"] * 4
    namespaces = watcher.metadata("langgraph_checkpoint_ns")
    assert len(set(namespaces)) == 2, "two calls in one node share a namespace, two branches do not"
    for namespace in namespaces:
        work, inner_part = namespace.split("|")
        assert UUID(work.removeprefix("work:"))
        assert UUID(inner_part.removeprefix("inner:"))


def test_a_node_retry_runs_under_the_same_namespace_with_the_next_attempt_number() -> None:
    attempts: list[int] = []
    model = says()

    def flaky(state: State) -> State:
        info = get_runtime().execution_info
        assert info is not None
        attempts.append(info.node_attempt)
        model.invoke("go")
        if len(attempts) < 3:
            raise RuntimeError("not yet")
        return {"said": ["done"]}

    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=RuntimeError)
    watcher = Watcher()
    one_node(flaky, retry_policy=policy).invoke({}, {"callbacks": [watcher], **thread()})
    assert attempts == [1, 2, 3]
    assert len(set(watcher.metadata("langgraph_checkpoint_ns"))) == 1


def test_a_resumed_node_runs_again_under_the_same_namespace_as_attempt_one() -> None:
    attempts: list[int] = []
    model = says()

    def ask(state: State) -> State:
        info = get_runtime().execution_info
        assert info is not None
        attempts.append(info.node_attempt)
        model.invoke("draft")
        return {"said": [interrupt("may I?")]}

    watcher = Watcher()
    graph = one_node(ask)
    assert graph.invoke({}, {"callbacks": [watcher], **thread()})["__interrupt__"][0].value == "may I?"
    graph.invoke(Command(resume="yes"), {"callbacks": [watcher], **thread()})
    assert attempts == [1, 1], "only retries are numbered: resumes have to be counted by namespace"
    assert len(set(watcher.metadata("langgraph_checkpoint_ns"))) == 1


# -- what reaches handlers -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["thread", "pool"])
def test_a_bare_thread_in_a_node_gets_no_callbacks_and_no_context_variables(start: str) -> None:
    seen: list[Any] = []
    watcher = Watcher()

    def call() -> None:
        seen.append(_ambient.get())
        says("x").invoke("hi")

    def node(state: State) -> State:
        if start == "pool":
            with ThreadPoolExecutor() as pool:
                pool.submit(call).result()
        else:
            worker = threading.Thread(target=call)
            worker.start()
            worker.join()
        return {"said": ["x"]}

    with ambient(watcher):
        one_node(node).invoke({}, thread())
    assert seen == [None]
    assert watcher.starts == []


def test_an_empty_callback_list_cuts_a_call_off_from_its_parents_handlers() -> None:
    watcher = Watcher()

    def node(state: State) -> State:
        says("x").invoke("hi", {"callbacks": []})
        return {"said": ["x"]}

    one_node(node).invoke({}, {"callbacks": [watcher], **thread()})
    assert watcher.starts == []


def test_an_ambient_handler_still_hears_a_call_with_an_empty_callback_list_but_not_its_parent() -> None:
    watcher = Watcher()

    def node(state: State) -> State:
        says("x").invoke("hi", {"callbacks": []})
        return {"said": ["x"]}

    with ambient(watcher):
        one_node(node).invoke({}, thread())
    assert watcher.metadata("langgraph_node") == ["work"]
    assert watcher.starts[0]["parent_run_id"] is None


def test_an_ambient_handler_reaches_subgraphs_tools_and_parallel_branches() -> None:
    model = says()

    @tool
    def look(what: str) -> str:
        """Look."""
        return str(model.invoke(what).content)

    def call(state: State) -> State:
        return {"said": [look.invoke({"what": state["topic"]})]}

    inner = StateGraph(State, output_schema=Said)
    inner.add_node("inner", call)
    inner.add_edge(START, "inner")
    outer = StateGraph(State)
    outer.add_node("work", inner.compile())
    outer.add_conditional_edges(START, lambda state: [Send("work", {"topic": t}) for t in "abc"], ["work"])
    watcher = Watcher()
    with ambient(watcher):
        outer.compile().invoke({})
    assert len(watcher.starts) == 3
    assert all(start["parent_run_id"] is not None for start in watcher.starts)


def test_an_ambient_handler_that_is_also_passed_by_hand_hears_each_call_once() -> None:
    watcher = Watcher()
    with ambient(watcher):
        says("x").invoke("hi", {"callbacks": [watcher]})
    assert len(watcher.starts) == 1


@pytest.mark.parametrize("inline", [True, False])
async def test_a_sync_handlers_context_variable_reaches_an_async_node_only_when_inline(inline: bool) -> None:
    mark: ContextVar[str] = ContextVar("facts_mark", default="unset")
    seen: list[str] = []

    class Marks(BaseCallbackHandler):
        run_inline = inline

        def on_chain_start(self, *args: Any, **event: Any) -> None:
            mark.set("set")

    async def node(state: State) -> State:
        seen.append(mark.get())
        return {"said": ["x"]}

    await one_node(node).ainvoke({}, {"callbacks": [Marks()], **thread()})
    assert seen == ["set" if inline else "unset"]


@pytest.mark.parametrize("loud", [True, False])
def test_a_handlers_exception_is_swallowed_unless_it_asks_to_raise(loud: bool) -> None:
    class Broken(BaseCallbackHandler):
        raise_error = loud

        def on_chat_model_start(self, *args: Any, **event: Any) -> None:
            raise RuntimeError("broken handler")

    def call() -> str:
        return str(says("fine").invoke("hi", {"callbacks": [Broken()]}).content)

    if loud:
        with pytest.raises(RuntimeError, match="broken handler"):
            call()
    else:
        assert call() == "fine"


# -- calls that end oddly ------------------------------------------------------------------------------


class Stuck(GenericFakeChatModel):
    """Never answers."""

    started: Any = None

    async def _agenerate(self, *args: Any, **options: Any) -> Any:
        self.started.set()
        await asyncio.Event().wait()


async def test_a_cancelled_call_has_a_start_and_no_end() -> None:
    watcher = Watcher()
    stuck = Stuck(messages=iter([]), started=asyncio.Event())
    call = asyncio.create_task(stuck.ainvoke("hi", {"callbacks": [watcher]}))
    await stuck.started.wait()
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert (len(watcher.starts), watcher.ends, watcher.errors) == (1, [], [])


async def test_a_background_task_of_a_node_ends_after_its_graph() -> None:
    watcher = Watcher()
    go_on = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later() -> None:
        await go_on.wait()
        await says("late").ainvoke("hi")

    async def node(state: State) -> State:
        tasks.append(asyncio.create_task(later()))
        return {"said": ["x"]}

    with ambient(watcher):
        await one_node(node).ainvoke({}, thread())
    assert watcher.starts == []
    go_on.set()
    await tasks[0]
    assert len(watcher.ends) == 1


def test_a_cache_hit_has_a_start_and_an_end_but_no_request() -> None:
    requests: list[dict[str, Any]] = []
    model = openai_model(requests, cache=InMemoryCache())
    watcher = Watcher()
    model.invoke("hi", {"callbacks": [watcher]})
    model.invoke("hi", {"callbacks": [watcher]})
    assert (len(watcher.starts), len(watcher.ends), len(requests)) == (2, 2, 1)
    hit = watcher.ends[1].generations[0][0]
    assert hit.message.usage_metadata["total_cost"] == 0, "this is how a hit can be told"
    assert hit.message.response_metadata["system_fingerprint"] == "fp-1", "so a key can come twice"


# -- ChatOpenAI ----------------------------------------------------------------------------------------


def answer(**message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "fp-1",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def openai_model(requests: list[dict[str, Any]], content: str = "hello", **options: Any) -> ChatOpenAI:
    """Stock ChatOpenAI, with only its last hop replaced."""

    def reply(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        requests.append(body)
        if not body.get("stream"):
            return httpx.Response(200, json=answer(content=content))
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        head["system_fingerprint"] = "fp-1"
        deltas: list[tuple[dict[str, Any], str | None]] = [
            ({"role": "assistant", "content": ""}, None),
            ({"content": content}, None),
            ({}, "stop"),
        ]
        events = [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": f}]} for d, f in deltas]
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    transport = httpx.MockTransport(reply)
    return ChatOpenAI(
        model="m",
        base_url="http://policy.test/v1",
        api_key="none",
        http_client=httpx.Client(transport=transport),
        http_async_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
        **options,
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_the_system_fingerprint_reaches_callbacks_streaming_and_not(streaming: bool) -> None:
    watcher = Watcher()
    openai_model([], streaming=streaming).invoke("hi", {"callbacks": [watcher]})
    message = watcher.ends[0].generations[0][0].message
    assert message.response_metadata["system_fingerprint"] == "fp-1"
    assert (message.response_metadata.get("id") == "chatcmpl-1") is not streaming, "streaming loses the id"


def test_the_servers_address_is_in_the_serialized_model() -> None:
    watcher = Watcher()
    openai_model([]).invoke("hi", {"callbacks": [watcher]})
    assert watcher.starts[0]["serialized"]["kwargs"]["openai_api_base"] == "http://policy.test/v1"
    assert watcher.starts[0]["invocation_params"]["model"] == "m"


def test_stream_mode_messages_turns_invoke_into_http_streaming() -> None:
    requests: list[dict[str, Any]] = []
    model = openai_model(requests)

    def node(state: State) -> State:
        return {"said": [str(model.invoke("hi").content)]}

    list(one_node(node).stream({}, thread(), stream_mode="messages"))
    one_node(node).invoke({}, thread())
    assert [bool(r.get("stream")) for r in requests] == [True, False]


async def test_astream_events_turns_ainvoke_into_http_streaming() -> None:
    requests: list[dict[str, Any]] = []
    model = openai_model(requests)

    async def node(state: State) -> State:
        return {"said": [str((await model.ainvoke("hi")).content)]}

    async for _ in one_node(node).astream_events({}, thread(), version="v2"):
        pass
    assert requests[0]["stream"] is True


class Point(BaseModel):
    x: int


def test_structured_output_that_does_not_parse_raises_with_the_response_on_the_error() -> None:
    watcher = Watcher()
    model = openai_model([], content="no json").with_structured_output(Point, method="json_schema")
    with pytest.raises(ValueError, match="Invalid JSON"):
        model.invoke("hi", {"callbacks": [watcher]})
    assert watcher.ends == []
    failed = watcher.errors[0]["response"].generations[0][0].message
    assert failed.response_metadata["body"]["system_fingerprint"] == "fp-1"


def test_tool_arguments_are_written_anew_on_their_way_back_to_the_server() -> None:
    sampled = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":1e3}'}}]
    requests: list[dict[str, Any]] = []
    model = openai_model(requests)
    parsed = model._create_chat_result(answer(content=None, tool_calls=sampled)).generations[0].message
    model.invoke([HumanMessage("hi"), parsed])
    assert requests[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 1000.0}'


class _KeepAlive(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(answer(content="hello")).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_default_async_client_outlives_its_loop_and_fails_on_the_next_one() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _KeepAlive)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
        assert asyncio.run(model.ainvoke("hi")).content == "hello"
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            asyncio.run(model.ainvoke("hi"))
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
