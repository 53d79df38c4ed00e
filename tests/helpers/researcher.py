"""The mailbox example's training as its users start it, small: a tiny random model in place of a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--groups", "2", "--group-size", "2", "--held-out", "2", "--evaluate-every", "0", "--steps", "1"),
    *("--max-model-len", "12288", "--max-tokens", "16", "--token-budget", "4096"),
)
"""Options for one quick step."""


def tiny_researcher(path: Path) -> Path:
    """A tiny random model with room for a run: its byte-level tokens are 2,000 for the tools alone."""
    tiny_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    return path


def started(model: Path, cache: Path, out: Path, *options: str) -> "subprocess.Popen[str]":
    """The script, running; what it prints is to be read from it.

    Args:
        model: the policy's directory.
        cache: where the mailbox is, or goes.
        out: where everything else goes, figures as ``figures.json``.
        options: more of the script's.
    """
    return subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "examples/email_research/train.py"), *SMALL),
            *("--model", str(model), "--out", str(out), "--json", str(out / "figures.json"), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")},
            "ART_MAIL_CACHE": str(cache),
            "COLUMNS": "140",
            "HF_HUB_OFFLINE": "1",
        },
    )


def train(
    model: Path, cache: Path, out: Path, *options: str, seconds: float = 280, status: int = 0
) -> tuple[dict[str, Any], str]:
    """Run the script for one step; its figures and what it printed.

    Args:
        model: as of `started`, and so are ``cache``, ``out`` and ``options``.
        cache: see there.
        out: see there.
        options: see there.
        seconds: how long it may take.
        status: how it has to end.
    """
    with started(model, cache, out, *options) as script:
        try:
            printed, _ = script.communicate(timeout=seconds)
        except BaseException:
            script.kill()
            raise
    assert script.returncode == status, printed
    return json.loads((out / "figures.json").read_text()), printed
