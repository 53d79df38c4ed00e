"""Tool calls as bare JSON on a real vLLM, with a vocabulary that its own parser of them refuses."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from helpers.json_tools import WEATHER, check_lesson, json_tools_model
from helpers.tiny import tiny_tokenizer

from art_core.inference.tool_parsing import BARE_JSON, ParsedCall
from art_core.inference.vllm_plugin.art_json_tools import build_parser

CALL = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'


def test_what_is_fine_tuned_is_what_vllm_feeds_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with json_tools_model(tmp_path, kind="vllm", max_batch=4, start_timeout=400.0) as model:
        check_lesson(model, monkeypatch)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """vLLM's module of the parser that ours stands for."""
    return importlib.import_module("vllm.tool_parsers.llama_tool_parser")


def test_vllms_own_parser_wants_a_token_of_llamas(theirs: Any) -> None:
    """Once it does not, ours has no reason any more but its streams."""
    with pytest.raises(RuntimeError, match="python_tag"):
        theirs.Llama3JsonToolParser(tiny_tokenizer())


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"{CALL};\n{CALL}",
        f"Let me look.\n{CALL}",
        '{"name": "get_weather", "arguments": {}}',
        'if (x) { return {"a": 1}; }',
        f"{CALL} and {{",
        f"[{CALL}]",
        f"Let me look.\n[{CALL}, {CALL}] and [1]",
        f"[{CALL}, {CALL}",
        f'[{CALL}, {{"a": 1}}]',
        "see a[0] and [[1]] {x}",
        '{"name": "get_weather", "argu',
        "plain text",
    ],
)
def test_streams_and_whole_answers_say_what_the_embedded_engine_says(
    theirs: Any, text: str, size: int
) -> None:
    """C03"""
    reads = BARE_JSON.parser()
    parts = [*reads.push(text), *reads.finish()]
    calls = [(p.name, p.arguments) for p in parts if isinstance(p, ParsedCall)]
    content = "".join(p for p in parts if isinstance(p, str))
    parser = build_parser(theirs)(tiny_tokenizer())

    whole = parser.extract_tool_calls(text, None)
    assert [(c.function.name, c.function.arguments) for c in whole.tool_calls] == calls
    assert ((whole.content or ""), whole.tools_called) == (content, bool(calls))

    said, made = "", dict[int, tuple[str, str]]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [parser.extract_tool_calls_streaming("", "", p, (), (), (), None) for p in pieces]
    for delta in filter(None, [*deltas, parser.finish_streaming()]):
        said += delta.content or ""
        made |= {c.index: (c.function.name, c.function.arguments) for c in delta.tool_calls or ()}
    assert (said, [made[i] for i in sorted(made)]) == (content, calls)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [WEATHER]}])
@pytest.mark.parametrize("text", [f"[{CALL}, {CALL}]", f"[{CALL}", CALL, f'[{CALL}, {{"a'])
def test_through_vllms_own_hands_nothing_is_lost_with_tools_and_without(
    theirs: Any, text: str, asks: dict[str, Any], stream: bool
) -> None:
    """C08: what only looks like a call is an answer where no tools were given."""
    delegating = importlib.import_module("vllm.parser.abstract_parser").DelegatingParser
    handler = type("Handler", (delegating,), {"tool_parser_cls": build_parser(theirs)})(tiny_tokenizer())
    request = theirs.ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", **asks)
    content, names = "", list[str]()
    if stream:
        for at, piece in enumerate(text):
            ended = at == len(text) - 1
            if (delta := handler.parse_delta(piece, [at], request, [], finished=ended)) is not None:
                content += delta.content or ""
                names += [c.function.name for c in delta.tool_calls or ()]
    else:
        _, said, calls = handler.parse(text, request, enable_auto_tools=True)
        content, names = said or "", [c.name for c in calls or ()]
    reads = BARE_JSON.parser()
    known = [*reads.push(text), *reads.finish()]
    made = [p.name for p in known if isinstance(p, ParsedCall)] if asks == {"tools": [WEATHER]} else []
    assert (content, names) == ("" if made else text, made)
