"""What commands print: nothing that a text could do to a terminal, and where it goes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import READING, art, hostile_project, mail_project, process

from art_core.cli.exits import ExitCode

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mail_project(tmp_path_factory.mktemp("art"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_project(tmp_path_factory.mktemp("hostile"))


# -- untrusted text ----------------------------------------------------------------------------------------

EVERYTHING = (
    *READING,
    ("trajectories", "show", "t-evil"),
    ("trajectories", "show", "t-evil", "--full"),
    ("trajectories", "show", "t-evil", "--tree"),
    ("trajectories", "compare", "t-evil", "t-0000001"),
    ("trajectories", "list", "--scenario", "nothing\x1b[2J"),
    ("audit",),
)


@pytest.mark.parametrize("arguments", EVERYTHING, ids=lambda a: " ".join(a)[:40])
def test_untrusted_text_neither_commands_the_terminal_nor_drowns_it(
    hostile: Path, arguments: tuple[str, ...]
) -> None:
    done = art(hostile, *arguments)
    assert done.exit_code in (0, 1), done.output
    assert not CONTROL.search(done.output), CONTROL.findall(done.output)[:5]
    done.output.encode()
    if "--full" not in arguments:
        assert len(done.output) < 200_000
    if arguments[:2] == ("trajectories", "show") and "--tree" not in arguments:
        plain = done.output.replace("\n", "").replace(" ", "")
        assert "[red]x[/red]" in plain, "markup is shown, not obeyed"
        assert ":smile:" in plain


@pytest.mark.parametrize("arguments", [a for a in EVERYTHING if "--full" not in a and "--tree" not in a])
def test_json_is_ascii_whatever_was_recorded(hostile: Path, arguments: tuple[str, ...]) -> None:
    done = art(hostile, *arguments, "--json")
    assert done.stdout.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    for line in done.stdout.splitlines():
        json.loads(line)


def test_errors_repeat_what_was_typed_harmlessly(root: Path) -> None:
    done = art(root, "trajectories", "show", "\x1b]0;owned\x07[red]no[/red]")
    assert done.exit_code == ExitCode.NOT_FOUND
    assert not CONTROL.search(done.stderr)
    assert "[red]no[/red]" in done.stderr


# -- where output goes -----------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_error(hostile: Path) -> None:
    for arguments in (("trajectories", "export"), ("trajectories", "list"), ("watch", "--json")):
        command = [sys.executable, "-m", "art_core.cli", *arguments]
        environment = {**os.environ, "ART_ROOT": str(hostile)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as started:
            assert started.stdout is not None
            assert started.stderr is not None
            started.stdout.close()  # before anything was written
            complaint = started.stderr.read()
            assert started.wait(timeout=60) == ExitCode.PIPE_CLOSED, complaint
        assert complaint == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [("runs",), ("runs", "--json"), ("trajectories", "export")])
def test_output_for_which_there_is_no_room_ends_with_4_and_one_line(
    root: Path, arguments: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "art_core.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env={**os.environ, "ART_ROOT": str(root)}, text=True
        )
    assert done.returncode == ExitCode.STORE
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_without_a_terminal_or_with_no_color_there_are_no_escapes(root: Path) -> None:
    assert "\x1b" not in process(root, "runs").stdout
    # NO_COLOR takes colours, also where one is forced to believe in a terminal.
    forced = process(root, "runs", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", forced)
    assert "\x1b[" in process(root, "runs", FORCE_COLOR="1", TERM="xterm-256color").stdout


def test_output_that_cannot_spell_a_character_goes_on(root: Path) -> None:
    done = process(root, "runs", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "r-0002" in done.stdout


@pytest.mark.parametrize(
    ("command", "begins"), [(("report",), "<!doctype html>"), (("trajectories", "export"), '{"id":')]
)
def test_the_standard_output_may_be_named_as_the_file_and_holds_nothing_else(
    root: Path, tmp_path: Path, command: tuple[str, ...], begins: str
) -> None:
    """``art-langgraph report -o /dev/stdout | gzip``, and the same into a file that holds something."""
    to = tmp_path / "out"
    to.write_text("before\n")
    device = Path("/dev/stdout").lstat()
    with to.open("ab") as out:
        done = subprocess.run(
            [sys.executable, "-m", "art_core.cli", *command, "--to", "/dev/stdout"],
            stdout=out,
            timeout=120,
            check=False,
            env={**os.environ, "ART_ROOT": str(root)},
        )
    assert done.returncode == 0
    before, *lines = to.read_text().splitlines()
    assert before == "before"
    assert lines[0].lower().startswith(begins)
    assert lines[-1].endswith(("</html>", "}"))
    assert Path("/dev/stdout").lstat().st_ino == device.st_ino
