"""The mailbox example: its agent before a server that answers badly, and its training as users start it."""

import json
import signal
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall
from helpers.judges import runs, told
from helpers.researcher import SMALL, started, tiny_researcher, train
from rich.console import Console
from transformers import AutoTokenizer

from art_core.errors import OutOfMemoryError
from art_core.inference.endpoint import StaticEndpoint
from art_core.rewards import ToolErrors
from art_core.scoring import Reward
from art_core.store import Store
from art_core.training.report import TrainReport
from art_core.types import Trajectory
from art_langgraph import arollout
from examples.email_research import agent
from examples.email_research import train as script
from examples.email_research.agent import MOST_TURNS, NO_CALL, sampling_agent
from examples.email_research.mailbox import Mailbox, prepared
from examples.email_research.options import parse_options
from examples.email_research.rewards import rules


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mail")


@pytest.fixture(scope="module")
def mailbox(cache: Path) -> Mailbox:
    return prepared(0, cache)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as running:
        yield running


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


async def run(server: FakeVLLM, mailbox: Mailbox, *replies: str | Reply | ToolCall) -> Trajectory:
    """One run of the first question; the model says these, and then answers ``nobody``."""
    said = list(replies)

    def script(request: dict[str, Any]) -> str | Reply | ToolCall:
        return said.pop(0) if said else call("answer", text="nobody", sources=[])

    server.script(script)
    # The fake server's tokens are bytes.
    agent = sampling_agent(StaticEndpoint(server.base_url, "researcher@1"), mailbox, max_tokens=1000)
    scenario = mailbox.scenarios("harbour")[0]
    trajectory = await arollout(agent, replace(scenario, id="first"), reward=rules)
    assert trajectory.failure is None, trajectory.failure
    return trajectory


def results(trajectory: Trajectory) -> list[str]:
    """What the agent was told after each call but the last."""
    return [str(step.messages[-1]["content"]) for step in trajectory.steps[1:]]


async def test_a_run_that_searches_reads_and_answers_is_recorded_token_by_token(
    server: FakeVLLM, mailbox: Mailbox
) -> None:
    asked = mailbox.scenarios("harbour")[0].metadata
    (source,), (words,) = asked["sources"], asked["searches"]
    trajectory = await run(
        server,
        mailbox,
        call("search", query=words),
        call("read", mail_id=source),
        call("answer", text=asked["answer"], sources=[source]),
    )
    assert trajectory.reward == pytest.approx(1.0)
    assert [step.identity.node for step in trajectory.steps] == ["agent"] * 3
    assert all(step.trainable for step in trajectory.steps)
    assert source in results(trajectory)[0]
    assert results(trajectory)[1].startswith(f"{source}, ")
    assert trajectory.metadata["output"]["answer"] == asked["answer"]


async def test_calls_that_make_no_sense_are_explained_and_the_run_goes_on(
    server: FakeVLLM, mailbox: Mailbox
) -> None:
    trajectory = await run(
        server,
        mailbox,
        call("search", words="budget"),
        call("search", query="?"),
        call("search", query="budget", before="Tuesday"),
        call("read", mail_id="m99999"),
        call("delete", mail_id="m1"),
        call("answer", text="nobody"),
    )
    wanted, unknown = results(trajectory)[:4], results(trajectory)[4:6]
    assert wanted == [
        "Error: search was called with wrong arguments: query: Field required",
        "Error: query '?' has no word to search for",
        "Error: before='Tuesday' is no date; write YYYY-MM-DD, such as 2025-03-31",
        "Error: there is no mail 'm99999'; give an id that search has shown, such as m12",
    ]
    assert unknown[0].startswith("Error: delete is not a valid tool")
    assert unknown[1] == "Error: answer was called with wrong arguments: sources: Field required"
    assert ToolErrors().value(trajectory) == pytest.approx(6 / 7)


@pytest.mark.parametrize(
    "reply",
    [
        "Let me think about it.",
        "",
        ToolCall("search", '{"query": "bud'),
        ToolCall("search", '"budget"'),
        ToolCall("search", "[1, 2]"),
    ],
)
async def test_a_turn_without_a_usable_call_is_told_so_and_sent_back_in_a_form_that_servers_take(
    server: FakeVLLM, mailbox: Mailbox, reply: str | ToolCall
) -> None:
    """C08: a call that is no JSON is a step, and no failure."""
    trajectory = await run(server, mailbox, reply)
    assert results(trajectory) == [NO_CALL]
    assert len(trajectory.steps) == 2
    sent = [m for m in trajectory.steps[1].messages if m["role"] == "assistant"]
    assert all(
        isinstance(json.loads(c["function"]["arguments"]), dict)
        for m in sent
        for c in m.get("tool_calls", ())
    )


@pytest.mark.parametrize("given", ["m12", "12", 12, "[m12]", " M12 "])
async def test_a_mail_is_found_by_its_id_however_that_is_written(
    server: FakeVLLM, mailbox: Mailbox, given: str | int
) -> None:
    trajectory = await run(server, mailbox, call("read", mail_id=given))
    assert results(trajectory)[0].startswith("m12, ")


async def test_of_two_answers_in_one_turn_the_first_counts(server: FakeVLLM, mailbox: Mailbox) -> None:
    both = Reply(
        tool_calls=(call("answer", text="one", sources="m1, m2"), call("answer", text="two", sources=[3]))
    )
    trajectory = await run(server, mailbox, both)
    assert trajectory.metadata["output"]["answer"] == "one"
    assert trajectory.metadata["output"]["sources"] == ["m1", "m2"]
    assert len(trajectory.steps) == 1


async def test_a_run_that_never_answers_ends_after_its_turns_and_is_worth_nothing(
    server: FakeVLLM, mailbox: Mailbox
) -> None:
    trajectory = await run(server, mailbox, *["I wonder."] * 20)
    assert len(trajectory.steps) == MOST_TURNS
    assert trajectory.metadata["output"]["answer"] is None
    assert trajectory.reward == 0.0


# -- training ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_researcher(tmp_path_factory.mktemp("researcher") / "model")


def test_training_by_rules_runs_on_the_embedded_engine_and_keeps_its_record(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    warm = ("--warm-start", "expert", "--warm-steps", "1", "--warm-batch", "8")
    figures, printed = train(model, cache, tmp_path, *warm, "--plot", str(tmp_path / "curve.png"))
    assert [e["name"] for e in figures["evaluations"]] == ["as it comes", "warm start", "step 1"]
    assert [e["questions"] for e in figures["evaluations"]] == [2, 2, 2]
    assert [s["step"] for s in figures["steps"]] == [1]
    assert str(tmp_path) not in json.dumps(figures), "it can be published as it is"
    assert figures["ended"] == "all steps"
    assert figures["warm_start"]["runs"] > 200
    for shown in ("held-out inbox", "step 1 of 1: reward", "adapter", "record", "curve"):
        assert shown in printed
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    with Store.open("email-research", tmp_path) as store:
        asked = {t.scenario.inputs["inbox"] for t in store.trajectories(status="finished") if t.group_id}
        assert asked <= {"harbour", "museum", "clinic"}
        assert "clinic" in asked


def test_training_by_ruler_alone_learns_from_the_judge_and_reports_the_rules(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    def judge(request: dict[str, Any]) -> str:
        return told([(name, 0.1 + 0.8 * i) for i, name in enumerate(runs(request["messages"]))])

    with FakeVLLM(judge) as server:
        by_judge = ("--reward", "ruler", "--judge", server.base_url, "--judge-model", "judge")
        figures, _ = train(model, cache, tmp_path, *by_judge)
        assert len(server.bodies) == 2, "one question for each group"
        assert "newest" in server.bodies[0]["messages"][0]["content"], "the rubric"
    (step,) = figures["steps"]
    assert step["reward"] == pytest.approx(0.5)
    assert step["correct"] == 0.0
    assert (step["flat"], step["unscored"]) == (0, 0)
    assert step["kl"] is not None, "something was trained"
    assert figures["judge"]["calls"] == 2
    with Store.open("email-research", tmp_path) as store:
        kept = [t for t in store.trajectories(status="finished") if "ruler" in t.components]
        assert sorted(t.reward or 0.0 for t in kept) == pytest.approx([0.1, 0.1, 0.9, 0.9])


def test_a_signal_ends_the_training_with_a_last_evaluation_and_all_that_was_learnt(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    small = ("--groups", "1", "--held-out", "1")
    endless = (*small, "--steps", "1000", "--plot", str(tmp_path / "curve.png"))
    with started(model, cache, tmp_path, *endless) as running:
        assert running.stdout is not None
        try:
            printed: list[str] = []
            for line in running.stdout:
                printed.append(line)
                if line.startswith("step 1 of 1000: reward"):
                    break
            for _ in range(2):  # as `timeout` does it
                running.send_signal(signal.SIGTERM)
            printed += running.communicate(timeout=280)[0].splitlines(keepends=True)
        except BaseException:
            running.kill()
            raise
    assert running.returncode == 128 + signal.SIGTERM, "".join(printed)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ended"] == "SIGTERM"
    learnt = len(figures["steps"])
    assert learnt >= 1
    assert [(e["name"], e["step"]) for e in figures["evaluations"]] == [
        ("as it comes", 0),
        (f"step {learnt}", learnt),
    ]
    assert (tmp_path / "curve.png").exists()
    assert list(tmp_path.glob("researcher-*/adapter/adapter_model.safetensors"))


# -- training in this process: runs are one turn long, which is quicker -----------------------------------


@pytest.fixture
def one_turn(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(agent, "MOST_TURNS", 1)
    monkeypatch.setenv("ART_MAIL_CACHE", str(cache))


def training(model: Path, out: Path, *options: str) -> script.Training:
    small = (*SMALL, "--groups", "1", "--held-out", "1", "--model", str(model), "--out", str(out))
    given = parse_options([*small, "--json", str(out / "figures.json"), *options])
    return script.Training(given, Console(width=140, quiet=True))


async def test_a_model_without_a_right_answer_of_its_own_is_told_so_and_not_trained(
    model: Path, tmp_path: Path, one_turn: None
) -> None:
    with pytest.raises(
        SystemExit, match=r"none of 8 answers of the model's own was right.*take --warm-start"
    ):
        await training(model, tmp_path, "--warm-start", "own").run()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ended"].startswith("none of 8 answers")
    assert [e["name"] for e in figures["evaluations"]] == ["as it comes"]
    assert figures["warm_start"] is None
    assert figures["steps"] == []


@pytest.mark.parametrize("tool_format", ["json", "model"])
async def test_without_time_for_a_step_the_model_is_measured_and_no_more(
    model: Path, tmp_path: Path, one_turn: None, tool_format: str
) -> None:
    short = ("--warm-start", "expert", "--minutes", "0", "--tool-format", tool_format)
    assert await training(model, tmp_path, *short).run() == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ended"] == "time"
    assert [e["name"] for e in figures["evaluations"]] == ["as it comes"]
    assert figures["warm_start"] is None
    assert figures["options"]["tool_format"] == tool_format
    with Store.open("email-research", tmp_path) as store:
        [asked] = store.trajectories()
    fed = str(AutoTokenizer.from_pretrained(model).decode(list(asked.steps[0].tokens.prompt)))
    assert ("answer with a JSON list of calls" in fed) is (tool_format == "json")
    assert ("<tool_call>" in fed) is (tool_format == "model")


async def test_own_right_answers_are_imitated_and_a_fault_in_training_leaves_an_evaluation(
    model: Path, tmp_path: Path, one_turn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, float] = {}

    async def generous(trajectory: Trajectory, output: Any) -> Reward:
        """The rules, but one run in two is called right, which this model's never are."""
        right = seen.setdefault(trajectory.id, float(len(seen) % 2))
        found = rules(trajectory, output)
        scored = await found if isinstance(found, Awaitable) else found
        assert isinstance(scored, Reward)
        return replace(scored, total=right, components={**scored.components, "correct": right})

    monkeypatch.setattr(script, "rules", generous)
    run = training(model, tmp_path, "--warm-start", "own", "--warm-steps", "1", "--steps", "5")
    really = run.model.atrain

    async def out_of_memory(*args: Any, **kwargs: Any) -> TrainReport:
        if run.steps:
            raise OutOfMemoryError("no room for the second step")
        return await really(*args, **kwargs)

    monkeypatch.setattr(run.model, "atrain", out_of_memory)
    with pytest.raises(OutOfMemoryError):
        await run.run()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["warm_start"]["runs"] == 4, "half of four questions, each asked twice"
    assert figures["warm_start"]["loss"] > 0
    assert figures["ended"] == "OutOfMemoryError: no room for the second step"
    assert [e["name"] for e in figures["evaluations"]] == ["as it comes", "warm start", "step 1"]
