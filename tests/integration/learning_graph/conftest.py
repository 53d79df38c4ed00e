"""A tiny model, and one that is registered with a backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.learning_graphs import registered
from helpers.tiny import tiny_model

from art_core import TrainableModel


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture
def model(base: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with registered(base, tmp_path) as model:
        yield model
