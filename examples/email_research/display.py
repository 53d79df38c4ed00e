"""What a run of the example shows: held-out questions as a table, and the curve of the training.

python examples/email_research/display.py figures.json curve.png   # the curve again, from a run's figures
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from rich.box import SIMPLE_HEAD
from rich.table import Table

from art_core.types import Trajectory, TrajectoryGroup

PARTS = ("correct", "sources", "read", "tool_errors")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Questions of the held-out inbox, answered once each.

    Attributes:
        name: when it was.
        step: training steps before it.
        questions: how many were asked.
        failed: runs that broke; they are in no mean.
        reward: mean reward by the rules.
        correct: share that was answered rightly; by kind of question in ``by_kind``.
        sources: mean F1 of the cited mails.
        read: mean share of the settling mails that were read.
        tool_errors: mean share of tool calls that went wrong.
        answered: share that was answered at all.
        turns: mean calls of the model.
        seconds: for all of them.
    """

    name: str
    step: int
    questions: int
    failed: int
    reward: float
    correct: float
    sources: float
    read: float
    tool_errors: float
    answered: float
    turns: float
    by_kind: Mapping[str, float]
    seconds: float

    @classmethod
    def of(
        cls, name: str, step: int, groups: Sequence[TrajectoryGroup], failed: int, seconds: float
    ) -> "Evaluation":
        """Count scored runs.

        Raises:
            SystemExit: every run failed; the first one's failure is the message.
        """
        runs = [run for group in groups for run in group.scored]
        if not runs:
            failures = [run.failure.message for group in groups for run in group if run.failure]
            raise SystemExit(f"{name}: no run came to its end: {failures[:1]}")
        kinds = sorted({run.scenario.metadata["kind"] for run in runs})
        return cls(
            name=name,
            step=step,
            questions=len(runs) + failed,
            failed=failed,
            reward=statistics.mean(run.reward or 0.0 for run in runs),
            **part_means(runs),
            by_kind={
                kind: statistics.mean(
                    r.components["correct"] for r in runs if r.scenario.metadata["kind"] == kind
                )
                for kind in kinds
            },
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One batch of runs and the update made from it.

    Attributes:
        reward: mean of what was trained on: by the rules, or the judge's.
        correct: share of right answers, and other parts of the rules' reward.
        flat: groups whose runs were all worth the same, which teach nothing.
        unscored: groups that the judge could not score.
        kl: to the policy that sampled, None when nothing was trained.
        tokens: sampled tokens that were trained.
    """

    step: int
    reward: float
    correct: float
    sources: float
    read: float
    tool_errors: float
    answered: float
    turns: float
    flat: int
    unscored: int
    kl: float | None
    entropy: float | None
    tokens: int
    rollout_seconds: float
    train_seconds: float


def part_means(runs: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the parts of the rules' reward, whoever gave the reward."""
    means = {part: statistics.mean(run.components[part] for run in runs) for part in PARTS}
    outputs = [run.metadata["output"] for run in runs]
    return {
        **means,
        "answered": statistics.mean(float(output.get("answer") is not None) for output in outputs),
        "turns": statistics.mean(output["turns"] for output in outputs),
    }


def evaluations_table(evaluations: Sequence[Evaluation]) -> Table:
    """Held-out questions, before, between and after."""
    table = Table(title="held-out inbox", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "",
        "questions",
        "failed",
        "reward",
        "correct",
        "sources",
        "answered",
        "errors",
        "turns",
        "seconds",
    ):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for e in evaluations:
        shares = (f"{share:.1%}" for share in (e.correct, e.sources, e.answered, e.tool_errors))
        counts = (e.name, str(e.questions), str(e.failed), f"{e.reward:.3f}")
        table.add_row(*counts, *shares, f"{e.turns:.1f}", f"{e.seconds:.0f}")
    return table


def steps_table(steps: Sequence[TrainingStep], total: int) -> Table:
    """The training steps so far."""
    title = f"GRPO, {len(steps)} of {total} steps (runs, train: seconds)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "step",
        "reward",
        "correct",
        "answered",
        "errors",
        "turns",
        "flat",
        "KL",
        "tokens",
        "runs",
        "train",
    ):
        table.add_column(heading, justify="right")
    for s in steps[-40:]:
        table.add_row(
            str(s.step),
            f"{s.reward:.3f}",
            f"{s.correct:.1%}",
            f"{s.answered:.1%}",
            f"{s.tool_errors:.1%}",
            f"{s.turns:.1f}",
            str(s.flat),
            "-" if s.kl is None else f"{s.kl:.4f}",
            str(s.tokens),
            f"{s.rollout_seconds:.0f}",
            f"{s.train_seconds:.0f}",
        )
    return table


def step_line(step: TrainingStep, total: int) -> str:
    """A training step in one line, for output that is no terminal."""
    kl = "-" if step.kl is None else f"{step.kl:.4f}"
    return (
        f"step {step.step} of {total}: reward {step.reward:.3f}, correct {step.correct:.1%}, "
        f"answered {step.answered:.1%}, errors {step.tool_errors:.1%}, turns {step.turns:.1f}, "
        f"flat {step.flat}, KL {kl}, {step.rollout_seconds:.0f} s + {step.train_seconds:.0f} s"
    )


def save_plot(
    steps: Sequence[TrainingStep], evaluations: Sequence[Evaluation], path: Path, note: str
) -> Path:
    """Draw reward and right answers over training steps, held-out inbox included; returns the file."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for axis, part, label in zip(axes, ("reward", "correct"), ("mean reward", "right answers"), strict=True):
        axis.plot(
            [s.step for s in steps],
            [getattr(s, part) for s in steps],
            color="#2a6f97",
            label="training inboxes",
        )
        at, held = [e.step for e in evaluations], [getattr(e, part) for e in evaluations]
        axis.plot(at, held, "D--", color="#d98e04", label="held-out inbox (reward: rules)")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    axes[0].set_title(f"Email research\n{note}", fontsize=10, loc="left")
    axes[1].set_xlabel("training step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def drawn(figures: Path, path: Path) -> Path:
    """The curve of a run, from its figures as `train.py` writes them; returns the file."""
    told = json.loads(figures.read_text())
    note = f"{told['model']}, reward by {told['options']['reward']}, {told['seconds'] / 60:.1f} minutes"
    steps = [TrainingStep(**step) for step in told["steps"]]
    return save_plot(steps, [Evaluation(**one) for one in told["evaluations"]], path, note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the curve of a run from its figures.")
    parser.add_argument("figures", type=Path)
    parser.add_argument("curve", type=Path)
    given = parser.parse_args()
    print(drawn(given.figures, given.curve))
