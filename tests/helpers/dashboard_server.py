"""The dashboard in a process of its own, as its users start it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

SERVE = """
import signal, sys
from art_core.observe.dashboard.serve import run
from art_core.store import Store
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with Store.open(sys.argv[2], sys.argv[1]) as store:
    run(store, port=int(sys.argv[3]), control=sys.argv[4] == "control")
"""


class Server:
    """A dashboard in a process of its own."""

    def __init__(self, root: Path, port: int = 0, *, project: str = "live", control: bool = False) -> None:
        environment = {**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(root), project, str(port), "control" if control else ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.said)
        assert found, self.said + self.process.stdout.read()
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)
