"""Where a benchmark's figures are kept: with hardware and versions, so that they can be compared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_core.observe.machine import environment

__all__ = ["RESULTS", "environment", "told", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(name: str, raw: Mapping[str, Any], ratios: Mapping[str, float]) -> Path:
    """Write ``results/NAME.json``; returns it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**environment(), "ratios": ratios, "raw": raw}, indent=1) + "\n")
    return path


def told(failed: Exception) -> str:
    """What a result file keeps of an error: its beginning and, of a traceback in it, the end."""
    text = f"{type(failed).__name__}: {failed}"
    return text if len(text) <= 2000 else f"{text[:500]} ... {text[-1500:]}"
