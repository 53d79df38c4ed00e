"""Every python snippet of README and docs runs, page by page, as its reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.snippets import snippets

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests/helpers/snippets.py"
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if any(snippets(page.read_text()))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    """C70."""
    with FakeVLLM("Paris") as server:
        environment = {
            **os.environ,
            # What a reader has set up before: a server of OpenAI's schema.
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "none",
        }
        done = subprocess.run(
            [sys.executable, str(RUNNER), str(page)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
