"""Templates that we ship, in transformers' Jinja; their rendering is what is served and what is trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from art_core.inference.chat_templates import CHATML_JSON_TOOLS
from art_core.inference.model_families import choose_parsers, read_facts
from art_core.inference.tool_parsing import BARE_JSON, ParsedCall
from art_core.training.sft import Conversation, conversation_samples

CACHE = Path(__file__).parents[2] / ".cache" / "models"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "«now»", "parameters": {"type": "object"}},
}


def call(city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city, "days": [1, {"of": "}"}]})
    return {"id": city, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(city: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": city, "content": f"{city}: sunny"}


TALK: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [call("Zürich")]},
    result("Zürich"),
    {"role": "assistant", "content": "And two more.", "tool_calls": [call("Oslo"), call("Rome")]},
    result("Oslo"),
    result("Rome"),
    {"role": "assistant", "content": "Sunny everywhere."},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "You are welcome."},
)


def tokenizer() -> PreTrainedTokenizerBase:
    found = tiny_tokenizer()
    found.chat_template = CHATML_JSON_TOOLS.read_text()
    return found


@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["without tools", "with tools"])
@pytest.mark.parametrize("told", [True, False], ids=["with a system message", "without one"])
def test_every_answer_is_told_apart_from_the_prompt_that_a_server_would_feed(
    tools: tuple[Any, ...], told: bool
) -> None:
    """C22"""
    ours = tokenizer()
    samples = conversation_samples(ours, Conversation(TALK if told else TALK[1:], tools))
    answers = [str(ours.decode(s.completion)) for s in samples]
    assert len(answers) == 4
    assert all(a.endswith("<|im_end|>") and a.count("<|im") == 1 for a in answers)
    assert all(str(ours.decode(s.prompt)).endswith("<|im_start|>assistant\n") for s in samples)
    assert all(("get_weather" in str(ours.decode(s.prompt)[:300])) == bool(tools) for s in samples[:1])
    assert ("be brief" in str(ours.decode(samples[-1].prompt))) is told


def test_the_calls_that_it_writes_are_those_that_are_read() -> None:
    ours = tokenizer()
    answers = [str(ours.decode(s.completion)) for s in conversation_samples(ours, Conversation(TALK))]
    read: list[list[str | ParsedCall]] = []
    for answer in answers:
        parser = BARE_JSON.parser()
        read.append([*parser.push(answer.removesuffix("<|im_end|>")), *parser.finish()])
    cities = [[json.loads(p.arguments)["city"] for p in parts if isinstance(p, ParsedCall)] for parts in read]
    assert cities == [["Zürich"], ["Oslo", "Rome"], [], []]
    assert ["".join(p for p in parts if isinstance(p, str)) for parts in read] == [
        "",
        "And two more.",
        "Sunny everywhere.",
        "You are welcome.",
    ]
    [only] = json.loads(answers[0].removesuffix("<|im_end|>"))
    assert only["arguments"]["days"] == [1, {"of": "}"}]
    said, two = answers[1].removesuffix("<|im_end|>").split("\n")
    assert (said, [c["name"] for c in json.loads(two)]) == ("And two more.", ["get_weather"] * 2)


def test_the_model_is_told_of_lists_and_of_what_is_known_of_each_function_alone() -> None:
    """Servers add fields that nobody gave; what is fine-tuned and what is served must not differ by them."""
    bare = {"type": "function", "function": {"name": "now"}}
    filled = {"type": "function", "function": {"name": "now", "description": None, "parameters": None}}
    texts = [
        str(tokenizer().apply_chat_template([TALK[1]], tools=[WEATHER, tool], tokenize=False))
        for tool in (bare, filled)
    ]
    assert texts[0] == texts[1]
    assert (
        'describes one:\n{"name": "get_weather", "description": "«now»", "parameters": {"type": "object"}}\n'
        '{"name": "now"}\n\n'
        "To call a function, answer with a JSON list of calls and nothing else, like this:\n"
        '[{"name": "<function>", "arguments": {"<parameter>": <value>}}]\n'
    ) in texts[0]


def test_results_of_parallel_calls_are_one_user_turn() -> None:
    ours = tokenizer()
    last = str(ours.decode(conversation_samples(ours, Conversation(TALK))[-1].prompt))
    assert last.count("<|im_start|>user") == 4
    assert last.index("Oslo: sunny") < last.index("Rome: sunny")


def test_arguments_that_are_no_json_are_rendered_as_they_were_written() -> None:
    broken = {**call("Oslo"), "function": {"name": "get_weather", "arguments": '{"city": '}}
    [sample] = conversation_samples(
        tokenizer(), Conversation((TALK[1], {"role": "assistant", "content": "", "tool_calls": [broken]}))
    )
    assert str(tokenizer().decode(sample.completion)) == (
        '[{"name": "get_weather", "arguments": {"city": }]<|im_end|>'
    )


def test_it_is_recognised_whatever_the_model() -> None:
    for model in ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "org/unknown"):
        chosen = choose_parsers(read_facts(model, CHATML_JSON_TOOLS))
        assert (chosen.tools, chosen.reasoning) == ("llama3_json", None), chosen.why
        assert "its chat template has no tools" not in chosen.why


def test_qwens_calls_need_no_token_that_was_added_beside_those_that_open_and_close_a_turn() -> None:
    if not (CACHE / "Qwen2.5-tokenizer").is_dir():
        pytest.skip("the tokenizers are not prepared (python examples/prepare_model.py tokenizers)")
    qwen = AutoTokenizer.from_pretrained(CACHE / "Qwen2.5-tokenizer")
    qwen.chat_template = CHATML_JSON_TOOLS.read_text()
    samples = conversation_samples(qwen, Conversation(TALK, (WEATHER,)))
    added = {t for s in samples for t in s.completion if t in qwen.added_tokens_decoder}
    assert added == {qwen.convert_tokens_to_ids("<|im_end|>")}
