"""The commands, together: ours, and those that other packages register.

Invariant: a package that adds commands (entry point group ``art_core.commands``) is imported when one of them
is run or asked for its help, never before.
"""

import ast
import re
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from art_core.cli import audit, dashboard, doctor, feedback, report, runs, trajectories, watch
from art_core.cli.exits import ExitCode, told_errors

GROUP = "art_core.commands"
"""Entry points of this group are Typer apps; each is a command under its name."""


class Commands(TyperGroup):
    """Our commands, then those of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which help shows them."""
        return [*super().list_commands(ctx), *(n for n in _registered() if n not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name; one of another package stands for itself until it is run."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _registered().get(cmd_name)
        return None if entry is None else _Elsewhere(entry)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it raises becomes a line and an exit code."""
        with told_errors():
            return super().invoke(ctx)


class _Elsewhere(TyperCommand):
    """A command of another package, imported when its arguments are to be read."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name, help=_first_words(entry))
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        with told_errors():
            app = self._entry.load()
        command = typer.main.get_command(app)
        context = command.make_context(info_name, args, *rest, **extra)
        # Whoever made us will call our `invoke` with the context of what we stand for.
        return context

    def invoke(self, ctx: Any) -> Any:
        return ctx.command.invoke(ctx)


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def _first_words(entry: EntryPoint) -> str:
    """The first line of a module's docstring, read without running it."""
    top, *inner = entry.module.split(".")
    spec = find_spec(top)  # of a package that is not inside another: that runs nothing
    for place in (spec.submodule_search_locations or []) if spec else []:
        base = Path(place, *inner)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                words = ast.get_docstring(ast.parse(path.read_text()))
                line = re.sub(r"^``[\w-]+``: ", "", (words or "").partition("\n")[0])
                return line[:1].upper() + line[1:]
    return f"Not to be had: {entry.module} cannot be found."


app = typer.Typer(
    cls=Commands,
    help="Look at what an agent's runs recorded: curves, trajectories, rewards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version("art-langgraph"))
        raise typer.Exit(ExitCode.OK)


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] - Typer calls it
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("runs")(runs.runs)
app.add_typer(trajectories.app, name="trajectories")
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("audit")(audit.audit)
app.command("dashboard")(dashboard.dashboard)
app.add_typer(feedback.app, name="feedback")
app.command("doctor")(doctor.doctor)
