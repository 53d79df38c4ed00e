"""A run of a LangGraph agent with all that makes a way through a graph hard to follow, and its training.

A planner sends three searches side by side, one of which fails and is retried; a subgraph writes, checks and
writes again; an editor may send all of it back to the planner. The policy is `FakeVLLM`, over real HTTP; its
tokens are bytes, for which `write_byte_tokenizer` writes a real ``tokenizer.json``. As a script it makes a
store to look at::

    python tests/helpers/branching_run.py ROOT
"""

import itertools
import json
import random
import struct
import sys
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.vllm_server import END as END_TOKEN
from fakes.vllm_server import GENERATE, FakeVLLM, Reply, ToolCall
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy, Send

from art_core.inference.endpoint import PolicyEndpoint, StaticEndpoint
from art_core.store import Store
from art_core.training.trained import CLIPPED, TRAINED, StepTraining
from art_core.types import Scenario, Trajectory
from art_langgraph import ChatART, gather


class State(TypedDict, total=False):
    question: str
    found: Annotated[list[str], add]
    draft: str
    drafts: int
    rounds: int


class Search(TypedDict):
    query: str


@tool
def library(query: str) -> str:
    """Look something up."""
    return f"{query}: three books, none of them newer than 1998."


def branching_graph(model: PolicyEndpoint) -> Any:
    """The graph; every compiled one fails its first search for tea once."""
    llm = ChatART(model, max_retries=0)
    failing = itertools.count()

    def plan(state: State) -> dict[str, Any]:
        llm.invoke([SystemMessage("You plan."), HumanMessage(state["question"])])
        return {"rounds": state.get("rounds", 0) + 1}

    def search(state: Search) -> dict[str, Any]:
        asked = [SystemMessage("You search."), HumanMessage(f"search {state['query']}")]
        answer = llm.bind_tools([library]).invoke(asked)
        if "tea" in state["query"] and next(failing) == 0:
            raise ConnectionError("the library is closed")
        results = [library.invoke(call) for call in answer.tool_calls]
        said = llm.invoke([*asked, answer, *results])
        assert all(isinstance(result, ToolMessage) for result in results)
        return {"found": [said.text]}

    def write(state: State) -> dict[str, Any]:
        asked = [SystemMessage("You write."), HumanMessage("\n".join(state["found"]))]
        return {"draft": llm.invoke(asked).text, "drafts": state.get("drafts", 0) + 1}

    def check(state: State) -> dict[str, Any]:
        llm.invoke([SystemMessage("You check."), HumanMessage(state["draft"])])
        return {}

    def edit(state: State) -> dict[str, Any]:
        return {"draft": state["draft"].strip()}

    def scrap(state: State) -> dict[str, Any]:
        return {"draft": ""}

    desk = StateGraph(State)
    desk.add_node("write", write)
    desk.add_node("check", check)
    desk.add_edge(START, "write")
    desk.add_edge("write", "check")
    desk.add_conditional_edges("check", lambda s: END if s["drafts"] % 2 == 0 else "write", ["write", END])

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("search", search, retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.01))
    graph.add_node("desk", desk.compile())
    graph.add_node("edit", edit)
    graph.add_node("scrap", scrap)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges(
        "plan", lambda s: [Send("search", {"query": q}) for q in ("tea", "milk", "sugar")], ["search"]
    )
    graph.add_edge("search", "desk")
    graph.add_conditional_edges("desk", lambda s: "edit" if s["draft"] else "scrap", ["edit", "scrap"])
    graph.add_conditional_edges("edit", lambda s: "plan" if s["rounds"] < 2 else END, ["plan", END])
    graph.add_edge("scrap", END)
    return graph.compile()


def answers(seed: int = 0) -> Any:
    """What the policy says, by what it is asked."""
    chance = random.Random(seed)

    def reply(request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        system, last = messages[0]["content"], messages[-1]
        if system == "You search." and last["role"] != "tool":
            query = last["content"].removeprefix("search ")
            return Reply(tool_calls=(ToolCall("library", json.dumps({"query": query, "limit": 3})),))
        said = {
            "You plan.": "First tea, then milk, then sugar. " + chance.choice(("Quickly.", "With care.", "")),
            "You search.": f"About {last['content'].split(':')[0]} there are three books.",
            "You write.": "Tea, milk and sugar are in three books; "
            + chance.choice(("read them.", "none is new.")),
            "You check.": chance.choice(("The dates are missing.", "It is well written.")),
        }
        return Reply(text=said[system], reasoning="Is that all?" if system == "You check." else None)

    return reply


def brevity(trajectory: Trajectory, output: Any) -> float:
    """The shorter the better, somewhat."""
    return round(1 / (1 + len(output["draft"]) / 60), 3)


def record(
    store: Store, *, scenarios: int = 2, group_size: int = 4, spans: bool = True, base_model: str = ""
) -> str:
    """Roll the graph out and pretend to have trained on it; the run's id.

    Args:
        store: where to.
        scenarios: how many.
        group_size: rollouts of each.
        spans: whether nodes and tools are traced.
        base_model: what the run says that its base model is.
    """
    run = store.begin_run("agent", {"base_model": base_model})
    with FakeVLLM(answers()) as server:
        model = StaticEndpoint(server.base_url, "agent@3", sink=store.sink(run))
        asked = [
            Scenario(f"tea-{n}", {"question": f"What about tea, {n}?", "found": []}) for n in range(scenarios)
        ]
        groups = gather(
            branching_graph(model), asked, group_size=group_size, reward=brevity, model=model, spans=spans,
            concurrency=1,
        )  # fmt: skip
    assert not groups.failed, groups.failed
    trained: list[StepTraining] = []
    for group in groups:
        store.save_group(group, run_id=run)
        mean = sum(group.rewards) / len(group.rewards)
        for trajectory in group:
            assert trajectory.reward is not None
            store.score(
                trajectory.id,
                trajectory.reward,
                author="ruler:judge",
                explanation="It is short, and says where.",
            )
            trained += _training(trajectory, trajectory.reward - mean)
    store.log_trained(run, 1, trained)
    return run


def _training(trajectory: Trajectory, advantage: float) -> list[StepTraining]:
    chance = random.Random(trajectory.id)
    told: list[StepTraining] = []
    for step in trajectory.steps[:-1]:
        assert step.tokens is not None
        count = len(step.tokens.completion)
        ratios = [chance.choice((1.0, 1.0, 1.05, 0.9, 1.3, 0.6, 2.0)) for _ in range(count)]
        marks = bytes(
            0 if i == count - 1 else TRAINED | (CLIPPED if r > 1.5 else 0) for i, r in enumerate(ratios)
        )
        told.append(StepTraining(step.id, advantage, struct.pack(f"<{count}f", *ratios), marks))
    return told


def write_byte_tokenizer(directory: Path) -> Path:
    """A tokenizer whose ids are bytes, and `FakeVLLM`'s two special tokens; the directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    letters = _letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|generate|>", special=True)]
    )
    assert [tokenizer.token_to_id(t) for t in ("<|end|>", "<|generate|>")] == [END_TOKEN, GENERATE]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _letters() -> list[str]:
    """Byte-level BPE's letter for each byte (Radford et al. 2019, GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def main() -> None:
    root = Path(sys.argv[1])
    with Store.open("branching", root) as store:
        print(record(store, base_model=str(write_byte_tokenizer(root / "tokenizer"))))
        print(record(store, spans=False, scenarios=1))


if __name__ == "__main__":
    main()
