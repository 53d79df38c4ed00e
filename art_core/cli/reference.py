"""The commands' reference, written from the commands themselves.

Invariant: what the page says is what ``--help`` says; a test compares ``docs/command-line.md`` with it.

    python -m art_core.cli.reference > docs/command-line.md
"""

from collections.abc import Iterator, Sequence
from inspect import unwrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import PANEL
from art_core.cli.shapes import MEMBERS, NOTES, SHAPES

_OPENING = """# Command line

<!-- Written by `python -m art_core.cli.reference`; change the commands, not this page. -->

`art-langgraph` looks at what an agent's runs recorded. It needs no server and no engine: it reads the record
that `LocalBackend(root=...)` keeps, also while a run goes on.

```bash
art-langgraph runs                                # which runs are there, and do they learn?
art-langgraph watch                               # the newest run, live, until it ends
art-langgraph trajectories list --order worst     # what went wrong?
art-langgraph trajectories show 9f3c21ab          # read one; any part of its id that no other has will do
art-langgraph trajectories compare 9f3c21ab 71d0e5b2
art-langgraph audit                               # what does the reward really reward?
art-langgraph report -o report.html               # one file to keep or to send
art-langgraph doctor                              # what can this machine run?
```

The record is found by itself where it lies in `.art` and holds one project; `--root`, `--project` and `--url`
(or `ART_ROOT`, `ART_PROJECT`, `ART_STORE_URL`) name another. Reading never changes a record, with one
exception: one that an older version wrote is brought to the newest schema.

Whatever models, tools and scenarios wrote is shown without terminal sequences, control characters and marks
that turn text around; what was taken out leaves `\N{REPLACEMENT CHARACTER}`. Long texts are cut in the
middle, and the cut is counted. Colours are left out where the output is no terminal or `NO_COLOR` is set.
"""

_SHARED = """\
Where they make sense, a command takes `--project` (`-p`), `--root` and `--url`, which name the record, and
`--json`; `--help` (`-h`) explains everything.
"""

_JSON = """## What `--json` says

One JSON document on standard output, in ASCII; numbers that are not finite are `null`, times are Unix
seconds, ids are whole. The keys below stay; others may come. Errors are a line on standard error and an exit
code, with `--json` too.
"""


def reference() -> str:
    """The page, as Markdown."""
    from art_core.cli.app import app

    parts = [_OPENING, "## Exit codes\n", "| code | meaning |\n| ---: | --- |"]
    parts[-1] += "".join(f"\n| {code.value} | {code.meaning} |" for code in ExitCode) + "\n"
    parts.append("## Commands\n")
    parts.append(_SHARED)
    for name, command in _commands((), typer.main.get_command(app)):
        parts.append(_command(name, command))
    parts += [
        "Packages add commands by an entry point of the group `art_core.commands`: `langfuse` is one "
        "([Langfuse in both directions](langfuse.md)).\n",
        _JSON,
        *map(_shape, dict.fromkeys([*SHAPES, *NOTES])),
    ]
    return "\n".join(parts)


def _commands(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
    inner: dict[str, Any] | None = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
        return
    for name, sub in inner.items():
        yield from _commands((*path, name), sub)


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not _shared(p)]
    words = [_metavar(a) if a.required else f"[{_metavar(a)}]" for a in arguments]
    lines = [f"### `{' '.join([name, *words])}`", "", *_help(command.help), ""]
    choices = _choices(command)
    for parameter in (*arguments, *options):
        lines.append(f"- {_names(parameter)}: {_said(parameter, choices.get(parameter.name, ()))}")
    return "\n".join(lines) + "\n"


def _help(text: str) -> Iterator[str]:
    """Paragraphs, each in one line."""
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ""
        yield " ".join(paragraph.split())


def _choices(command: Any) -> dict[str, tuple[str, ...]]:
    """What parameters can be set to, of those that have a choice."""

    def literals(annotation: Any) -> tuple[str, ...]:
        if get_origin(annotation) is Literal:
            return get_args(annotation)
        return tuple(choice for inner in get_args(annotation) for choice in literals(inner))

    return {n: found for n, a in get_type_hints(unwrap(command.callback)).items() if (found := literals(a))}


def _shared(option: Any) -> bool:
    """Whether an option is of those that are explained once."""
    return option.rich_help_panel == PANEL or "--json" in option.opts


def _metavar(argument: Any) -> str:
    return str(argument.name).rstrip("_").upper()


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _said(parameter: Any, choices: Sequence[str]) -> str:
    said = " ".join(parameter.help.split())
    if choices:
        said += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    default = parameter.default
    if default is not None and default != "" and not isinstance(default, bool) and not callable(default):
        said += f" Default: `{default}`."
    return said


def _shape(name: str) -> str:
    lines = [f"### `{name} --json`", ""]
    if name in SHAPES:
        lines.append("- " + ", ".join(f"`{key}`" for key in SHAPES[name]))
        for key in SHAPES[name]:
            if members := MEMBERS.get(f"{name}: {key}"):
                lines.append(f"- each of `{key}`: " + ", ".join(f"`{member}`" for member in members))
    if name in NOTES:
        lines += [""] * bool(name in SHAPES) + [NOTES[name]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
