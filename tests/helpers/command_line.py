"""Commands as their users run them, and projects to run them on."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.synthetic_store import HOSTILE, fill
from helpers.trajectories import a_step, a_trajectory
from typer.testing import CliRunner, Result

from art_core.cli.app import app
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, Scenario

READING = (
    ("runs",),
    ("runs", "last"),
    ("trajectories", "list", "-n", "50"),
    ("trajectories", "list", "--order", "best"),
    ("feedback", "list"),
    ("watch",),
)
"""Commands that list what is there."""


def mail_project(root: Path) -> Path:
    """Make a project with three runs under a directory; returns that."""
    with Store.open("mail", root) as store:
        fill(store, run_count=3, rollouts=120, train_steps=6)
        store.save_trajectory(
            a_trajectory(
                "t-lost", status=RolloutStatus.FAILED, reward=None, failure=Failure("timeout", "slow")
            )
        )
        store.score("t-0000001", 0.25, author="judge", explanation="it guessed")
        store.add_feedback("t-0000001", kind="thumb", value=1, author="ana", comment="fine")
    return root


def hostile_project(root: Path) -> Path:
    """The same with texts that were all written by somebody who means harm."""
    with Store.open("mail", root) as store:
        fill(store, run_count=5, rollouts=80, train_steps=4, hostile=True)
        texts = "".join(HOSTILE[:5]) + "[red]x[/red] [link=http://e]y[/link] :smile:"
        said = a_step("t-evil", messages=({"role": texts, "content": texts + HOSTILE[5]},), model=texts)
        evil = a_trajectory("t-evil", scenario=Scenario(texts), components={texts: 1.0})
        store.save_trajectory(replace(evil, steps=(said,)))
        store.score("t-evil", 0.5, author=texts, explanation=texts, components={texts: 0.5})
        store.add_feedback("t-evil", kind="score", value=0.5, author=texts, comment=texts)
    return root


def art(root: Path, *arguments: str, columns: int = 80) -> Result:
    """Run a command in this process."""
    environment = {"ART_ROOT": str(root), "COLUMNS": str(columns), "ART_PROJECT": "", "ART_AUTHOR": "tester"}
    return CliRunner().invoke(app, list(arguments), env={k: v or None for k, v in environment.items()})


def told(root: Path, *arguments: str) -> Any:
    """What a command says with --json."""
    done = art(root, *arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    assert done.stdout.isascii()
    return json.loads(done.stdout)


def process(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whose output is no terminal."""
    return subprocess.run(
        [sys.executable, "-m", "art_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "ART_ROOT": str(root), "COLUMNS": "80", **environment},
    )
