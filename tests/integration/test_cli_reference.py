"""Help, reference and documented shapes say what the commands do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import art, mail_project, told
from rich.cells import cell_len

from art_core.cli.app import app
from art_core.cli.reference import reference
from art_core.cli.shapes import MEMBERS, SHAPES


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mail_project(tmp_path_factory.mktemp("art"))


# -- help ----------------------------------------------------------------------------------------------


def test_help_loads_neither_the_store_nor_engines_nor_other_packages_commands() -> None:
    heavy = (
        "sqlalchemy",
        "openai",
        "fastapi",
        "torch",
        "langchain_core",
        "langfuse",
        "art_langgraph",
        "plotly",
    )
    code = (
        "import sys\n"
        "from art_core.cli import main\n"
        "sys.argv = ['art-langgraph', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        f"    print('LOADED', *(name for name in {heavy} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1].split() == ["LOADED"], done.stdout + done.stderr
    assert "langfuse" in done.stdout


def commands() -> list[tuple[str, Any]]:
    """Every command with its path."""
    import typer

    def walk(path: tuple[str, ...], command: Any) -> Any:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(path), command
        else:
            for name, sub in inner.items():
                yield from walk((*path, name), sub)

    return list(walk((), typer.main.get_command(app)))


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_says_what_it_and_each_of_its_options_is_for(name: str, root: Path) -> None:
    command = dict(commands())[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"
    shown = art(root, *name.split(), "--help")
    assert shown.exit_code == 0
    assert all(cell_len(line) <= 80 for line in shown.stdout.splitlines())


def test_commands_of_other_packages_are_there_and_run() -> None:
    shown = art(Path("."), "langfuse", "--help")
    assert shown.exit_code == 0, shown.output
    assert "export" in shown.stdout
    assert "import" in shown.stdout


# -- the documented shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_json_has_the_documented_keys(name: str, root: Path, tmp_path: Path) -> None:
    arguments = {
        "runs RUN": ("runs", "last"),
        "trajectories show": ("trajectories", "show", "t-0000001"),
        "trajectories compare": ("trajectories", "compare", "t-0000001", "t-0000002"),
        "trajectories export": ("trajectories", "export", "-n", "1", "--to", str(tmp_path / "t.jsonl")),
        "report": ("report", "--examples", "1", "--to", str(tmp_path / "r.html")),
        "feedback thumb": ("feedback", "thumb", "t-0000002", "up"),
        "feedback score": ("feedback", "score", "t-0000002", "0.5"),
        "feedback prefer": ("feedback", "prefer", "t-0000002", "t-0000003"),
        "feedback export": ("feedback", "export", "--to", str(tmp_path / "f.jsonl")),
        "doctor": ("doctor", "--quick"),
    }.get(name, tuple(name.split()))
    document = told(root, *arguments)
    expected = [key.removesuffix("[]") for key in SHAPES[name]]
    assert set(document) == set(expected)
    for key in SHAPES[name]:
        if key.endswith("[]"):
            assert isinstance(document[key[:-2]], list)
            members = MEMBERS.get(f"{name}: {key}")
            if members and document[key[:-2]]:
                assert set(document[key[:-2]][0]) == set(members)


def test_the_documented_commands_are_those_that_there_are() -> None:
    """``python -m art_core.cli.reference > docs/command-line.md`` brings the page up to date."""
    page = Path(__file__).parents[2] / "docs/command-line.md"
    assert page.read_text() == reference()
