"""Tokens that a base model never learned to write are told of before they are imitated."""

import logging
from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import group, step, trajectory
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_core.config import LoRAConfig, TrainConfig
from art_core.training.full_policy import FullPolicy
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.untrained_tokens import FEW, UNTRAINED, rows_alike

CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
ASK = {"role": "user", "content": "weather?"}
CALLS = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
SAYS = [ASK, {"role": "assistant", "content": "hello"}]
CACHE = Path(__file__).parents[2] / ".cache" / "models"
SPREAD = group(*(trajectory(f"{i}", float(i), step(f"{i}", [5, 6], [7 + i, 9])) for i in range(2)))


def write_model(path: Path, *, tied: bool = True, alike: int = 0) -> Path:
    """A tiny model in which that many rows of the head are the one of ``<tool_call>``."""
    tiny_model(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    tag = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<tool_call>")
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        model.lm_head.weight[100 : 100 + alike] = model.lm_head.weight[tag]
    model.save_pretrained(path)
    return path


def trainer(path: Path, **settings: object) -> Trainer:
    policy = PeftPolicy.load(str(path), LoRAConfig(rank=4), dtype="float32")
    return Trainer(policy, TrainConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tag_whose_row_is_that_of_many_others_is_told_of_once(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warm = trainer(write_model(tmp_path, tied=tied, alike=FEW + 4))
    with caplog.at_level(logging.WARNING):
        first, second = (warm.sft([CALLS, SAYS], steps=1) for _ in range(2))
    [event] = first.events
    assert event.kind == UNTRAINED
    assert (event.value, event.limit) == (FEW + 4, FEW)
    assert event.data["tokens"] == [
        {
            "id": warm.policy.tokenizer.convert_tokens_to_ids("<tool_call>"),
            "token": "<tool_call>",
            "alike": 12,
        }
    ]
    for said in ("'<tool_call>' (12 rows)", "CHATML_JSON_TOOLS", "lora=None"):
        assert said in event.message
    assert first.updated
    assert second.events == ()
    assert caplog.messages.count(event.message) == 1


def test_nothing_is_said_of_tags_that_are_like_no_others_or_that_nobody_imitates(tmp_path: Path) -> None:
    healthy = trainer(write_model(tmp_path / "healthy"))
    assert healthy.sft([CALLS, SAYS], steps=1).events == ()
    few = trainer(write_model(tmp_path / "few", alike=FEW))
    assert few.sft([CALLS], steps=1).events == ()
    unused = trainer(write_model(tmp_path / "unused", alike=FEW + 4))
    assert unused.sft([SAYS], steps=1).events == ()


def test_what_is_imitated_beside_rewards_is_looked_at_too(tmp_path: Path) -> None:
    mixed = trainer(write_model(tmp_path, alike=FEW + 4), sft_weight=0.1, epochs=2)
    events = mixed.train([SPREAD], imitate=[CALLS]).events
    assert [event.kind for event in events].count(UNTRAINED) == 1


def test_a_head_that_is_trained_can_learn_them_so_nothing_is_said(tmp_path: Path) -> None:
    policy = FullPolicy.load(str(write_model(tmp_path, alike=FEW + 4)), dtype="float32")
    assert Trainer(policy, TrainConfig()).sft([CALLS], steps=1).events == ()


def test_rows_of_zeros_are_alike_and_a_rows_length_says_nothing() -> None:
    rows = torch.eye(6)
    rows[3:5] = 0
    rows[5] = 2 * rows[0]
    assert rows_alike(rows, [0, 1, 3]) == [1, 0, 1]


@pytest.mark.parametrize(
    ("directory", "head", "untrained", "trained"),
    [
        (
            "Qwen2.5-Coder-0.5B-Instruct",
            "lm_head.weight",
            ("<tool_call>", "</tool_call>", "<|image_pad|>"),
            ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>"),
        ),
        (
            "SmolLM2-135M-Instruct",
            "model.embed_tokens.weight",
            ("<jupyter_start>", "<empty_output>"),
            ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else "",
)
def test_real_models_tokens_are_told_apart_by_their_rows(
    directory: str, head: str, untrained: tuple[str, ...], trained: tuple[str, ...]
) -> None:
    weights = CACHE / directory / "model.safetensors"
    if not weights.exists():
        pytest.skip(f"{directory} is not prepared (python examples/prepare_model.py)")
    tokenizer = AutoTokenizer.from_pretrained(CACHE / directory)
    with safe_open(weights, framework="pt") as model:
        rows = model.get_tensor(head)
    alike = rows_alike(rows, [tokenizer.convert_tokens_to_ids(token) for token in untrained + trained])
    assert all(count > FEW for count in alike[: len(untrained)]), alike
    assert all(count <= FEW for count in alike[len(untrained) :]), alike
