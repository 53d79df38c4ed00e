"""Units: tests that one of pytest's workers runs one after the other, and the order in which units begin.

A file is a unit, so that what its tests share is made once. Tests that share a server are a unit as well,
whichever files they are in. Units that take long come first: one that began last would leave the other
workers idle.
"""

import re

import pytest
from xdist.scheduler import LoadFileScheduling

SERVED = "a vLLM that serves adapters"
SERVERS_OF_THEIR_OWN = (
    "vllm/test_chat_art_qwen.py",
    "vllm/test_full_training.py",
    "vllm/test_json_tools.py",
    "vllm/test_local_judge.py",
    "vllm/test_merged.py",
    "vllm/test_raw_logprobs.py",
)
"""Files that start a vLLM; the others beside them use one together (fixture ``served``)."""

LONG = (
    SERVED,
    "integration/test_docs.py",
    "integration/learning_graph/test_killed_run.py",
    "integration/test_email_research.py",
    "browser/test_large_project.py",
    "integration/test_demo.py",
    "integration/test_distributed.py",
    "conformance of vllm",
    "browser/test_recorded_demo.py",
    "vllm/test_full_training.py",
    "browser/test_trajectory_pages.py",
    "browser/test_untrusted_text.py",
    "vllm/test_merged.py",
    "integration/test_checkpoints.py",
    "integration/test_memory.py",
    "vllm/test_raw_logprobs.py",
    "integration/test_serving_benchmark.py",
    "integration/test_tuning.py",
    "vllm/test_json_tools.py",
    "integration/test_trainer_processes.py",
    "integration/test_train_step_benchmark.py",
    "browser/test_live_run.py",
    "integration/test_rollout_workers.py",
    "integration/test_vllm_chaos.py",
    "integration/test_faults_run.py",
    "integration/test_notebook.py",
    "integration/test_rewards.py",
    "integration/test_sinks.py",
)
"""Units that take longest, as ``--durations`` told. Servers lie apart: each of them takes a few GiB."""

_ENGINE = re.compile(r"\[(embedded-qwen[\d.]+|[a-z]+)")


def unit_of(nodeid: str) -> str:
    """The unit of a test: its file's path below ``tests``, or the name of the server that it uses."""
    path, _, name = nodeid.partition("::")
    path = path.removeprefix("tests/")
    if path.startswith("vllm/") and path not in SERVERS_OF_THEIR_OWN:
        return SERVED
    if path.startswith("conformance/engine/") and (engine := _ENGINE.search(name)):
        return f"conformance of {engine[1]}"
    return path


def put_long_units_first(items: list[pytest.Item]) -> None:
    """In the order of `LONG`; the rest stays as it is."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(unit_of(item.nodeid), len(places)))


class UnitScheduling(LoadFileScheduling):
    """xdist's ``--dist loadfile``, by unit."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
