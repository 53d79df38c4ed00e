"""What the design takes for granted about which calls reach a callback handler.

One that fails here changes the design.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
from helpers.stock_agents import thread
from helpers.watched_graphs import Said, State, Watcher, _ambient, ambient, one_node, says
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.types import Send


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
