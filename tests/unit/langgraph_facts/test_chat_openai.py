"""What the design takes for granted about ChatOpenAI. One that fails here changes the design."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers.stock_agents import thread
from helpers.stock_openai import answer, openai_model
from helpers.watched_graphs import State, Watcher, one_node
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


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
