"""A store with runs that went on for a while, and a client of its dashboard."""

from collections.abc import Iterator

import pytest
from helpers.synthetic_store import fill
from starlette.testclient import TestClient

from art_core.observe.dashboard.app import create_app
from art_core.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("pages", tmp_path_factory.mktemp("pages")) as opened:
        fill(opened, run_count=4, rollouts=160)
        yield opened


@pytest.fixture
def client(store: Store) -> TestClient:
    return TestClient(create_app(store), base_url="http://127.0.0.1")
