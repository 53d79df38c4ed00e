"""``trajectories``: find, read, compare and export what agents did."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from art_core.cli.options import ROOT, AsJson, Project, Root, Url, opened

if TYPE_CHECKING:
    from rich.console import RenderableType

    from art_core.store import Store
    from art_core.store.browse import TrajectoryFilter, TrajectoryRow
    from art_core.types import Trajectory

app = typer.Typer(help="Find, read, compare and export what agents did.", no_args_is_help=True)

_FILTER = "Which trajectories"
_MOST_NAMED = 12


def _narrow(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_FILTER, show_default=False, **more)


Run: TypeAlias = Annotated[str | None, _narrow("--run", help="Of this run (or 'last', the newest).")]
Step: TypeAlias = Annotated[
    int | None, _narrow("--step", help="Sampled by the policy version of this number.")
]
Scenario: TypeAlias = Annotated[str | None, _narrow("--scenario", help="Of the scenario with this id.")]
Group: TypeAlias = Annotated[str | None, _narrow("--group", help="Of this group.")]
Node: TypeAlias = Annotated[
    str | None, _narrow("--node", help="With a call in the LangGraph node of this name.")
]
Status: TypeAlias = Annotated[
    Literal["running", "finished", "failed"] | None, _narrow("--status", help="What became of the rollout.")
]
Cause: TypeAlias = Annotated[
    str | None, _narrow("--cause", help="Failed for this cause: exception, timeout, cancelled, judge, ...")
]
RewardMin: TypeAlias = Annotated[float | None, _narrow("--reward-min", help="With at least this reward.")]
RewardMax: TypeAlias = Annotated[float | None, _narrow("--reward-max", help="With at most this reward.")]
OrderOption: TypeAlias = Annotated[
    Literal["newest", "oldest", "best", "worst"],
    typer.Option("--order", help="What comes first.", rich_help_panel=_FILTER),
]
Id: TypeAlias = Annotated[str, typer.Argument(help="A trajectory's id, or a part of it that no other has.")]
OnlyNode: TypeAlias = Annotated[
    str | None, typer.Option("--node", help="Only calls of this LangGraph node.", show_default=False)
]


@app.command("list")
def list_(
    run: Run = None,
    step: Step = None,
    scenario: Scenario = None,
    group: Group = None,
    node: Node = None,
    status: Status = None,
    cause: Cause = None,
    reward_min: RewardMin = None,
    reward_max: RewardMax = None,
    order: OrderOption = "newest",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="Rows of a page.")] = 20,
    after: Annotated[
        str | None,
        typer.Option("--after", help="Go on after a page: what it said at its end.", show_default=False),
    ] = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List trajectories, filtered, page by page."""
    from art_core.cli.output import cell, show, show_json
    from art_core.store.browse import list_trajectories

    with opened(project, root, url) as store:
        which = _filter(store, run, step, scenario, group, node, status, cause, reward_min, reward_max, order)
        page = list_trajectories(store, which, limit, after)
        there_is = "" if as_json or page.items else _there_is(store, which)
    if as_json:
        show_json({"trajectories": [_row_json(row) for row in page.items], "next": page.next})
    elif not page.items:
        show(cell(f"no trajectory is like that{there_is}"))
    else:
        show(_rows_table(page.items, page.next))


def _there_is(store: "Store", which: "TrajectoryFilter") -> str:
    """What there is of that which a filter named in vain."""
    from art_core.store.browse import choices
    from art_core.views.text import brief

    found = choices(store, which.run_id)
    named = (
        ("nodes", which.node, found.nodes),
        ("causes of failures", which.cause, found.causes),
        ("steps", which.policy_number, found.policy_numbers),
    )
    said = [
        f"{name}: {', '.join(brief(str(one), 40) for one in there[:_MOST_NAMED]) or 'none'}"
        + (f", and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else "")
        for name, wanted, there in named
        if wanted is not None and wanted not in there
    ]
    return f"; there are {'; '.join(said)}" if said else ""


def _filter(
    store: "Store",
    run: str | None,
    step: int | None,
    scenario: str | None,
    group: str | None,
    node: str | None,
    status: str | None,
    cause: str | None,
    reward_min: float | None,
    reward_max: float | None,
    order: Literal["newest", "oldest", "best", "worst"],
) -> "TrajectoryFilter":
    from art_core.store.browse import TrajectoryFilter
    from art_core.store.finding import find_group_id, find_run

    return TrajectoryFilter(
        run_id=None if run is None else find_run(store, run).id,
        policy_number=step,
        scenario_id=scenario,
        group_id=None if group is None else find_group_id(store, group),
        node=node,
        status=status,
        cause=cause,
        reward_min=reward_min,
        reward_max=reward_max,
        order=order,
    )


def _row_json(row: "TrajectoryRow") -> dict[str, Any]:
    """A row by its fields; "steps" are training steps in what commands print, and these are calls."""
    return {"calls" if name == "steps" else name: value for name, value in asdict(row).items()}


def _rows_table(rows: "tuple[TrajectoryRow, ...]", following: str | None) -> "RenderableType":
    from rich.console import Group

    from art_core.cli.output import cell, number, table
    from art_core.observe.run_view import ago
    from art_core.views.text import short_id

    listed = table("trajectory", "~scenario", "began", ">step", ">reward", ">calls", ">seconds", "status")
    for row in rows:
        listed.add_row(
            cell(short_id(row.id), 16),
            cell(row.scenario_id, 40),
            ago(row.started_at),
            "" if row.policy_number is None else f"{row.policy_number}",
            number(row.reward),
            f"{row.steps}",
            number(row.duration, 1),
            cell(row.cause or row.status, 16, style="red" if row.cause else ""),
        )
    if following is None:
        return listed
    return Group(listed, cell(f"more: --after {following}", style="dim"))


@app.command()
def show(
    trajectory: Id,
    node: OnlyNode = None,
    tree: Annotated[bool, typer.Option("--tree", help="Who called whom, one line for each call.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Messages at their whole length.")] = False,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Read a trajectory: what each model was given and said, tools, rewards, what people thought."""
    import json

    from rich.text import Text

    from art_core.cli import output
    from art_core.cli.judged import feedback_line, score_line
    from art_core.errors import ConfigError
    from art_core.jsonl import dump_trajectory
    from art_core.store.finding import find_trajectory_id
    from art_core.views import trajectory_view
    from art_core.views.terminal import LIMIT

    with opened(project, root, url) as store:
        found = store.trajectory(find_trajectory_id(store, trajectory))
        scores, said = store.scores(found.id), store.feedback(found.id)
    if as_json:
        output.show_json(
            {"trajectory": json.loads(dump_trajectory(found)), "scores": scores, "feedback": said}
        )
        return
    try:
        views: list[RenderableType] = [
            found.tree() if tree else trajectory_view(found, node, limit=10**9 if full else LIMIT)
        ]
    except KeyError as unknown:
        raise ConfigError(f"--node: {unknown.args[0]}") from None
    if scores or said:
        views.append(Text())
    views += [score_line(score) for score in scores]
    views += [feedback_line(one) for one in said]
    output.show(*views)


@app.command()
def compare(
    first: Id,
    second: Id,
    node: OnlyNode = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare two trajectories: what they have in common, then each from where it went its own way."""
    from art_core.cli import output
    from art_core.errors import ConfigError
    from art_core.store.finding import find_trajectory_id
    from art_core.views.comparison import compare_trajectories

    with opened(project, root, url) as store:
        pair = [store.trajectory(find_trajectory_id(store, name)) for name in (first, second)]
    try:
        compared = compare_trajectories(pair[0], pair[1], node)
    except KeyError as unknown:
        raise ConfigError(f"--node: {unknown.args[0]}") from None
    if as_json:
        output.show_json(compared.as_data())
    else:
        output.show(compared)


@app.command()
def export(
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", "-o", help="File; left out: standard output.", dir_okay=False, show_default=False
        ),
    ] = None,
    form: Annotated[
        Literal["trajectories", "conversations"],
        typer.Option("--form", help="Everything, one trajectory a line; or OpenAI's fine-tuning format."),
    ] = "trajectories",
    run: Run = None,
    step: Step = None,
    scenario: Scenario = None,
    group: Group = None,
    node: Node = None,
    status: Status = None,
    cause: Cause = None,
    reward_min: RewardMin = None,
    reward_max: RewardMax = None,
    order: OrderOption = "oldest",
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Most trajectories; all if left out.", show_default=False),
    ] = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Export trajectories as JSON lines.

    With --to the file appears whole or not at all.
    """
    from art_core import jsonl
    from art_core.cli.output import cell, show_json
    from art_core.cli.output import show as show_views
    from art_core.errors import ConfigError

    if as_json and to is None:
        raise ConfigError("--json says what became of a file: name one (--to), or leave --json out")
    with opened(project, root, url) as store:
        which = _filter(store, run, step, scenario, group, node, status, cause, reward_min, reward_max, order)
        counted = _Counted(store, which, limit)
        if to is None:
            for trajectory in counted:
                for line in _lines(trajectory, form):
                    print(line)
            return
        write = jsonl.export_trajectories if form == "trajectories" else jsonl.export_conversations
        lines = write(counted, to)
    if jsonl.is_stream(to):  # the lines are the output
        return
    if as_json:
        show_json({"path": to, "trajectories": counted.count, "lines": lines})
    else:
        show_views(cell(f"{to}: {lines:,} lines of {counted.count:,} trajectories"))


class _Counted:
    """Trajectories that a filter lets through, whole, read as they are asked for, and counted."""

    def __init__(self, store: "Store", which: "TrajectoryFilter", limit: int | None) -> None:
        self._store, self._which, self._limit = store, which, limit
        self.count = 0

    def __iter__(self) -> Any:
        from art_core.store.browse import list_trajectories

        after: str | None = None
        while self._limit is None or self.count < self._limit:
            left = 100 if self._limit is None else min(100, self._limit - self.count)
            page = list_trajectories(self._store, self._which, left, after)
            for row in page.items:
                self.count += 1
                yield self._store.trajectory(row.id)
            if (after := page.next) is None:
                return


def _lines(trajectory: "Trajectory", form: str) -> list[str]:
    from art_core import jsonl
    from art_core.store.packing import to_json

    if form == "trajectories":
        return [jsonl.dump_trajectory(trajectory)]
    return [to_json(conversation) for conversation in jsonl.conversations(trajectory)]
