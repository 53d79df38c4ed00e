"""What `tuning.py` found: on the terminal, as the table of docs/choosing-an-algorithm.md, and as its picture.

A row is one run. How far runs of the base with other seeds lie apart is said below the table: a difference
from the base that is not larger may be chance.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.tuning_forms import Form

PANELS: dict[str, tuple[str, ...]] = {
    "loss": ("dr_grpo", "dapo", "gspo", "cispo"),
    "advantage": ("mean", "leave_one_out"),
    "learning rate": ("rate_1e-4", "rate_5e-4"),
    "groups": ("groups_of_8", "groups_of_32", "groups_of_64", "groups_by_opponent"),
    "games, updates, clipping": ("half_batch", "quarter_batch", "one_update", "two_updates", "clip_0.4"),
    "entropy, rank": ("entropy_target", "no_entropy_target", "rank_4"),
}
"""Which variants answer one question: rows below each other, curves in one panel."""

LAST = 3
"""Steps at the end of a run whose entropies are averaged: one step's depends on its few opponents."""

Found = list[dict[str, Any]]


def table(runs: Found) -> str:
    """One line for each run, also for those that were cut off or failed."""
    lines = [f"{'variant':20} seed  won before  won after  illegal  reward  entropy  steps  minutes"]
    for run in runs:
        if "steps" not in run:
            lines.append(f"{run['variant']:20} {run['seed']:4}  no figures: {run['log'][-80:]!r}")
            continue
        after = run["after"]
        rates = () if after is None else (after["win_rate"], after["illegal_rate"])
        won = "{:9.1%} {:8.1%}".format(*rates) if rates else "        -        -"
        lines.append(
            f"{run['variant']:20} {run['seed']:4} {run['before']['win_rate']:11.1%} {won}"
            f" {reward(run):7.3f} {nats(entropy(run)):>8} {len(run['steps']):6} {run['seconds'] / 60:8.1f}"
        )
    return "\n".join(lines)


def reward(run: dict[str, Any]) -> float:
    """Mean reward over all steps: higher for what learns sooner, and of many more games than one step's."""
    return fmean(step["reward"] for step in run["steps"])


def entropy(run: dict[str, Any]) -> float | None:
    """Mean entropy of the last steps, in nats; those in which nothing was trained have none."""
    known = [step["entropy"] for step in run["steps"][-LAST:] if step["entropy"] is not None]
    return fmean(known) if known else None


def nats(entropy: float | None) -> str:
    """An entropy, where there is one."""
    return "-" if entropy is None else f"{entropy:.2f}"


def ordered(runs: Found) -> Found:
    """The runs that came to an end: the base first, then question by question."""
    order = ["base", *(variant for variants in PANELS.values() for variant in variants)]
    ended = [run for run in runs if run.get("after")]
    return sorted(ended, key=lambda run: (order.index(run["variant"]), run["seed"]))


def markdown(runs: Found, form: Form) -> str:
    """The runs that came to an end, as the table of the docs, and what seeds alone do."""
    lines = [
        "| changed | seed | won before | won after | illegal after | mean reward, all steps "
        f"| entropy, last {LAST} steps | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in ordered(runs):
        after = run["after"]
        options = " ".join(form.variants[run["variant"]]).replace("--set ", "")
        changed = f"`{options}`" if options else "nothing"
        shares = (run["before"]["win_rate"], after["win_rate"], after["illegal_rate"])
        figures = (*(f"{share:.1%}" for share in shares), f"{reward(run):.3f}", nats(entropy(run)))
        lines.append(f"| {changed} | {run['seed']} | {' | '.join(figures)} | {run['seconds'] / 60:.1f} |")
    return "\n".join((*lines, "", noise(runs)))


def noise(runs: Found) -> str:
    """How far runs of the base with other seeds lie apart."""
    base = [run for run in ordered(runs) if run["variant"] == "base"]
    if len(base) < 2:
        return "One seed of the base: how far seeds alone lie apart is not known."
    won = apart([100 * run["after"]["win_rate"] for run in base])
    rewards = apart([reward(run) for run in base])
    entropies = apart([entropy(run) or 0.0 for run in base])  # none: too sure for groups to have a spread
    return (
        f"{len(base)} seeds of the base lie {won:.1f} points of games won apart, {rewards:.3f} of mean "
        f"reward, and {entropies:.2f} nats of entropy."
    )


def apart(values: list[float]) -> float:
    """From the smallest to the largest."""
    return max(values) - min(values)


def ratios(runs: Found) -> dict[str, float]:
    """Share of held-out games won at the end, against the base's, seeds averaged."""
    won: dict[str, list[float]] = {}
    for run in runs:
        if run.get("after"):
            won.setdefault(run["variant"], []).append(run["after"]["win_rate"])
    mean = {variant: fmean(rates) for variant, rates in won.items()}
    return {v: rate / mean["base"] for v, rate in mean.items()} if mean.get("base") else {}


def smooth(values: list[float], width: int = 3) -> list[float]:
    """Means over so many steps around each one: a step's few opponents make its reward jump."""
    return [fmean(values[max(0, i - width // 2) : i + width // 2 + 1]) for i in range(len(values))]


def draw(runs: Found, picture: Path, note: str) -> None:
    """Reward over training steps, a panel for each question; the base's seeds are in all of them.

    Args:
        runs: as `tuning.py` keeps them; those that did not come to an end are left out.
        picture: the PNG file to write.
        note: the second line of the title, such as the machine.

    Raises:
        ValueError: no run of the base, or none of anything else, came to its end.
    """
    ended = ordered(runs)
    base = [run for run in ended if run["variant"] == "base"]
    if not base or len(base) == len(ended):
        missing = "that changes something" if base else "of the base"
        raise ValueError(f"there is nothing to draw: no run {missing} came to its end; see --missing")
    import matplotlib.pyplot as plt

    panels = {
        title: found
        for title, variants in PANELS.items()
        if (found := [run for run in ended if run["variant"] in variants])
    }
    columns = min(3, math.ceil(math.sqrt(len(panels))))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(6.5, 3.3 * columns), 0.6 + 2.6 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    colours = ("#2a6f97", "#d98e04", "#4f8a4c", "#7b5ea7", "#c1443c")
    for axis, (title, found) in zip(axes.flat, panels.items(), strict=False):
        for run, style in zip(base, ("-", "--", ":", "-."), strict=False):
            _curve(axis, run, color="#8a8f98", linewidth=1.2, linestyle=style)
        for run, colour in zip(found, colours, strict=False):
            _curve(axis, run, color=colour, linewidth=1.8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel("mean reward, over three steps", fontsize=9)
    figure.suptitle(
        f"Tic-tac-toe: one run for each change, against the base\n{note}", fontsize=10, x=0.02, ha="left"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _curve(axis: Any, run: dict[str, Any], **style: Any) -> None:
    rewards = smooth([step["reward"] for step in run["steps"]])
    axis.plot(range(1, len(rewards) + 1), rewards, label=f"{run['variant']}, seed {run['seed']}", **style)
