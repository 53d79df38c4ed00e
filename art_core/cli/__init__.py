"""The command line, ``art-langgraph``: look at runs and trajectories, report, audit, give feedback.

Invariant: a command imports what it needs when it runs, so that asking for help costs nothing; every command
ends with a code of `art_core.cli.exits.ExitCode`.
"""

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line of this process; ends it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot spell a character shows the others
    from art_core.cli.app import app

    app(prog_name="art-langgraph")
