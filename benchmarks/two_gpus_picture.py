"""The picture of a trainer beside vLLM: reward over steps, and over time, by mode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SAID = {
    "shared": "one GPU, in turns",
    "resident": "one GPU, both stay",
    "apart0": "two GPUs, nothing overlaps",
    "overlap1": "two GPUs, rollouts at most 1 version behind",
    "overlap4": "two GPUs, rollouts at most 4 versions behind",
}


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Draw the runs of the part ``apart``; None where there is none.

    Args:
        runs: of a result file.
        path: of the PNG.
    """
    import matplotlib.pyplot as plt

    played = [run for run in runs if run["part"] == "apart" and run.get("steps")]
    if not played:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in sorted(played, key=lambda run: list(SAID).index(run["name"])):
        reward = [step["reward"] for step in run["steps"]]
        for axis, x in zip(axes, ("step", "at"), strict=True):
            axis.plot([step[x] for step in run["steps"]], reward, linewidth=1.6, label=SAID[run["name"]])
    axes[0].set_ylabel("mean score of a step's games")
    axes[0].set_xlabel("training step")
    axes[1].set_xlabel("seconds")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_ylim(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
