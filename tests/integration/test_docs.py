"""Every python snippet of README and docs runs, page by page, as its reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.langfuse_server import PUBLIC_KEY, SECRET_KEY, LangfuseServer
from fakes.vllm_server import FakeVLLM
from helpers.snippets import snippets
from helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests/helpers/snippets.py"
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if any(snippets(page.read_text()))
]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that the pages name; here a tiny random one answers to that name, in a hub cache of its own."""

PROMPTS = {
    "answer-briefly": [
        {
            "name": "answer-briefly", "version": 1, "type": "text", "labels": ["production"], "tags": [],
            "config": {}, "prompt": "Answer in {{language}}, in one sentence.",
        }
    ]
}  # fmt: skip
"""What the pages' Langfuse project has of prompts."""


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model hub's cache, as a download of `HUB_NAME` would have left it."""
    cache = tmp_path_factory.mktemp("hub")
    kept = cache / f"models--{HUB_NAME.replace('/', '--')}"
    commit = "0" * 40
    tiny_model(kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(commit)
    return cache


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, hub_cache: Path) -> None:
    """C70."""
    with FakeVLLM("Paris") as server, LangfuseServer() as langfuse:
        langfuse.prompts = PROMPTS
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),  # this checkout, whatever is installed
            # What a reader has set up before: a server of OpenAI's schema.
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "none",
            # And a Langfuse project.
            "LANGFUSE_BASE_URL": langfuse.base_url,
            "LANGFUSE_PUBLIC_KEY": PUBLIC_KEY,
            "LANGFUSE_SECRET_KEY": SECRET_KEY,
            "HF_HUB_CACHE": str(hub_cache),
            "HF_HUB_OFFLINE": "1",
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
