"""Running out of memory: how it is told from other errors, and what gives memory back afterwards."""

import gc

import torch
from accelerate.utils.memory import should_reduce_batch_size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, the GPU's or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def release() -> None:
    """Let go of what a pass that failed has left; the error, whose frames hold its tensors, must be gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
