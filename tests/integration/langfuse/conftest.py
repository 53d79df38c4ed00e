"""A store, a Langfuse that rollouts go to, and an application whose traces come from one."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import SECRET_KEY, LangfuseServer
from fakes.vllm_server import FakeVLLM
from helpers.langfuse_app import App, say
from helpers.langfuse_rollouts import connection
from langfuse import Langfuse
from opentelemetry.sdk.trace import TracerProvider

from art_core.store import Store
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.importing import import_from_langfuse
from art_langgraph.langfuse.traces import TraceFilter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


@pytest.fixture
def server() -> Iterator[LangfuseServer]:
    with LangfuseServer() as server:
        yield server


@pytest.fixture
def client(server: LangfuseServer) -> Iterator[LangfuseClient]:
    with LangfuseClient(connection(server)) as client:
        yield client


@pytest.fixture
def app() -> Iterator[App]:
    # The SDK keeps one client for each public key for the whole process.
    with LangfuseServer(public_key=f"pk-{uuid.uuid4()}") as server, FakeVLLM(say) as llm:
        sdk = Langfuse(
            public_key=server.public_key,
            secret_key=SECRET_KEY,
            base_url=server.base_url,
            tracer_provider=TracerProvider(),
        )
        yield App(server, llm, sdk)
        sdk.shutdown()


@pytest.fixture
def bring(app: App, store: Store) -> Iterator[Callable[..., Any]]:
    settings = LangfuseConnection(
        public_key=app.server.public_key,
        secret_key=SECRET_KEY,  # type: ignore[arg-type]
        base_url=app.server.base_url,
        requests_per_minute=60_000,
        attempts=2,
        patience=5,
    )
    with LangfuseClient(settings) as client:

        def bring(**options: Any) -> Any:
            filters = {k: options.pop(k) for k in list(options) if k in TraceFilter.model_fields}
            return import_from_langfuse(store, TraceFilter(**filters), client=client, **options)

        yield bring
