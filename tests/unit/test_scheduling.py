"""How tests are dealt out to pytest's workers."""

from pathlib import Path

import pytest
from helpers.scheduling import LONG, SERVED, SERVERS_OF_THEIR_OWN, unit_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/unit/test_paths.py::TestPaths::test_a[0-tests/vllm]", "unit/test_paths.py"),
        ("tests/vllm/test_vllm_engine.py::test_a[whole-agent@1]", SERVED),
        ("tests/vllm/test_external.py::test_b", SERVED),
        ("tests/vllm/test_merged.py::test_c", "vllm/test_merged.py"),
        ("tests/conformance/engine/test_load.py::test_d[vllm]", "conformance of vllm"),
        ("tests/conformance/engine/test_tokens.py::test_d[embedded-stream-hello]", "conformance of embedded"),
        (
            "tests/conformance/engine/test_load.py::test_d[embedded-qwen2.5-2]",
            "conformance of embedded-qwen2.5",
        ),
        (
            "tests/conformance/test_langchain_chat_art.py::test_d[fake]",
            "conformance/test_langchain_chat_art.py",
        ),
    ],
)
def test_tests_of_one_file_or_one_server_are_run_by_one_worker(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit


def test_the_files_that_are_named_are_there() -> None:
    named = {*LONG, *SERVERS_OF_THEIR_OWN} - {SERVED, "conformance of vllm"}
    assert [name for name in named if not (TESTS / name).exists()] == []


def test_every_file_that_starts_a_vllm_of_its_own_is_a_unit() -> None:
    """A session's fixture is made once by each worker: a file that were forgotten would start another one."""
    others = [p for p in (TESTS / "vllm").glob("test_*.py") if f"vllm/{p.name}" not in SERVERS_OF_THEIR_OWN]
    assert others
    assert [p.name for p in others if "served" not in p.read_text()] == []
