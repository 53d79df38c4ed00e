import json
from pathlib import Path

import pytest
from fakes.vllm_interpreter import fake_interpreter

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.chat_templates import CHATML_JSON_TOOLS
from art_core.inference.model_families import Parsers
from art_core.inference.processes import log_tail
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_command import (
    InstalledVLLM,
    installed_vllm,
    lora_slot_rank,
    server_arguments,
    server_environment,
)
from art_core.inference.vllm_faults import find_fault
from art_core.types import PolicyVersion

CPU = InstalledVLLM(Path("/opt/env/bin/python"), "0.32.0", cpu=True)
CUDA = InstalledVLLM(Path("/opt/env/bin/python"), "0.32.0", cpu=False)


def arguments(
    installed: InstalledVLLM = CPU, base_model: str = "org/model", tools: str = "hermes", **settings
) -> list[str]:
    return server_arguments(
        installed,
        base_model=base_model,
        served_model="agent",
        config=EngineConfig(**settings),
        lora=LoRAConfig(rank=12),
        port=4711,
        parsers=Parsers(tools, None, ""),
    )


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_base_model_answers_as_version_0_and_under_the_bare_name():
    command = arguments()
    at = command.index("--served-model-name")
    assert command[at + 1 : at + 3] == ["agent@0", "agent"]


def test_settings_reach_the_command_line():
    command = arguments(max_model_len=777, max_batch=5, max_loras=3, dtype="float32", host="127.0.0.2")
    assert value(command, "--max-model-len") == "777"
    assert value(command, "--max-num-seqs") == "5"
    assert value(command, "--max-loras") == "3"
    assert value(command, "--dtype") == "float32"
    assert value(command, "--host") == "127.0.0.2"
    assert value(command, "--port") == "4711"
    assert value(command, "--max-lora-rank") == "16"


def test_parallelism_and_a_template_reach_the_command_line_when_asked_for(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    command = arguments(CUDA, tensor_parallel_size=2, data_parallel_size=4, chat_template=template)
    assert value(command, "--tensor-parallel-size") == "2"
    assert value(command, "--data-parallel-size") == "4"
    assert value(command, "--chat-template") == str(template)
    assert not {"--tensor-parallel-size", "--data-parallel-size", "--chat-template"} & set(arguments(CUDA))


def test_bare_json_is_read_by_our_parser_unless_vocabulary_and_template_are_llamas(tmp_path: Path):
    assert Path(value(arguments(tools="llama3_json"), "--tool-parser-plugin")).is_file()
    assert "--tool-parser-plugin" not in arguments(tools="hermes")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<|python_tag|>"}]}))
    assert "--tool-parser-plugin" not in arguments(base_model=str(tmp_path), tools="llama3_json")
    asked_for_lists = {"tools": "llama3_json", "chat_template": CHATML_JSON_TOOLS}
    assert "--tool-parser-plugin" in arguments(base_model=str(tmp_path), **asked_for_lists)


def test_room_for_adapters_covers_the_trained_rank_and_every_served_version():
    assert value(arguments(max_lora_rank=40), "--max-lora-rank") == "64"
    assert value(arguments(max_loras=3), "--max-cpu-loras") == "12"
    assert value(arguments(max_loras=3, max_cpu_loras=5), "--max-cpu-loras") == "5"
    with pytest.raises(ConfigError, match=r"max_lora_rank=8.*rank 12"):
        arguments(max_lora_rank=8)
    with pytest.raises(ConfigError, match=r"max_cpu_loras=2.*max_loras=4"):
        arguments(max_cpu_loras=2)


def test_the_models_own_sampling_defaults_are_off():
    assert value(arguments(), "--generation-config") == "vllm"


def test_logprobs_are_of_the_distribution_that_was_sampled_from():
    assert value(arguments(), "--logprobs-mode") == "processed_logprobs"


def test_extra_arguments_come_last_so_that_they_win():
    assert arguments(extra_args=("--max-num-seqs", "1"))[-2:] == ["--max-num-seqs", "1"]


def test_a_cpu_build_is_run_eagerly_and_without_gpu_settings():
    assert "--enforce-eager" in arguments(CPU)
    assert "--gpu-memory-utilization" not in arguments(CPU)
    assert "--enforce-eager" not in arguments(CUDA)
    assert value(arguments(CUDA, gpu_memory_utilization=0.5), "--gpu-memory-utilization") == "0.5"


def test_a_model_directory_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert value(arguments(base_model="model"), "--model") == str(tmp_path / "model")
    assert value(arguments(base_model="org/model"), "--model") == "org/model"


def test_room_is_made_for_the_next_rank_that_vllm_knows():
    assert [lora_slot_rank(r) for r in (1, 8, 9, 16, 300, 512)] == [8, 8, 16, 16, 320, 512]
    with pytest.raises(ConfigError, match="rank=513"):
        lora_slot_rank(513)


def test_the_environment_allows_adapters_at_run_time_and_keeps_what_the_user_set():
    env = server_environment(CPU, EngineConfig(), {"HOME": "/h", "VLLM_CPU_KVCACHE_SPACE": "7"})
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert env["HOME"] == "/h"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert server_environment(CPU, EngineConfig(), {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(CUDA, EngineConfig(), {})


def test_vllm_keeps_idle_connections_for_longer_than_its_clients_unless_the_user_says_how_long():
    name = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    assert float(server_environment(CUDA, EngineConfig(), {})[name]) >= 120
    assert server_environment(CUDA, EngineConfig(), {name: "7"})[name] == "7"


@pytest.mark.parametrize(
    ("inherited", "level"),
    [({}, None), ({"VLLM_LOGGING_LEVEL": "ERROR"}, "INFO"), ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "DEBUG")],
)
def test_the_log_says_how_far_a_start_has_come_whatever_a_library_has_set(
    inherited: dict[str, str], level: str | None
):
    assert server_environment(CUDA, EngineConfig(), inherited).get("VLLM_LOGGING_LEVEL") == level


def test_a_trainers_process_group_is_not_passed_on():
    env = server_environment(
        CUDA, EngineConfig(), {"RANK": "1", "MASTER_ADDR": "h", "CUDA_VISIBLE_DEVICES": "1"}
    )
    assert "RANK" not in env
    assert "MASTER_ADDR" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "1"


def test_another_interpreter_does_not_get_our_import_path():
    inherited = {"PYTHONPATH": "/ours"}
    assert server_environment(CPU, EngineConfig(), inherited)["PYTHONPATH"] == "/ours"
    other = EngineConfig(python=Path("/opt/env/bin/python"))
    assert "PYTHONPATH" not in server_environment(CPU, other, inherited)


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_development_endpoints_are_open_on_loopback_only(host: str, private: bool):
    assert ("VLLM_SERVER_DEV_MODE" in server_environment(CPU, EngineConfig(host=host), {})) is private


@pytest.mark.parametrize(("distribution", "cpu"), [("vllm-cpu", True), ("vllm", False)])
def test_the_interpreter_is_asked_which_vllm_it_has(tmp_path: Path, distribution: str, cpu: bool):
    python = fake_interpreter(tmp_path, distribution=distribution)
    assert installed_vllm(python) == InstalledVLLM(python, "9.9", cpu)


def test_an_interpreter_without_vllm_is_named_with_the_ways_out(tmp_path: Path):
    python = fake_interpreter(tmp_path, distribution="")
    with pytest.raises(EngineError, match=r"not installed for .*python; install art-langgraph\[vllm\]"):
        installed_vllm(python)
    with pytest.raises(EngineError, match=r"cannot run .*nowhere.*EngineConfig\.python"):
        installed_vllm(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("log", "status", "line", "advice"),
    [
        ("OSError: [Errno 98] Address already in use", 1, "Address already in use", "port"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "CUDA out of memory", "max_batch"),
        (
            "ValueError: No available memory for the cache blocks.",
            1,
            "cache blocks",
            "VLLM_CPU_KVCACHE_SPACE",
        ),
        (
            "ValueError: Free memory on device (9/80 GiB) is less than desired GPU memory utilization",
            1,
            "less than desired",
            "gpu_memory_utilization",
        ),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "No module named", "install"),
        ("The NVIDIA driver on your system is too old (found 12020)", 1, "too old", "driver"),
        ("ImportError: _C.abi3.so: undefined symbol: _ZN3c10", 1, "undefined symbol", "torch"),
        ("RuntimeError: Failed to infer device type", 1, "infer device", "vllm-cpu"),
        (
            "OSError: nosuch/model is not a local folder and is not a valid model identifier",
            1,
            "nosuch",
            "base_model",
        ),
        (
            "User-specified max_model_len (4096) is greater than the derived max_model_len (2048)",
            1,
            "4096",
            "EngineConfig.max_model_len",
        ),
        ("api_server.py: error: unrecognized arguments: --fast", 2, "--fast", "extra_args"),
        ("INFO all is well", 137, "killed from outside", "memory"),
    ],
)
def test_the_usual_causes_are_found_in_a_log_with_what_to_do(log: str, status: int, line: str, advice: str):
    fault = find_fault(f"INFO starting\n{log}\nRuntimeError: Engine core initialization failed.", status)
    assert fault is not None
    assert line in fault.line
    assert "\n" not in fault.line
    assert advice in fault.advice


def test_a_log_without_a_usual_cause_gives_none():
    assert find_fault("ValueError: the weights are cursed", 1) is None


def test_the_tail_of_a_log_has_no_colours_and_no_empty_lines(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n\n\x1b[36mtwo\x1b[0m\nthr\xffee\n")
    assert log_tail(log, 2) == "two\nthr\ufffdee"
    assert log_tail(tmp_path / "none") == ""


def test_deterministic_decoding_is_refused_rather_than_ignored(tmp_path: Path):
    with pytest.raises(ConfigError, match="deterministic"):
        VLLMEngine("m", EngineConfig(deterministic=True), LoRAConfig(), "agent", tmp_path)


async def test_an_engine_that_was_not_started_says_so(tmp_path: Path):
    engine = VLLMEngine("m", EngineConfig(), LoRAConfig(), "agent", tmp_path)
    with pytest.raises(EngineError, match="start"):
        _ = engine.base_url
    with pytest.raises(EngineError, match="not running"):
        await engine.publish(PolicyVersion("agent", 0), None)
    assert not (await engine.health()).ok
    assert engine.versions() == ()
    await engine.close()
    await engine.close()


async def test_adapters_that_cannot_be_served_are_refused_by_name(tmp_path: Path):
    engine = VLLMEngine("m", EngineConfig(), LoRAConfig(rank=8), "agent", tmp_path)
    with pytest.raises(EngineError, match="other@1"):
        await engine.publish(PolicyVersion("other", 1), tmp_path)
    with pytest.raises(EngineError, match="not a PEFT adapter directory"):
        await engine.publish(PolicyVersion("agent", 1), tmp_path)
    with pytest.raises(EngineError, match="version 0 only"):
        await engine.publish(PolicyVersion("agent", 1), None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 64}))
    with pytest.raises(EngineError, match=r"rank 64.*LoRAConfig\(rank=64\)"):
        await engine.publish(PolicyVersion("agent", 1), tmp_path)
    with pytest.raises(EngineError, match="agent@1 is not served"):
        await engine.retire(PolicyVersion("agent", 1))
