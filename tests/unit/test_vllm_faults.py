"""Causes of real failures, in lines that vLLM, torch, CUDA and the hub's client wrote or would write."""
# ruff: noqa: E501 - lines of logs are quoted as they are

from pathlib import Path

import pytest

from art_core.inference.model_families import FAMILIES
from art_core.inference.vllm_faults import CAUSES, KILLED, LONGEST_LINE, find_fault

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"

SEEN = {
    "the port is taken": "OSError: [Errno 98] Address already in use",
    "the KV cache does not fit into main memory": (
        "(Worker pid=29252) ERROR 11-29 21:10:49 [multiproc_executor.py:1063] ValueError: Available memory on node "
        "0 (17.96/23.54 GiB) on kv cache allocation is less than requested memory for kv (4000.0 GiB). Decrease "
        "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
    ),
    "an unknown parser": "KeyError: 'invalid tool call parser: nosuch (chose from { apertus,hermes,mistral })'",
    "max_model_len is more than the model was made for": (
        "  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len "
        "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json)."
    ),
    "the model was not found": (
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
        "'namespace/repo_name': '/nowhere/model'. Use `repo_type` argument if needed."
    ),
    "the hub is out of reach": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for "
        "the specified revision on the local disk and outgoing traffic has been disabled."
    ),
    "an unknown kind of model": (
        "  Value error, Model architectures ['NoSuchForCausalLM'] are not supported for now. Supported "
        "architectures: dict_keys(['AfmoeForCausalLM', 'ApertusForCausalLM'])"
    ),
    "a wrong chat template": (
        "vllm.exceptions.VLLMValidationError: The supplied chat template string (/nowhere.jinja) appears "
        "path-like, but doesn't exist!"
    ),
    "an unknown argument": "api_server.py: error: unrecognized arguments: --fast",
    "a package is missing, or of another version": (
        "ImportError: cannot import name 'PreTrainedModel' from 'transformers'"
    ),
}
"""Provoked with vLLM 0.32 on a CPU; these are its own lines."""

KNOWN = {
    "the disk is full": "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'",
    "others hold the GPU's memory": (
        "ValueError: Free memory on device cuda:0 (9.1/79.3 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.4 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    ),
    "the KV cache is too small for one request": (
        "ValueError: To serve at least one request with the model's max seq len (8192), (0.75 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.2 GiB)."
    ),
    "out of GPU memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "out of main memory": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 8589934592 bytes."
    ),
    "the CUDA driver or torch does not fit": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
    ),
    "the GPU is of a kind that this build was not made for": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ),
    "no GPU": "RuntimeError: Failed to infer device type, please set the environment variable",
    "too few GPUs, or the model cannot be shared by so many": (
        "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    ),
    "GPUs do not reach each other": (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error"
    ),
    "the model is behind a licence": (
        "OSError: You are trying to access a gated repo. Make sure to have access to it at the hub."
    ),
    "the model cannot take adapters": "ValueError: MambaForCausalLM does not support LoRA yet.",
    "its engine process ended": (
        "ERROR [core_client.py:818] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
    ),
    "sleep is not possible": "  Value error, Sleep mode is not supported on current platform.",
}
"""Parts of messages in the sources of vLLM and torch, which a CPU does not provoke."""


@pytest.mark.parametrize(("cause", "line"), [*SEEN.items(), *KNOWN.items()], ids=lambda text: text[:30])
def test_a_cause_is_found_in_a_log_with_its_line_and_what_to_do(cause: str, line: str):
    log = f"INFO 11-29 20:46:47 [utils.py:255] starting\n{line}\nRuntimeError: Engine core initialization failed."
    fault = find_fault(log, 1)
    assert fault is not None
    assert fault.cause == cause
    assert fault.line == line.strip()
    assert fault.advice.startswith(f"{cause}: ")


def test_every_cause_is_tested():
    assert {cause.name for cause in CAUSES} == {*SEEN, *KNOWN}


def test_what_an_error_said_is_quoted_rather_than_the_code_that_raised_it():
    log = (
        "    raise LocalEntryNotFoundError(\nhub.LocalEntryNotFoundError: outgoing traffic has been disabled."
    )
    fault = find_fault(log)
    assert fault is not None
    assert fault.line == "hub.LocalEntryNotFoundError: outgoing traffic has been disabled."


def test_a_line_that_lists_everything_is_cut():
    fault = find_fault("KeyError: 'invalid tool call parser: nosuch (chose from { " + "hermes," * 500)
    assert fault is not None
    assert len(fault.line) == LONGEST_LINE + len(" ...")
    assert fault.line.startswith("KeyError: 'invalid tool call parser: nosuch")


def test_a_healthy_log_has_no_cause():
    healthy = (
        "WARNING [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase; this can cause "
        "fd limit errors like `OSError: [Errno 24] Too many open files`\n"
        "INFO [cpu.py:224] Triton is not installed\nINFO Using supplied settings\nINFO Application startup complete."
    )
    assert find_fault(healthy) is None


def test_the_troubleshooting_table_of_the_docs_is_this_table():
    page = DOCS.read_text()
    for cause in (*CAUSES, KILLED):
        assert f"| {cause.name} | {cause.advice} |" in page, f"docs/vllm.md misses: {cause.name}"


def test_the_parser_table_of_the_docs_is_the_one_that_is_used():
    page = DOCS.read_text()
    for family in FAMILIES:
        reasoning = f"`{family.reasoning}`" if family.reasoning else ""
        row = f"| {family.name} | `{family.tools}` | {reasoning} |"
        assert row in page, f"docs/vllm.md misses: {row}"
