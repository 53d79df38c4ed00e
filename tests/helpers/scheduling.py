"""In which order files of tests go to pytest's workers: those that take long come first.

A file is one worker's (``--dist loadfile``), and a long one that began last would leave the others idle.
"""

import pytest

LONG = (
    "test_docs.py",
    "test_learning_graph.py",
    "test_email_research.py",
    "test_large_project.py",
    "test_demo.py",
    "test_recorded_demo.py",
    "test_trajectory_pages.py",
    "test_untrusted_text.py",
    "test_checkpoints.py",
    "test_distributed.py",
    "test_memory.py",
    "test_serving_benchmark.py",
    "test_tuning.py",
    "test_train_step_benchmark.py",
    "test_live_run.py",
    "test_rollout_workers.py",
    "test_vllm_chaos.py",
    "test_faults_run.py",
    "test_notebook.py",
    "test_rewards.py",
    "test_sinks.py",
)
"""Names of files that take longest, the longest first, as ``--durations`` told."""


def put_long_files_first(items: list[pytest.Item]) -> None:
    """In the order of `LONG`; the rest stays as it is."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
