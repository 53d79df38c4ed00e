"""Options of the whole test suite, and what makes all of it quicker."""

import functools
import gc
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.scheduling import UnitScheduling, put_long_units_first
from hypothesis import HealthCheck, settings

# Every HTTP client reads a machine's certificates, 25 ms each time, and tests make thousands of clients.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Hypothesis' limits are on time, and a machine that is busy is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ENGINES = ("embedded", "embedded-qwen2.5", "embedded-qwen3", "fake", "vllm", "url", "all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several workers
        put_long_units_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling | None:
    return UnitScheduling(config, log) if config.getoption("dist") == "loadfile" else None


# What is imported and collected stays: to look for garbage among it meanwhile takes seconds.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


_module: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # What lives when a module begins (PyTorch, LangChain: a million objects) is left out of every later
    # search for garbage, which took a quarter of the time.
    global _module
    if item.path != _module:
        _module = item.path
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_teardown() -> None:
    # langchain-openai keeps an HTTP client for each address, and the address of a server that has ended is
    # given to a later one: its test would be handed connections of an event loop that is closed.
    if clients := sys.modules.get("langchain_openai.chat_models._client_utils"):
        for name in ("_cached_sync_httpx_client", "_cached_async_httpx_client"):
            getattr(clients, name).cache_clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # A test that passed the second time would otherwise take with it what went wrong the first time.
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"ran again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--qwen", action="store_true", help="also test with a real model that calls tools (minutes, 1.2 GB)"
    )
    parser.addoption(
        "--kills",
        type=int,
        default=2,
        metavar="N",
        help="how often a real vLLM is killed while it is used (tests/vllm; a minute or more each)",
    )
    parser.addoption(
        "--publishes",
        type=int,
        default=20,
        metavar="N",
        help="how many versions a real vLLM is given under load (tests/vllm; two seconds each)",
    )
    parser.addoption(
        "--traces",
        type=int,
        default=800,
        metavar="N",
        help="how many traces are exported to Langfuse at a bounded rate (tests/integration)",
    )
    group = parser.getgroup("engine conformance (tests/conformance/engine)")
    group.addoption(
        "--engine",
        action="append",
        choices=ENGINES,
        help="an engine to test, may be given again; default: those that need no other process; all: these, "
        "and vLLM where it is installed",
    )
    group.addoption("--model", type=Path, help="vllm: a model's directory; default: one that tests make")
    group.addoption("--vllm-python", type=Path, help="vllm: the interpreter that has it")
    group.addoption("--dtype", default="float32", choices=("float32", "bfloat16"), help="vllm: weights' type")
    group.addoption("--base-url", help="url: an engine that runs already, ending in /v1")
    group.addoption("--served-model", help="url: the name that requests use")
