"""What the launcher of a vLLM server needs to know of `art_vllm`, the module that runs inside it.

Invariant: the server gets the plugin by two public ways alone, its path and its command line; without either
it answers in the standard form, which clients read as well.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
"""What must be on the server's path: the module and the metadata that names its entry point."""

ARGUMENTS = ("--middleware", "art_vllm.PackedTokens")
"""What the server's command line needs."""


def with_plugin(env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, so that it finds the plugin and may load it."""
    path = env.get("PYTHONPATH")
    changed = {**env, "PYTHONPATH": f"{DIRECTORY}:{path}" if path else str(DIRECTORY)}
    if "VLLM_PLUGINS" in env:  # names all that may be loaded
        changed["VLLM_PLUGINS"] = ",".join(filter(None, (env["VLLM_PLUGINS"], "art_vllm")))
    return changed


def finds_plugin(python: Path, env: Mapping[str, str]) -> bool:
    """Whether an interpreter finds the plugin in this environment: some set a path of their own."""
    asked = [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('art_vllm'))"]
    return subprocess.run(asked, env=env, capture_output=True, timeout=60).returncode == 0
