"""Parsers: how vLLM reads tool calls and reasoning out of what a model writes, by model family.

Invariant: the tables hold only names that every supported vLLM has or that `choose_parsers` may leave out;
a name that was asked for and that the server does not know is refused before the server starts.

The chat template comes first, because it is what tells the model how to write a call: fine-tuned models
keep their base's architecture, but not always its format. Where the template shows no tools, or cannot be
read, the kind of model in ``config.json`` and the model's name decide; where neither is known, hermes, the
most common format.

Formats and names follow vLLM's documentation of tool calling and of reasoning outputs.
"""
# ruff: noqa: RUF001 - DeepSeek writes its markers with full-width bars

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from art_core.errors import ConfigError

TEMPLATE_FILE = "chat_template.jinja"
"""Where a model's directory keeps its chat template; wins over the one in the tokenizer's settings."""
AUTO = "auto"
FALLBACK = "hermes"
"""Reads calls where neither template nor family is known; requests without tools are not touched by it."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write tool calls, recognised by texts that a chat template of it contains.

    Attributes:
        parser: vLLM's name of what reads it.
        markers: all of them stand in the template.
        model_types: only these kinds of model; empty: any.
    """

    parser: str
    markers: tuple[str, ...]
    model_types: tuple[str, ...] = ()


BARE_JSON_MARKER = "tool calls: bare JSON"
"""In a template, a comment for example: the model is to write its calls as JSON alone, a list or objects."""

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("llama3_json", (BARE_JSON_MARKER,)),
    ToolFormat("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ToolFormat("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ToolFormat("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ToolFormat("deepseek_v32", ("｜DSML｜",)),
    ToolFormat("step3p5", ("<function=", "<parameter="), ("step3p5",)),
    ToolFormat("qwen3_coder", ("<tool_call>", "<function=")),
    ToolFormat("seed_oss", ("<seed:tool_call>",)),
    ToolFormat("minimax_m2", ("<minimax:tool_call>",)),
    ToolFormat("glm45", ("<arg_key>", "<tool_call>")),
    ToolFormat("longcat", ("<longcat_tool_call>",)),
    ToolFormat("functiongemma", ("<start_function_call>",)),
    ToolFormat("gemma4", ("<|tool_call>",)),
    ToolFormat("apertus", ("<|tools_prefix|>",)),
    ToolFormat("lfm2", ("<|tool_call_start|>",)),
    ToolFormat("olmo3", ("<function_calls>",), ("olmo2", "olmo3")),
    ToolFormat("mistral", ("[TOOL_CALLS]",)),
    ToolFormat("openai", ("<|channel|>", "functions.")),
    ToolFormat("phi4_mini_json", ("<|tool_call|>",), ("phi3", "phi4")),
    ToolFormat("granite", ("<|tool_call|>",), ("granite",)),
    ToolFormat("granite4", ("<tool_call>",), ("granitemoehybrid",)),
    ToolFormat("ernie45", ("<tool_call>",), ("ernie4_5", "ernie4_5_moe")),
    ToolFormat("hermes", ("<tool_call>",)),
    ToolFormat("internlm", ("<|action_start|>",)),
    ToolFormat("hunyuan_a13b", ("<tool_calls>",), ("hunyuan_v1_moe", "hunyuan_v1_dense")),
    ToolFormat("jamba", ("<tool_calls>",), ("jamba",)),
    ToolFormat("llama4_pythonic", ("ipython",), ("llama4", "llama4_text")),
    ToolFormat("llama3_json", ("ipython", '"parameters"')),
)
"""First match wins: those with more, or rarer, markers come before those that share one with them."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that write alike.

    Attributes:
        name: as people say it.
        model_types: ``model_type`` of their ``config.json``.
        pattern: found in their names, whatever the case.
        tools: the parser of their tool calls.
        reasoning: the parser of their reasoning, for those of them that reason; None: none does.
        always_reasons: whether all of them do, whatever their templates show.
    """

    name: str
    model_types: tuple[str, ...]
    pattern: str
    tools: str
    reasoning: str | None = None
    always_reasons: bool = False


FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily("gpt-oss", ("gpt_oss",), r"gpt-?oss", "openai", "openai_gptoss", True),
    ModelFamily("Kimi K2", ("kimi_k2",), r"kimi-?k2", "kimi_k2", "kimi_k2"),
    ModelFamily("DeepSeek V3.2", ("deepseek_v32",), r"deepseek-?v3\.2", "deepseek_v32", "deepseek_v3"),
    ModelFamily("DeepSeek V3.1", (), r"deepseek-?v3\.1", "deepseek_v31", "deepseek_v3"),
    ModelFamily("DeepSeek R1", (), r"deepseek-?r1(?!-distill)", "deepseek_v3", "deepseek_r1"),
    ModelFamily("DeepSeek R1 distilled", (), r"r1-distill", FALLBACK, "deepseek_r1"),
    ModelFamily("DeepSeek V3", ("deepseek_v3",), r"deepseek-?v3", "deepseek_v3", "deepseek_r1"),
    ModelFamily("QwQ", (), r"\bqwq\b", "hermes", "deepseek_r1"),
    ModelFamily("Qwen3-Coder", (), r"qwen3-?coder", "qwen3_coder"),
    ModelFamily(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        r"qwen-?3\.5",
        "qwen3_coder",
        "qwen3",
    ),
    ModelFamily("Qwen3", ("qwen3", "qwen3_moe", "qwen3_next"), r"qwen-?3", "hermes", "qwen3"),
    ModelFamily("Qwen2.5", ("qwen2", "qwen2_moe"), r"qwen-?2", "hermes", "deepseek_r1"),
    ModelFamily("Hermes", (), r"hermes", "hermes"),
    ModelFamily("Llama 4", ("llama4", "llama4_text"), r"llama-?4", "llama4_pythonic"),
    ModelFamily("Llama 3", (), r"llama-?3", "llama3_json"),
    ModelFamily(
        "Mistral",
        ("mistral", "mistral3", "ministral3", "mixtral"),
        r"mistral|ministral|magistral|devstral|mixtral",
        "mistral",
        "mistral",
    ),
    ModelFamily("FunctionGemma", (), r"function-?gemma", "functiongemma"),
    ModelFamily("Gemma 4", ("gemma4", "gemma4_text"), r"gemma-?4", "gemma4", "gemma4"),
    ModelFamily("Gemma 3", ("gemma3", "gemma3_text", "gemma3n", "gemma2"), r"gemma", "pythonic"),
    ModelFamily("GLM-4", ("glm4_moe", "glm4_moe_lite"), r"glm-?4\.[5-9]", "glm45", "glm45"),
    ModelFamily("MiniMax M2", ("minimax_m2",), r"minimax-?m2", "minimax_m2", "minimax_m2"),
    ModelFamily("Nemotron 3", ("nemotron_h",), r"nemotron-?3", "qwen3_coder", "nemotron_v3"),
    ModelFamily("Seed-OSS", ("seed_oss",), r"seed-?oss", "seed_oss", "seed_oss"),
    ModelFamily("Olmo 3", ("olmo3",), r"olmo-?3", "olmo3", "olmo3"),
    ModelFamily("Granite 4", ("granitemoehybrid",), r"granite-?4", "granite4"),
    ModelFamily("Granite 3", ("granite", "granitemoe"), r"granite-?3", "granite", "granite"),
    ModelFamily("Phi-4-mini", ("phi3",), r"phi-?4-?mini", "phi4_mini_json"),
    ModelFamily("LFM2", ("lfm2", "lfm2_moe"), r"lfm2", "lfm2"),
    ModelFamily("SmolLM3", ("smollm3",), r"smollm3", "hermes", "qwen3"),
    ModelFamily("Apertus", ("apertus",), r"apertus", "apertus"),
    ModelFamily("Step 3", ("step3_text", "step3_vl"), r"step-?3\b", "step3", "step3"),
    ModelFamily(
        "Hunyuan", ("hunyuan_v1_moe", "hunyuan_v1_dense"), r"hunyuan", "hunyuan_a13b", "hunyuan_a13b"
    ),
    ModelFamily("ERNIE 4.5", ("ernie4_5", "ernie4_5_moe"), r"ernie-?4\.?5", "ernie45", "ernie45"),
)
"""First match wins, the name before the kind of model: ``qwen3_moe`` is Qwen3's and Qwen3-Coder's."""

_REASONS = re.compile(r"<think>")
_REASONS_ANYWHERE = re.compile(r"\[THINK\]|<seed:think>|<\|channel\|?>")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about a model without loading it.

    Attributes:
        name: as it was given, a hub name or a directory.
        model_type: of its ``config.json``; empty when there is none.
        template: its chat template, or the one that is served in its place; None when none was found.
    """

    name: str
    model_type: str = ""
    template: str | None = None

    @property
    def family(self) -> ModelFamily | None:
        """The family that its name or its kind belongs to."""
        name = Path(self.name).name if Path(self.name).is_dir() else self.name
        for family in FAMILIES:
            if re.search(family.pattern, name, re.IGNORECASE):
                return family
        return next((f for f in FAMILIES if self.model_type in f.model_types), None)

    @property
    def reasons(self) -> bool:
        """Whether it is asked to reason: the template's generation prompt opens, or may open, a thought."""
        template = self.template or ""
        # A <think> in past turns says nothing: many templates strip thoughts that they never ask for.
        generation = template[max(0, template.rfind("add_generation_prompt")) :]
        return bool(_REASONS.search(generation) or _REASONS_ANYWHERE.search(template))


@dataclass(frozen=True, slots=True)
class Parsers:
    """What reads a model's answers.

    Attributes:
        tools: vLLM's ``--tool-call-parser``; None: requests with tools are refused.
        reasoning: vLLM's ``--reasoning-parser``; None: reasoning stays in the content.
        why: a sentence for the log.
    """

    tools: str | None
    reasoning: str | None
    why: str


def read_facts(base_model: str, chat_template: Path | None = None) -> ModelFacts:
    """Read what a model's directory, or the hub's local cache, says about it; nothing is fetched.

    Args:
        base_model: a hub name or a directory.
        chat_template: a file that is served in place of the model's own template.

    Raises:
        ConfigError: ``chat_template`` cannot be read.
    """
    config = _read_json(base_model, "config.json")
    model_type = str(config.get("model_type") or "")
    template = _own_template(base_model) if chat_template is None else read_template(chat_template)
    return ModelFacts(base_model, model_type, template)


def read_template(chat_template: Path) -> str:
    """The text of a template that is named in place of a model's own.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as unreadable:
        why = unreadable.strerror if isinstance(unreadable, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"EngineConfig.chat_template={chat_template}: {why}; name a readable Jinja file"
        ) from unreadable


def choose_parsers(
    facts: ModelFacts,
    *,
    tools: str | None = AUTO,
    reasoning: str | None = AUTO,
    known_tools: Collection[str] = (),
    known_reasoning: Collection[str] = (),
) -> Parsers:
    """Which parsers to serve a model with.

    Args:
        facts: of the model.
        tools: ``auto``, a name, or None for none.
        reasoning: likewise.
        known_tools: names that the server knows; empty when it could not be asked.
        known_reasoning: likewise.

    Raises:
        ConfigError: a name that the server does not know.
    """
    _check_known("tool_call_parser", tools, known_tools)
    _check_known("reasoning_parser", reasoning, known_reasoning)
    said: list[str] = []
    if tools == AUTO:
        tools, why = _tools_of(facts)
        if known_tools and tools not in known_tools:
            why = f"{why}, which this vLLM does not have as {tools!r}, so the most common format"
            tools = FALLBACK
        said.append(f"tool calls are read by {tools!r} ({why})")
    else:
        said.append(f"tool calls are read by {tools!r} (as configured)" if tools else "tools are refused")
    if reasoning == AUTO:
        reasoning, why = _reasoning_of(facts)
        if reasoning and known_reasoning and reasoning not in known_reasoning:
            reasoning, why = None, f"this vLLM has no {reasoning!r}"
        said.append(f"reasoning by {reasoning!r} ({why})" if reasoning else f"reasoning is not split ({why})")
    elif reasoning:
        said.append(f"reasoning by {reasoning!r} (as configured)")
    return Parsers(tools, reasoning, "; ".join(said))


def _tools_of(facts: ModelFacts) -> tuple[str, str]:
    template = facts.template or ""
    for known in TOOL_FORMATS:
        kind_fits = not known.model_types or facts.model_type in known.model_types
        if kind_fits and all(marker in template for marker in known.markers):
            return known.parser, f"the chat template shows {known.markers[0]}"
    family = facts.family
    chosen, why = (family.tools, f"the model is a {family.name}") if family else (FALLBACK, "unknown family")
    if facts.template is not None and not re.search(r"\btools\b", facts.template):
        # Said, because nothing fails: the model just never hears of the tools.
        why += "; its chat template has no tools, so it is never told of any: see EngineConfig.chat_template"
    return chosen, why


def _reasoning_of(facts: ModelFacts) -> tuple[str | None, str]:
    family = facts.family
    if family is not None and family.always_reasons:
        return family.reasoning, f"the model is a {family.name}"
    if facts.template is None:
        return None, "no chat template was found"
    if not facts.reasons:
        return None, "the chat template asks for none"
    if family is not None and family.reasoning is not None:
        return family.reasoning, f"the model is a {family.name} and its template asks for it"
    parser = "qwen3" if "enable_thinking" in facts.template else "deepseek_r1"
    return parser, "the chat template opens with <think>"


def _check_known(setting: str, name: str | None, known: Collection[str]) -> None:
    if name is None or name == AUTO or not known or name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"EngineConfig.{setting}={name!r}: this vLLM has no such parser; {meant}"
        f"'auto' chooses by model; known: {', '.join(sorted(known))}"
    )


def has_token(base_model: str, token: str) -> bool:
    """Whether a model's vocabulary is known to hold a special token; False where nothing is known of it."""
    path = _file(base_model, "tokenizer.json")
    return path is not None and json.dumps(token).encode() in path.read_bytes()


def _own_template(base_model: str) -> str | None:
    if (path := _file(base_model, TEMPLATE_FILE)) is not None:
        return path.read_text()
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _read_json(base_model, name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):  # several, by name: with tools, vLLM takes tool_use
            named = {t["name"]: t["template"] for t in cast("list[dict[str, str]]", template)}
            return named.get("tool_use") or named.get("default")
    return None


def _read_json(base_model: str, name: str) -> Mapping[str, Any]:
    path = _file(base_model, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # vLLM reads it too, and says what is wrong with it
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}


def _file(base_model: str, name: str) -> Path | None:
    """A file of the model, in its directory or in the hub's local cache, where the trainer left it."""
    if Path(base_model).is_dir():
        path = Path(base_model) / name
        return path if path.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # only another environment has the hub's client: then the name must do
        return None
    try:
        found = try_to_load_from_cache(base_model, name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
