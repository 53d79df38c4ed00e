"""``audit``: can a run's rewards be trusted?"""

import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import ROOT, AsJson, Project, Root, Run, Url, opened

if TYPE_CHECKING:
    from art_core.rewards.ruler import Ruler
    from art_core.scoring import RewardFunction

ASKED = "Who is asked, besides the record"
"""Where help shows the options about reward functions and judges."""


def audit(
    run: Run = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Of the newest trajectories, at most so many.")
    ] = 2000,
    expected: Annotated[
        str | None,
        typer.Option(
            "--expected",
            metavar="KEY",
            help="Where scenarios have the right answer: a key of their metadata or inputs; the usual ones "
            "if left out.",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="MODULE:NAME",
            help="The function that gave the rewards: it is asked about runs as they are and changed, some "
            "two hundred times.",
            rich_help_panel=ASKED,
            show_default=False,
        ),
    ] = None,
    ruler: Annotated[
        str | None,
        typer.Option(
            "--ruler",
            metavar="MODULE:NAME",
            help="The Ruler that gave them: its judge is asked four times about each of --groups groups, "
            "which costs what a judge costs.",
            rich_help_panel=ASKED,
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        int,
        typer.Option("--groups", min=1, help="Most groups that they are asked about.", rich_help_panel=ASKED),
    ] = 12,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", help="Seconds that the function may take for one run.", rich_help_panel=ASKED
        ),
    ] = 60.0,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Audit a run's rewards: what they reward besides being good. Exits with 1 when there are findings.

    People's feedback, where there is some, is what rewards are held against. A record without any run, as an
    import leaves it, is audited whole.

    What the record alone cannot tell is asked of the function or the judge, where one is named: modules are
    looked for in the working directory, too, and what they print goes to standard error.
    """
    import json

    from art_core.cli.output import show, show_json
    from art_core.rewards.audit import audit as audit_rewards
    from art_core.rewards.labels import labels_of
    from art_core.store.browse import TrajectoryFilter, list_trajectories
    from art_core.store.finding import find_run

    with _users_code():
        function, judge = _function(reward), _ruler(ruler)
    with opened(project, root, url) as store:
        run_id = find_run(store, run).id if run is not None or store.runs() else None
        ids: list[str] = []
        after: str | None = None
        while len(ids) < limit:
            page = list_trajectories(
                store, TrajectoryFilter(run_id=run_id), min(500, limit - len(ids)), after
            )
            ids += [row.id for row in page.items]
            if (after := page.next) is None:
                break
        found = [store.trajectory(trajectory_id) for trajectory_id in reversed(ids)]
        labels = labels_of(store.feedback(run_id=run_id))
    with _users_code():
        report = audit_rewards(
            found,
            labels=labels,
            reward=function,
            ruler=judge,
            expected=expected,
            groups=groups,
            timeout=timeout,
        )
    if as_json:
        show_json({"run": run_id, "trajectories": len(found), **json.loads(report.to_json())})
    else:
        show(report)
    if report.findings:
        raise typer.Exit(ExitCode.FINDING)


@contextmanager
def _users_code() -> Generator[None]:
    """Modules are found as ``python -m`` finds them, and what they print is not taken for our output."""
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove("")


def _function(path: str | None) -> "RewardFunction | None":
    found = _named(path)
    if found is not None and not callable(found):
        raise _unfit(path, found, "a reward function")
    return cast("RewardFunction | None", found)


def _ruler(path: str | None) -> "Ruler | None":
    from art_core.rewards.ruler import Ruler

    found = _named(path)
    if found is not None and not isinstance(found, Ruler):
        raise _unfit(path, found, "a Ruler")
    return found


def _named(path: str | None) -> Any:
    from art_core.import_paths import load_object

    return None if path is None else load_object(path)


def _unfit(path: str | None, found: object, wanted: str) -> Exception:
    from art_core.errors import ConfigError

    return ConfigError(f"{path!r} is a {type(found).__name__}; expected {wanted}")
