"""Supervised training: which tokens of a conversation are imitated, and that imitation works."""

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model, tiny_tokenizer
from helpers.training import group, same, sample, step, trajectory, weights

from art_core.config import GuardrailConfig, LoRAConfig, TrainConfig
from art_core.errors import ChatTemplateError, ConfigError, NothingToTrainError
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.samples import Sample, fork_rate
from art_core.training.sft import Conversation, conversation_samples, supervised_samples
from art_core.training.token_tree import build_tree

TOKENIZER = tiny_tokenizer()

# What a template of a thinking model does: earlier answers lose their thinking, the last one keeps it.
FORGETFUL = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{{- m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def text(ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(ids)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_the_answer_and_its_end_token_are_imitated_and_the_templates_newline_is_not():
    """C22"""
    [only] = conversation_samples(TOKENIZER, Conversation((user("hello"), assistant("world"))))
    assert text(only.completion) == "world<|im_end|>"
    assert text(only.prompt) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_newlines_of_the_template_after_an_answer_are_context_in_the_next_turn():
    """C22"""
    talk = Conversation((user("a"), assistant("b"), user("c"), assistant("d")))
    first, second = conversation_samples(TOKENIZER, talk)
    assert second.prompt[: len(first.ids)] == first.ids
    tree = build_tree([first, second])
    assert len(tree) == len(second.ids)
    assert [text((int(i),)) for i in tree.token_ids[tree.entries.node]].count("\n") == 0
    assert fork_rate([first, second]) == 0.0


def test_a_template_that_drops_earlier_thinking_forks_and_every_turn_is_imitated_with_its_thinking():
    """C20"""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    talk = Conversation(
        tuple(m for i in range(3) for m in (user(f"{i}"), assistant(f"<think>hm {i}</think>{i}")))
    )
    samples = conversation_samples(tokenizer, talk)
    assert [text(s.completion) for s in samples] == [f"<think>hm {i}</think>{i}<|im_end|>" for i in range(3)]
    assert "hm 0" not in text(samples[1].prompt)
    tree = build_tree(samples)
    assert len(tree.entries) == sum(len(s.completion) for s in samples)
    assert len(set(tree.entries.node.tolist())) == len(tree.entries)
    assert fork_rate(samples) == 2.0


def test_tool_calls_are_imitated_as_the_template_writes_them():
    arguments = {"city": "Paris"}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
    }
    talk = Conversation(
        (user("weather?"), {"role": "assistant", "content": None, "tool_calls": [call]}),
        ({"type": "function", "function": {"name": "get_weather", "parameters": {}}},),
    )
    [only] = conversation_samples(TOKENIZER, talk)
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in text(only.completion)
    assert text(only.completion).endswith("</tool_call><|im_end|>")
    assert "get_weather" in text(only.prompt)


def test_a_template_that_leaves_tool_calls_out_is_refused_instead_of_imitating_what_is_left():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [user("is it cold?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ChatTemplateError, match=r"conversation 0, message 1.*leaves out the call of weather"):
        supervised_samples(tokenizer, [talk])


def test_thoughts_reach_the_template_by_either_name_as_they_do_in_serving():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}|{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for name in ("reasoning", "reasoning_content"):
        [only] = conversation_samples(tokenizer, Conversation((user("a"), {**assistant("b"), name: "hm"})))
        assert text(only.completion) == "hm|b<|im_end|>"


def test_a_template_that_refuses_is_quoted_and_the_conversation_is_named():
    refused = [user("hello"), {"role": "system", "content": "too late"}, assistant("x")]
    with pytest.raises(ChatTemplateError, match=r"conversation 1: .*a system message must come first"):
        supervised_samples(TOKENIZER, [[user("fine"), assistant("fine")], refused])


def test_a_tokenizer_without_a_template_is_an_error_with_a_way_out():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="no chat template; use an instruct model"):
        supervised_samples(tokenizer, [[user("a"), assistant("b")]])


def test_a_template_that_rewrites_the_prompt_once_it_is_answered_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ChatTemplateError, match="message 1: the chat template renders the answered prompt"):
        supervised_samples(tokenizer, [[user("a"), assistant("b")]])


def test_trajectories_are_imitated_by_the_tokens_that_were_sampled():
    """C21"""
    recorded = trajectory("t", None, step("a", [5, 6], [7, 2]), step("b", [5], [8], untrainable="no"))
    samples = supervised_samples(TOKENIZER, [recorded])
    assert [(s.prompt, s.completion) for s in samples] == [((5, 6), (7, 2))]


def test_nothing_to_imitate_is_an_error():
    with pytest.raises(NothingToTrainError, match="1 items hold no assistant message"):
        supervised_samples(TOKENIZER, [[user("alone")]])


@pytest.fixture
def policy(tmp_path: Path) -> PeftPolicy:
    model = tiny_model(tmp_path / "model", layers=1, hidden=256)
    return PeftPolicy.load(str(model), LoRAConfig(rank=4, alpha=8), dtype="float32")


def test_imitation_makes_answers_likely_and_leaves_the_optimizer_of_rewards_alone(policy: PeftPolicy):
    data = [{"messages": [user(f"play {i}"), assistant(str(i))]} for i in range(1, 5)]
    trainer = Trainer(policy, TrainConfig())
    done: list[tuple[int, int]] = []
    report = trainer.sft(
        data, batch_size=2, steps=60, learning_rate=1e-2, progress=lambda *at: done.append(at)
    )
    assert report.metrics["updates"] == 60
    assert done[-1] == (60, 60)
    assert trainer.optimizer.updates == 0
    for item in data:
        [answer] = supervised_samples(policy.tokenizer, [item])
        with torch.no_grad(), policy.using(TRAINING):
            hidden = policy.hidden_states(input_ids=torch.tensor([answer.prompt]), use_cache=False)
            best = int(policy.head(hidden.last_hidden_state[0, -1]).argmax())
        assert best == answer.completion[0]


def test_the_loss_is_the_mean_over_tokens_whatever_the_pieces(policy: PeftPolicy):
    data = [
        Sample((5, 6), (7 + i, 8, 9)[: 1 + i % 3], (None,) * (1 + i % 3), 1.0, f"{i}", f"{i}")
        for i in range(9)
    ]
    before = weights(policy)
    losses = []
    for budget in (1024, 16):
        trainer = Trainer(policy, TrainConfig(token_budget=budget, learning_rate=1e-9))
        losses.append(trainer.sft(data, batch_size=9).metrics["loss"])
    expected = []
    with torch.no_grad(), policy.using(TRAINING):
        for s in data:
            logits = policy.model(input_ids=torch.tensor([s.ids])).logits[0].float().log_softmax(-1)
            expected += [float(logits[len(s.prompt) - 1 + i, t]) for i, t in enumerate(s.completion)]
    assert losses == pytest.approx([-sum(expected) / len(expected)] * 2, abs=1e-4)
    assert not same(before, weights(policy))


def test_dropout_acts_while_imitating_and_never_on_rewards(tmp_path: Path):
    model = tiny_model(tmp_path / "model")
    recorded = [sample([5, 6], [7, 8, 9], step=f"{i}") for i in range(4)]
    games = group(*(trajectory(f"{i}", float(i), step(f"{i}", [5, 6], [7 + i, 9])) for i in range(2)))

    def trainer(dropout: float) -> Trainer:
        policy = PeftPolicy.load(str(model), LoRAConfig(rank=4, dropout=dropout), dtype="float32")
        return Trainer(policy, TrainConfig(learning_rate=1e-2, guardrails=GuardrailConfig(max_kl=None)))

    plain, dropped = trainer(0.0), trainer(0.5)
    for each in (plain, dropped):
        each.train([games])
    assert same(weights(plain.policy), weights(dropped.policy))
    for each in (plain, dropped):
        each.sft(recorded)
    assert not same(weights(plain.policy), weights(dropped.policy))


def test_a_step_longer_than_the_model_attends_over_is_refused(policy: PeftPolicy):
    with pytest.raises(ConfigError, match="a step has 2100 tokens, but this model attends over 2048 at most"):
        Trainer(policy, TrainConfig()).sft([sample([5] * 2099, [6])])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, r"sft\(batch_size=0\): at least 1"),
        ({"steps": 0}, r"sft\(steps=0\): at least 1"),
        ({"epochs": -1}, r"sft\(epochs=-1\): at least 1"),
        ({"learning_rate": -1e-4}, r"sft\(learning_rate=-0\.0001\): above 0"),
        ({"learning_rate": float("nan")}, r"sft\(learning_rate=nan\)"),
        ({"learning_rate": 1e30}, r"sft\(learning_rate=1e\+30\): above 0, and at most 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_trained(
    policy: PeftPolicy, options: dict[str, float], said: str
):
    before = weights(policy)
    with pytest.raises(ConfigError, match=said):
        Trainer(policy, TrainConfig()).sft([sample([5], [6])], **options)
    assert same(before, weights(policy))
