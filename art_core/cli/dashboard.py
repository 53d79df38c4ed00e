"""``dashboard``: the pages of a project, served to this machine."""

from typing import Annotated

import typer

from art_core.cli.options import ROOT, AsJson, Project, Root, Url, opened


def dashboard(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 7070,
    control: Annotated[
        bool, typer.Option("--control", help="Let pages turn a run's knobs and keep people's feedback.")
    ] = False,
    public: Annotated[
        bool,
        typer.Option("--public", help="Listen beyond this machine if --host says so. There is no login."),
    ] = False,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Serve the pages: runs, curves, trajectories, token trees. Read-only unless --control is given.

    It may be started before the first run: then it waits until there is something to show. Needs the extra
    serve.
    """
    from art_core.cli.output import show_json
    from art_core.observe.dashboard.serve import run

    with opened(project, root, url, wait=True) as store:

        def listens(at: str) -> None:
            show_json({"url": at, "store": store.location, "project": store.project, "control": control})

        run(store, host, port, control, public=public, listens=listens if as_json else None)
