"""Choices of people as a file that TRL trains on: the real datasets, chat template and DPOTrainer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from helpers.tiny import tiny_model
from helpers.trajectories import a_step, a_trajectory
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.data_utils import is_conversational

from art_core.errors import RewardError
from art_core.rewards.dpo import export_pairs, preference_pairs
from art_core.rewards.feedback import prefer
from art_core.rewards.labels import Preference, labels_of
from art_core.store import Store
from art_core.types import Scenario, Step, StepIdentity, Trajectory, TrajectoryGroup

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
ASK = ({"role": "system", "content": "you are helpful"}, {"role": "user", "content": "what is the weather"})


def call(arguments: str, number: int = 0) -> dict[str, Any]:
    """An assistant's tool call, as a server spells it."""
    made = {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [made], "refusal": None, "audio": None}


def looked_up(name: str, arguments: str, said: str) -> Trajectory:
    """A run that calls a tool and answers."""
    first = a_step(name, 0, messages=ASK, response=call(arguments), tools=(TOOL,))
    result = {"role": "tool", "tool_call_id": "c0", "content": "nice", "name": None}
    # LangChain re-serialises arguments between the turns.
    again = call(json.dumps(json.loads(arguments), indent=1))
    second = a_step(
        name,
        1,
        messages=(*ASK, again, result),
        response={"role": "assistant", "content": said},
        tools=(TOOL,),
    )
    return run(name, [first, second])


def said(name: str, text: str, scenario: str = "plain", **changes: Any) -> Trajectory:
    step = a_step(name, 0, messages=ASK[1:], response={"role": "assistant", "content": text}, **changes)
    return run(name, [step], scenario)


def run(name: str, steps: Sequence[Step], scenario: str = "weather") -> Trajectory:
    blank = a_trajectory(name, 0, scenario=Scenario(scenario), reward=None)
    return replace(blank, steps=tuple(steps))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two pairs: one with tools of different arguments, one of plain answers."""
    folder = tmp_path_factory.mktemp("dpo")
    runs = [
        looked_up("a", '{"city": "Paris"}', "it is nice"),
        looked_up("b", '{"town": 7}', "no idea"),
        said("c", "the board is empty"),
        said("d", "no"),
    ]
    with Store.open("p", folder) as store:
        for pair in (runs[:2], runs[2:]):
            store.save_group(TrajectoryGroup(pair[0].scenario, tuple(pair)))
        prefer(store, "a", over="b", author="ann")
        prefer(store, "d", over="c", author="ann")
        prefer(store, "c", over="d", author="bob", tie=True)
        pairs = preference_pairs(labels_of(store.feedback()).preferences, store.trajectory)
        assert export_pairs(folder / "pairs.jsonl", pairs) == 2
    return folder / "pairs.jsonl"


def test_rows_hold_the_prompt_once_and_what_each_side_said_after_it(exported: Path):
    first, second = map(json.loads, exported.read_text().splitlines())
    assert [m["role"] for m in first["prompt"]] == ["system", "user"]
    assert [m["role"] for m in first["chosen"]] == ["assistant", "tool", "assistant"]
    assert first["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert first["rejected"][-1] == {"role": "assistant", "content": "no idea"}
    assert json.loads(first["tools"]) == [TOOL]
    assert (second["chosen"][0]["content"], second["rejected"][0]["content"]) == ("no", "the board is empty")
    assert "tools" not in second


@pytest.fixture
def trainer(exported: Path, tmp_path: Path) -> DPOTrainer:
    rows = load_dataset("json", data_files=str(exported), split="train", cache_dir=str(tmp_path / "cache"))
    assert all(is_conversational(row) for row in rows)
    base = tiny_model(tmp_path / "model")
    gpu = torch.cuda.is_available()
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            use_cpu=not gpu,
            report_to=[],
            bf16=False,
            max_length=None,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(base),
    )


def test_datasets_loads_the_file_and_trl_reads_what_the_agents_were_told_and_said(trainer: DPOTrainer):
    told, plain = trainer.train_dataset
    decode = trainer.processing_class.decode
    prompt = decode(told["prompt_ids"])
    assert "you are helpful" in prompt
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    chosen, rejected = decode(told["chosen_ids"]), decode(told["rejected_ids"])
    # Arguments of other names, in other rows and on the other side, leave nothing behind.
    assert '"arguments": {"city": "Paris"}}' in chosen
    assert '"arguments": {"town": 7}}' in rejected
    assert chosen.endswith("it is nice<|im_end|>\n")
    assert decode(plain["chosen_ids"]) == "no<|im_end|>\n"
    assert "<tools>" not in decode(plain["prompt_ids"])
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 4  # two chosen, two rejected


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="TRL's DPO reads log-probabilities in a Triton kernel: needs a GPU"
)
def test_trl_trains_on_the_file(trainer: DPOTrainer):
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    result = trainer.train()
    assert result.training_loss == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are the same
    assert not torch.equal(trainer.model.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    ("better", "worse", "message"),
    [
        (
            said("a", "yes"),
            said("b", "no", scenario="other"),
            "scenarios 'plain' and 'other'; a pair answers one prompt",
        ),
        (
            said("a", "yes"),
            run("b", [a_step("b", messages=ASK)], "plain"),
            "their prompts differ, first at message 1",
        ),
        (said("a", "yes"), said("b", "no", tools=(TOOL,)), "different tools"),
        (said("a", "yes"), run("b", [a_step("b", response=None)], "plain"), "b has no answered call"),
        (
            run("a", [a_step("a", 0, messages=ASK), a_step("a", 1, messages=ASK[1:])]),
            run("b", [a_step("b", messages=ASK)]),
            r"a: its calls are no single conversation \(step s-a-1 does not go on from s-a-0\)",
        ),
    ],
)
def test_a_choice_whose_sides_do_not_answer_one_prompt_is_refused_by_name(
    better: Trajectory, worse: Trajectory, message: str
):
    runs = {"a": better, "b": worse}
    with pytest.raises(RewardError, match=message):
        preference_pairs([Preference("a", "b")], runs.__getitem__)


def test_one_node_of_a_graph_can_be_compared_by_itself():
    def team(name: str, text: str) -> Trajectory:
        plan = a_step(name, 0, messages=ASK, identity=StepIdentity(node="planner"))
        write = a_step(
            name,
            1,
            messages=ASK[1:],
            response={"role": "assistant", "content": text},
            identity=StepIdentity(node="writer"),
        )
        return run(name, [plan, write])

    runs = {"a": team("a", "yes"), "b": team("b", "no")}
    with pytest.raises(RewardError, match="name one node of planner, writer"):
        preference_pairs([Preference("a", "b")], runs.__getitem__)
    [pair] = preference_pairs([Preference("a", "b")], runs.__getitem__, node="writer")
    assert [m["content"] for m in (*pair.chosen, *pair.rejected)] == ["yes", "no"]
    with pytest.raises(RewardError, match=r"a: no step was made in node 'x'"):
        preference_pairs([Preference("a", "b")], runs.__getitem__, node="x")


def test_a_file_without_pairs_is_not_written(tmp_path: Path):
    assert preference_pairs([Preference("a", "b", tie=True)], {}.__getitem__) == []
    with pytest.raises(RewardError, match="no pairs to write"):
        export_pairs(tmp_path / "none.jsonl", [])
    assert not list(tmp_path.iterdir())
