"""Tool calls as bare JSON on a real vLLM, with a vocabulary that its own parser of them refuses."""

from pathlib import Path

import pytest
from helpers.json_tools import check_lesson, json_tools_model


def test_what_is_fine_tuned_is_what_vllm_feeds_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with json_tools_model(tmp_path, kind="vllm", max_batch=4, start_timeout=400.0) as model:
        check_lesson(model, monkeypatch)
