"""A rank's process: its socket, its log, its environment.

Invariant: whatever is asked of a process that has ended raises `TrainerProcessError`, with how it ended and
what it said last.
"""

import logging
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from art_core.config import ParallelConfig
from art_core.errors import ConfigError, TrainerProcessError
from art_core.inference.processes import ManagedProcess

logger = logging.getLogger(__name__)

START_TIMEOUT = 600.0
"""Seconds until every rank must have loaded the model."""

SEND_TIMEOUT = 60.0
"""Seconds within which a process, that has nothing else to do then, must go on taking a message."""

LOOK_SECONDS = 0.5
"""How often a process that has nothing to say is looked at."""


def rank_environment(parallel: ParallelConfig) -> dict[str, str]:
    """The environment of the ranks: this process's, with their GPUs alone and the import path.

    NCCL's variables are handed on as they are.

    Raises:
        ConfigError: there are fewer GPUs than processes.
    """
    environment = dict(os.environ)
    # Our own modules must be found before the parent's search path has been received.
    ours = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, environment.get("PYTHONPATH")]))
    visible = torch.cuda.device_count()
    if not visible:
        if parallel.devices is not None:
            raise ConfigError(f"devices={parallel.devices}: there is no GPU here")
        return environment
    devices = parallel.devices if parallel.devices is not None else tuple(range(parallel.processes))
    if max(devices) >= visible:
        raise ConfigError(
            f"{parallel.processes} trainer processes need GPUs {', '.join(map(str, devices))}, but {visible} "
            "are visible: lower processes, or name others with devices"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(visible)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in devices)
    return environment


class RankProcess:
    """One rank and the socket to it.

    Args:
        number: of the rank.
        scratch: a directory that only this user can enter.
        environment: the process's whole environment.
        log_dir: where its log goes.
    """

    def __init__(self, number: int, scratch: Path, environment: Mapping[str, str], log_dir: Path) -> None:
        self.number = number
        self._stuck = False
        self.pipe: Connection[Any, Any]
        address = scratch / f"rank-{number}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(address))
        self._listening.listen(1)
        self._listening.settimeout(LOOK_SECONDS)
        self.process = ManagedProcess(
            [sys.executable, "-m", "art_core.training.rank", str(address)],
            env=dict(environment),
            log=log_dir / f"rank-{number}.log",
            grace=2.0,
        )

    def __str__(self) -> str:
        return f"rank {self.number} (log: {self.process.log})"

    def connect(self, deadline: float) -> None:
        """Wait until it has connected, until ``deadline`` by the monotonic clock."""
        while True:
            try:
                joined, _ = self._listening.accept()
                break
            except TimeoutError:
                if self.process.exit_status is not None:
                    raise self._gone() from None
                if time.monotonic() > deadline:
                    raise TrainerProcessError(f"{self} did not come up in {START_TIMEOUT:g} s") from None
        joined.setblocking(True)
        seconds, part = divmod(SEND_TIMEOUT, 1)
        patience = struct.pack("ll", int(seconds), int(1e6 * part))
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self.pipe = Connection(joined.detach())
        self._listening.close()

    def send(self, message: bytes) -> None:
        """Send what was pickled."""
        try:
            self.pipe.send_bytes(message)
        except BlockingIOError:
            self._stuck = True
            raise TrainerProcessError(
                f"trainer process {self} took no message in {SEND_TIMEOUT:g} s; all have been ended, and "
                "training can go on from the last checkpoint"
            ) from None
        except OSError:
            raise self._gone() from None

    def receive(self) -> Any:
        """Its next message; there must be one, or an end."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> TrainerProcessError:
        until = time.monotonic() + 5
        while self.process.exit_status is None and time.monotonic() < until:
            time.sleep(0.01)
        how = self.process.describe_exit() or "closed its connection"
        return TrainerProcessError(
            f"trainer process {self} {how}; all have been ended, and training can go on from the last "
            f"checkpoint. It said last:\n{self.process.tail(30)}"
        )

    def ask_to_end(self) -> None:
        """Tell it that there will be no more calls."""
        if self._stuck:  # in the middle of a message
            return
        try:
            self.pipe.send_bytes(pickle.dumps(None))
        except (OSError, AttributeError):  # it is gone, or never connected
            logger.debug("%s is gone already", self)

    def close(self) -> None:
        """End it, by force if need be."""
        self._listening.close()
        self.process.close()
        if hasattr(self, "pipe"):
            self.pipe.close()
