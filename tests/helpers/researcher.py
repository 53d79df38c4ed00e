"""The mailbox example's training as its users start it, small: a tiny random model in place of a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SMALL = "--groups 2 --group-size 2 --held-out 2 --evaluate-every 0 --max-model-len 12288 --max-tokens 16"


def tiny_researcher(path: Path) -> Path:
    """A tiny random model with room for a run: its byte-level tokens are 2,000 for the tools alone."""
    tiny_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    return path


def train(
    model: Path, cache: Path, out: Path, *options: str, seconds: float = 280
) -> tuple[dict[str, Any], str]:
    """Run the script for one step; its figures and what it printed.

    Args:
        model: the policy's directory.
        cache: where the mailbox is, or goes.
        out: where everything else goes.
        options: more of the script's.
        seconds: how long it may take.
    """
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples/email_research/train.py"), *SMALL.split(), "--steps", "1"),
            *("--token-budget", "4096", "--model", str(model), "--out", str(out)),
            *("--json", str(out / "figures.json"), *options),
        ],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={
            **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")},
            "ART_MAIL_CACHE": str(cache),
            "COLUMNS": "140",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "figures.json").read_text()), done.stdout
