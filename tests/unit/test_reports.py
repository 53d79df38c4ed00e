"""Reports of several calls of training as one; checkpoints that are kept and those that go."""

from pathlib import Path

import pytest

from art_core.config import RetentionConfig
from art_core.training.checkpoints import list_checkpoints, prune
from art_core.training.guardrails import TrainEvent
from art_core.training.report import TrainReport, merge_reports


def test_counts_are_added_means_weighted_and_maxima_kept() -> None:
    skipped = TrainEvent("update_skipped", "too far", 2.0, 1.0)
    merged = merge_reports(
        [
            TrainReport(
                {"trajectories": 2, "entries": 10, "updates": 1, "reward_mean": 0.0, "entropy": 1.0}
                | {"ratio_max": 3.0, "learning_rate": 1e-4},
                left_out={"no reward": 1},
            ),
            TrainReport(
                {"trajectories": 6, "entries": 30, "updates": 0, "reward_mean": 1.0, "entropy": 3.0}
                | {"ratio_max": 2.0, "learning_rate": 5e-5},
                (skipped,),
                {"no reward": 2},
            ),
        ]
    )
    assert merged.metrics == {
        "trajectories": 8,
        "entries": 40,
        "updates": 1,
        "reward_mean": 0.75,
        "entropy": 2.5,
        "ratio_max": 3.0,
        "learning_rate": 5e-5,
    }
    assert merged.events == (skipped,)
    assert merged.left_out == {"no reward": 3}
    assert merged.updated


def test_a_metric_that_one_call_could_not_measure_is_the_other_calls() -> None:
    without_spread = TrainReport({"entries": 0, "updates": 0})
    trained = TrainReport({"entries": 5, "updates": 1, "entropy": 0.5})
    assert merge_reports([without_spread, trained]).metrics["entropy"] == 0.5


def test_nothing_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="no reports"):
        merge_reports([])


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (RetentionConfig(last=2), [3, 5, 6]),
        (RetentionConfig(last=9), [1, 2, 3, 4, 5, 6]),
        (RetentionConfig(last=2, best=2), [1, 3, 4, 5, 6]),
        (RetentionConfig(last=2, every=2), [2, 3, 4, 5, 6]),
    ],
)
def test_newest_best_regular_and_served_checkpoints_stay(
    tmp_path: Path, retention: RetentionConfig, kept: list[int]
) -> None:
    made = {number: tmp_path / f"checkpoint-{number:08d}" for number in range(1, 7)}
    for directory in made.values():
        (directory / "adapter").mkdir(parents=True)
    scores = {1: 0.9, 2: 0.1, 4: 0.8, 5: 0.7, 77: 1.0}
    gone = prune(tmp_path, retention, {3}, scores)
    assert gone == [path for number, path in made.items() if number not in kept]
    assert list_checkpoints(tmp_path) == [made[number] for number in kept]
    assert sorted(tmp_path.iterdir()) == [made[number] for number in kept]
