"""What training gives back of the host's memory."""

import platform
import sys
from pathlib import Path

import pytest
import torch

from art_core.training.memory import TokenBudget
from art_core.training.ranks import Alone

MIB = 2**20
PAGES = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(PAGES.read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="other allocators keep to themselves"
)
def test_what_passes_left_free_between_what_is_still_held_goes_back_to_the_system() -> None:
    torch.empty(30 * MIB, dtype=torch.uint8)  # once freed, glibc has smaller ones in its arenas
    passes = [torch.ones(4 * MIB, dtype=torch.uint8) for _ in range(64)]
    held = passes[1::8]
    del passes
    before = resident()
    budget = TokenBudget(1024, Alone(), ())
    budget.forget()
    assert before - resident() > 128 * MIB
    assert all(bool(tensor.all()) for tensor in held)
