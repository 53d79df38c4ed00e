"""What the demo shows: a live table of training steps, curves, games replayed in the terminal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from examples.tic_tac_toe.game import EMPTY, play, read_move

ACCENT, WARN, QUIET = "#2a6f97", "#c1443c", "#8a8f98"


@dataclass(frozen=True)
class Evaluation:
    """A set of games, counted.

    Attributes:
        score: mean over games of 1 (win), 0.5 (draw), 0 (loss, illegal move).
    """

    name: str
    games: int
    score: float
    win_rate: float
    draw_rate: float
    loss_rate: float
    illegal_rate: float
    seconds: float

    @classmethod
    def of(cls, name: str, outcomes: Sequence[str], scores: Sequence[float], seconds: float) -> "Evaluation":
        """Count outcomes (``win``, ``draw``, ``loss``, ``illegal``)."""

        def share(outcome: str) -> float:
            return outcomes.count(outcome) / len(outcomes)

        return cls(
            name,
            len(outcomes),
            sum(scores) / len(scores),
            share("win"),
            share("draw"),
            share("loss"),
            share("illegal"),
            seconds,
        )


@dataclass(frozen=True)
class TrainingStep:
    """One row of the table: a batch of games and the update made from it."""

    step: int
    reward: float
    illegal_rate: float
    kl: float | None
    entropy: float | None
    clip_fraction: float | None
    tokens: int
    play_seconds: float
    train_seconds: float


def steps_table(steps: Sequence[TrainingStep], total: int) -> Table:
    """The training steps so far."""
    title = f"GRPO, {len(steps)} of {total} steps (play, train: seconds)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("step", "reward", "", "illegal", "KL", "entropy", "clipped", "tokens", "play", "train"):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for row in steps:
        table.add_row(
            str(row.step),
            f"{row.reward:.3f}",
            f"[{ACCENT}]{'█' * round(row.reward * 10)}[/]",
            f"{row.illegal_rate:.1%}",
            "-" if row.kl is None else f"{row.kl:.4f}",
            "-" if row.entropy is None else f"{row.entropy:.2f}",
            "-" if row.clip_fraction is None else f"{row.clip_fraction:.1%}",
            str(row.tokens),
            f"{row.play_seconds:.1f}",
            f"{row.train_seconds:.1f}",
        )
    return table


def evaluations_table(evaluations: Sequence[Evaluation]) -> Table:
    """Held-out games before, between and after."""
    table = Table(title="held-out games", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "games", "mean score", "won", "drawn", "lost", "illegal", "seconds"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for e in evaluations:
        rates = (f"{rate:.1%}" for rate in (e.win_rate, e.draw_rate, e.loss_rate, e.illegal_rate))
        table.add_row(e.name, str(e.games), f"{e.score:.3f}", *rates, f"{e.seconds:.0f}")
    return table


def replay(console: Console, title: str, answers: Sequence[str], opponent: int, outcome: str) -> None:
    """Draw one game, move by move."""
    board, panels = EMPTY, []
    for answer in answers:
        square = read_move(answer, board)
        if square is None:
            said = answer.strip().replace("\n", " ")[:12] or "nothing"
            panels.append(
                Panel(_draw(board, None), title=f"said {said!r}", border_style=WARN, padding=(0, 1))
            )
            break
        before, (board, _) = board, play(board, square, opponent)
        changed = {i for i in range(9) if before[i] != board[i]}
        panels.append(Panel(_draw(board, changed), title=f"X {square}", border_style=ACCENT, padding=(0, 1)))
    console.print(f"[bold]{title}[/]: {outcome}")
    console.print(Columns(panels))


def _draw(board: str, changed: set[int] | None) -> str:
    def cell(i: int) -> str:
        if board[i] == ".":
            return f"[{QUIET}]{i + 1}[/]"
        return f"[bold]{board[i]}[/]" if changed and i in changed else board[i]

    return "\n".join(" ".join(cell(i) for i in range(row, row + 3)) for row in (0, 3, 6))


def save_curves(
    runs: dict[str, tuple[Sequence[TrainingStep], Sequence[Evaluation]]], directory: Path, note: str
) -> tuple[Path, Path]:
    """Draw reward and illegal moves over training steps; returns the PNG and the HTML file.

    Args:
        runs: by label: the training steps, and the evaluations before, after the warm start, at the end.
        directory: where the files go.
        note: one line under the title, such as the machine.
    """
    import matplotlib.pyplot as plt
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    colours = (ACCENT, "#d98e04", "#4f8a4c", "#7b5ea7", WARN)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    page = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.67, 0.33], vertical_spacing=0.06)
    # In training an illegal move may score less than a loss.
    lowest = min([0.0, *(step.reward for steps, _ in runs.values() for step in steps)])
    for (label, (steps, evaluations)), colour in zip(runs.items(), colours * len(runs), strict=False):
        x = [s.step for s in steps]
        last = x[-1] if x else 0
        held_out = [(0, evaluations[-2]), (last, evaluations[-1])] if len(evaluations) >= 2 else []
        at = [step for step, _ in held_out]
        for axis, row, values, marks in (
            (top, 1, [s.reward for s in steps], [e.score for _, e in held_out]),
            (bottom, 2, [s.illegal_rate for s in steps], [e.illegal_rate for _, e in held_out]),
        ):
            axis.plot(x, values, color=colour, linewidth=1.6, label=label)
            axis.scatter(at, marks, color=colour, marker="D", zorder=3)
            page.add_scatter(
                x=x,
                y=values,
                name=label,
                line_color=colour,
                legendgroup=label,
                showlegend=row == 1,
                row=row,
                col=1,
            )
            page.add_trace(
                go.Scatter(
                    x=at,
                    y=marks,
                    mode="markers",
                    marker={"symbol": "diamond", "size": 10, "color": colour},
                    name=f"{label}, held-out games",
                    legendgroup=label,
                    showlegend=row == 1,
                ),
                row=row,
                col=1,
            )
    top.set_ylabel("mean score")
    top.set_ylim(lowest, 1)
    bottom.set_ylabel("illegal moves")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("training step  (diamonds: held-out games, before and after)")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    top.legend(frameon=False)
    top.set_title(f"Tic-tac-toe against a random opponent\n{note}", fontsize=10, loc="left")
    png, html = directory / "curves.png", directory / "curves.html"
    figure.savefig(png, dpi=140)
    plt.close(figure)
    page.update_layout(
        title=f"Tic-tac-toe against a random opponent<br><sub>{note}</sub>",
        template="plotly_white",
        height=640,
    )
    page.update_yaxes(title_text="mean score", range=[lowest, 1], row=1, col=1)
    page.update_yaxes(title_text="illegal moves", rangemode="tozero", row=2, col=1)
    page.update_xaxes(title_text="training step", row=2, col=1)
    page.write_html(html, include_plotlyjs=True)
    return png, html


def as_json(steps: Sequence[TrainingStep], evaluations: Sequence[Evaluation]) -> dict[str, object]:
    """A run's figures as plain data; ``after`` is None until the run has ended."""
    *earlier, last = [asdict(e) for e in evaluations]
    ended = bool(earlier) and last["name"] == "trained"
    return {
        "before": earlier[-1] if ended else last,
        "after": last if ended else None,
        "evaluations": [*earlier, last],
        "steps": [asdict(s) for s in steps],
    }
