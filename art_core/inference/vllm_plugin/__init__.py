"""What the launcher of a vLLM server needs to know of `art_vllm`, the module that runs inside it.

Invariant: the server gets the plugin by two public ways alone, its path and its command line; without either
it answers in the standard form, which clients read as well.
"""

import logging
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_core.errors import EngineError

logger = logging.getLogger(__name__)

DIRECTORY = Path(__file__).resolve().parent
"""What must be on the server's path: the module and the metadata that names its entry point."""

ARGUMENTS = ("--middleware", "art_vllm.PackedTokens")
"""What the server's command line needs."""

JSON_TOOLS_ARGUMENTS = ("--tool-parser-plugin", str(DIRECTORY / "art_json_tools.py"))
"""What the command line of a server needs whose model writes tool calls as bare JSON."""

DOOR_ARGUMENTS = ("--middleware", "art_versions.OneVersion")
"""What the command line of a server needs whose weights are replaced, or that sleeps."""

OWNER_HEADERS = {"x-art-owner": "1"}
"""Of what whoever shut the door asks of the server meanwhile."""

STATUS_PATH = "/art/tokens"
"""``GET`` on the server says in which form exact tokens come."""


def with_plugin(env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, so that it finds the plugin and may load it."""
    path = env.get("PYTHONPATH")
    changed = {**env, "PYTHONPATH": f"{DIRECTORY}:{path}" if path else str(DIRECTORY)}
    if "VLLM_PLUGINS" in env:  # names all that may be loaded
        changed["VLLM_PLUGINS"] = ",".join(filter(None, (env["VLLM_PLUGINS"], "art_vllm")))
    return changed


def plugged_in(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A server's command line and environment with the plugin, if its interpreter finds it there."""
    changed = with_plugin(env)
    if finds_plugin(arguments[0], changed):
        return [*arguments, *ARGUMENTS], changed
    logger.warning(
        "%s does not look into PYTHONPATH: vLLM spells exact tokens out, which halves its throughput where "
        "many requests run at once; a wrapper should keep the PYTHONPATH that it is given",
        arguments[0],
    )
    return list(arguments), dict(env)


def with_door(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A server's command line and environment with `art_versions`: it holds requests, and renames weights.

    Raises:
        EngineError: the server's interpreter does not find it.
    """
    changed = with_plugin(env)
    if not finds_plugin(arguments[0], changed):
        raise EngineError(
            f"{arguments[0]} does not look into PYTHONPATH, which publish='merged' and colocate=True need to "
            "hold requests inside vLLM; name the environment's own interpreter as EngineConfig.python"
        )
    return [*arguments, *DOOR_ARGUMENTS], changed


def finds_plugin(python: str, env: Mapping[str, str]) -> bool:
    """Whether an interpreter finds the plugin in this environment: some set a path of their own."""
    asked = [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('art_vllm'))"]
    try:
        return subprocess.run(asked, env=env, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False  # starting the server will say what is wrong
