"""How a command ends: exit codes, and what turns an error into one.

Invariant: what a user can mend is one line on standard error and a code that says which kind it is; only a
fault of this program shows a traceback.
"""

import errno
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self

import typer

from art_core.errors import (
    ArtError,
    ConfigError,
    StoreError,
    UnknownProjectError,
    UnknownRunError,
    UnknownTrajectoryError,
)


class ExitCode(IntEnum):
    """What a command's exit code says."""

    meaning: str
    """In words."""

    def __new__(cls, code: int, meaning: str) -> Self:
        """A code, which is an int, with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    OK = 0, "It did what was asked, and found nothing wrong."
    FINDING = (
        1,
        "It did what was asked, and found something: an audit's finding, a failed check, a failed run.",
    )
    USAGE = 2, "It was called wrongly: a command, an option, or a value out of range."
    NOT_FOUND = 3, "There is no such project, run, group or trajectory, or the name fits several."
    STORE = 4, "The record, or a file, cannot be opened, read or written."
    REFUSED = (
        5,
        "Anything else that was refused, with its reason; so is what needs a package that is missing.",
    )
    FAULT = 70, "A fault of this program; its traceback is worth reporting."
    INTERRUPTED = 130, "Ctrl-C."
    PIPE_CLOSED = 141, "Whoever read the output stopped reading, as `head` does."


_CODES: tuple[tuple[type[ArtError], ExitCode], ...] = (
    (UnknownProjectError, ExitCode.NOT_FOUND),  # before StoreError, which it is, too
    (UnknownRunError, ExitCode.NOT_FOUND),
    (UnknownTrajectoryError, ExitCode.NOT_FOUND),
    (StoreError, ExitCode.STORE),
    (ConfigError, ExitCode.USAGE),
)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def told_errors() -> Generator[None]:
    """Turn what is raised inside into a line and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        raise typer.Exit(ExitCode.PIPE_CLOSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except ArtError as refused:
        complain(str(refused))
        code = next((code for kind, code in _CODES if isinstance(refused, kind)), ExitCode.REFUSED)
        raise typer.Exit(code) from None
    except ModuleNotFoundError as missing:
        complain(_missing(missing))
        raise typer.Exit(ExitCode.REFUSED) from None
    except (typer.Exit, typer.Abort):
        raise
    except OSError as failed:
        if failed.errno not in _OF_THE_DISK:
            traceback.print_exception(failed)
            raise typer.Exit(ExitCode.FAULT) from None
        silence_stdout()  # what is still to be written would fail again
        complain(f"{failed.filename or 'the output'} cannot be written: {failed.strerror}")
        raise typer.Exit(ExitCode.STORE) from None
    except Exception as fault:
        if _is_usage_error(fault):
            raise
        traceback.print_exception(fault)
        raise typer.Exit(ExitCode.FAULT) from None


def complain(message: str) -> None:
    """One line of trouble on standard error."""
    from rich.console import Console
    from rich.text import Text

    from art_core.views.text import safe, shorten

    line = Text("error: ", style="bold red").append(Text(safe(shorten(message, 2000)), style=""))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def note(message: str) -> None:
    """One line that is no trouble, on standard error: standard output may be for a program."""
    from rich.console import Console
    from rich.text import Text

    from art_core.views.text import safe, shorten

    Console(stderr=True, highlight=False, soft_wrap=True).print(
        Text(safe(shorten(message, 2000)), style="dim")
    )


def silence_stdout() -> None:
    """Let nothing be written any more; otherwise Python's own last flush would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _is_usage_error(fault: Exception) -> bool:
    """Whether Typer will tell of it; older ones raise Click's errors, newer ones their own."""
    return hasattr(fault, "exit_code") and hasattr(fault, "format_message")


EXTRA_OF = {
    "plotly": "serve",
    "jinja2": "serve",
    "sse_starlette": "serve",
    "langfuse": "langfuse",
    "torch": "train",
    "transformers": "train",
}
"""The extra that brings a package that a command needs."""


def _missing(missing: ModuleNotFoundError) -> str:
    package = (missing.name or "?").partition(".")[0]
    if package in sys.modules:  # it is there, and a part of it is not
        return f"{missing.name} cannot be imported: {package} is not complete, or of another version"
    extra = EXTRA_OF.get(package)
    way_out = f"pip install 'art-langgraph[{extra}]'" if extra else f"pip install {package}"
    return f"this needs the package {package!r}, which is not installed: {way_out}"
