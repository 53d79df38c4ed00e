"""A scripted model and judge behind a fake vLLM, and a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.ruler_graphs import Script

from art_core.store import Store


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[FakeVLLM]:
    with FakeVLLM(script) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store
