"""Runs inside vLLM's API process: reads tool calls that are bare JSON, with any vocabulary.

Invariant: a stream and a whole answer say the same, and nothing that the model wrote is lost, whatever the
pieces are; what is read is what the embedded engine reads, since the same code does.

Why: vLLM's own ``llama3_json`` refuses every vocabulary without Llama 3's ``<|python_tag|>``, and its streams
drop text that only begins like a call, and do not read lists of calls or calls after a word of content.

vLLM imports this file by its path (``--tool-parser-plugin``), which registers the parser under that name. It
imports nothing of ours but the parser of texts, from the file beside this package, and names vLLM's types
through the module of the parser that it stands for, which knows where they lie in its version.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TEXTS = "art_tool_parsing"


def _load_texts() -> ModuleType:
    """The parser of texts: a file without imports beside the standard library's."""
    path = Path(__file__).resolve().parents[1] / "tool_parsing.py"
    spec = importlib.util.spec_from_file_location(_TEXTS, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_TEXTS] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def build_parser(theirs: Any) -> type[Any]:
    """The parser's class.

    Args:
        theirs: vLLM's module of the parser that this one stands for.
    """
    texts: Any = _load_texts()

    class BareJsonToolParser(theirs.ToolParser):
        """Calls as JSON objects with a name and ``arguments`` or ``parameters``, or as lists of them."""

        engine_based_streaming = True  # vLLM then asks for what is held back when a stream ends

        def __init__(self, tokenizer: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(tokenizer, *arguments, **options)
            self._texts = texts.JsonParser()
            self.prev_tool_call_arr: list[dict[str, Any]] = []
            self.streamed_args_for_tool: list[str] = []

        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            """Content and calls of a whole answer."""
            if _is_text(request):
                return theirs.ExtractedToolCallInformation(
                    tools_called=False, tool_calls=[], content=model_output
                )
            parser = texts.JsonParser()
            content, calls = _apart([*parser.push(model_output), *parser.finish()])
            found = [
                theirs.ToolCall(
                    type="function", function=theirs.FunctionCall(name=c.name, arguments=c.arguments)
                )
                for c in calls
            ]
            return theirs.ExtractedToolCallInformation(
                tools_called=bool(found), tool_calls=found, content=content if not found else content or None
            )

        def extract_tool_calls_streaming(
            self,
            previous_text: str,
            current_text: str,
            delta_text: str,
            previous_token_ids: Sequence[int],
            current_token_ids: Sequence[int],
            delta_token_ids: Sequence[int],
            request: Any,
        ) -> Any:
            """What the newest piece makes certain; None when nothing is."""
            if _is_text(request):
                return theirs.DeltaMessage(content=delta_text) if delta_text else None
            return self._delta(self._texts.push(delta_text))

        def finish_streaming(self) -> Any:
            """What was held back until the end."""
            return self._delta(self._texts.finish())

        def _delta(self, parts: Iterable[Any]) -> Any:
            content, calls = _apart(parts)
            if not content and not calls:
                return None
            deltas: list[Any] = []
            for call in calls:
                deltas.append(
                    theirs.DeltaToolCall(
                        index=len(self.prev_tool_call_arr),
                        type="function",
                        id=theirs.make_tool_call_id(),
                        function=theirs.DeltaFunctionCall(
                            name=call.name, arguments=call.arguments
                        ).model_dump(exclude_none=True),
                    )
                )
                # Some versions compare these at the end, to send what a stream left out.
                self.prev_tool_call_arr.append({"name": call.name, "arguments": json.loads(call.arguments)})
                self.streamed_args_for_tool.append(call.arguments)
            said = {"content": content} if content else {}
            return theirs.DeltaMessage(**said, **({"tool_calls": deltas} if deltas else {}))

    return BareJsonToolParser


def _is_text(request: Any) -> bool:
    """Whether no call is wanted: vLLM then drops those that are read, also where no tools were given."""
    return getattr(request, "tool_choice", None) == "none"


def _apart(parts: Iterable[Any]) -> tuple[str, list[Any]]:
    """Content and calls."""
    found = list(parts)
    content = "".join(part for part in found if isinstance(part, str))
    return content, [part for part in found if not isinstance(part, str)]


def register() -> None:
    """Put the parser into vLLM's registry, in the place of its own of that name."""
    theirs: Any = importlib.import_module("vllm.tool_parsers.llama_tool_parser")
    registry: Any = importlib.import_module("vllm.tool_parsers").ToolParserManager
    registry.register_module(_load_texts().BARE_JSON.name, force=True, module=build_parser(theirs))


if "vllm" in sys.modules:  # imported by vLLM, and not to be looked at
    register()
