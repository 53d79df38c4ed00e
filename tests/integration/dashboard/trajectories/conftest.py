"""A store with runs of a real agent, and one in which every text is evil."""

from collections.abc import Iterator

import pytest
from helpers.branching_run import record, write_byte_tokenizer
from helpers.synthetic_store import fill

from art_core.store import Store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two runs of a real LangGraph agent: one with spans and a tokenizer, one with neither."""
    root = tmp_path_factory.mktemp("recorded")
    with Store.open("branching", root) as store:
        record(store, scenarios=1, group_size=3, base_model=str(write_byte_tokenizer(root / "tokenizer")))
        record(store, scenarios=1, group_size=2, spans=False)
        yield store


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("hostile", tmp_path_factory.mktemp("hostile")) as store:
        fill(store, run_count=2, rollouts=160, scenario_count=6, hostile=True, long_tokens=60_000)
        yield store
