"""``audit``: can a run's rewards be trusted?"""

from typing import Annotated

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import ROOT, AsJson, Project, Root, Run, Url, opened


def audit(
    run: Run = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Of the newest trajectories, at most so many.")
    ] = 2000,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Audit a run's rewards: what they reward besides being good. Exits with 1 when there are findings.

    People's feedback, where there is some, is what rewards are held against. A record without any run, as an
    import leaves it, is audited whole.
    """
    import json

    from art_core.cli.output import show, show_json
    from art_core.rewards.audit import audit as audit_rewards
    from art_core.rewards.labels import labels_of
    from art_core.store.browse import TrajectoryFilter, list_trajectories
    from art_core.store.finding import find_run

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
    report = audit_rewards(found, labels=labels)
    if as_json:
        show_json({"run": run_id, "trajectories": len(found), **json.loads(report.to_json())})
    else:
        show(report)
    if report.findings:
        raise typer.Exit(ExitCode.FINDING)
