"""A store in which nothing is recorded yet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_core.store import Store


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open("empty", tmp_path) as opened:
        yield opened
