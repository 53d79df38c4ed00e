"""Trainer processes, as the process that started them sees them.

Invariant: they all do the same calls in the same order; when one of them dies or fails by itself, all are
ended and the caller gets an error with what it said last. None outlives this process.

`TrainerProcesses` has the methods of `grpo.Trainer`. A call is pickled once and sent to every rank, groups
without what training does not read (`sending`); the first rank's answer is the result. Each process is a
`ManagedProcess` with a log file of its own, and calls go over a socket in a directory that only this user can
enter. (torch's and accelerate's launchers block until their processes end, fork or import the caller's main
module, and take over its signal handlers.)
"""

import io
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from art_core.config import LoRAConfig, ParallelConfig, TrainConfig
from art_core.errors import ArtError, TrainerProcessError
from art_core.selection import Train, as_selection
from art_core.training.guardrails import TrainEvent
from art_core.training.policy import Policy
from art_core.training.rank import Call, Description, Done, Place, Progress, Raised, Setup
from art_core.training.rank_process import LOOK_SECONDS, START_TIMEOUT, RankProcess, rank_environment
from art_core.training.report import TrainReport
from art_core.training.sending import pack
from art_core.types import Step, TrajectoryGroup

ALONE_SECONDS = 10.0
"""How long after one rank failed the others may take to say that they failed alike."""


FIRST_ALONE = frozenset({"save_state", "save_weights", "state"})
"""What the first rank does alone, and changes nothing by: when that fails, all of them can go on."""


def socket_directory() -> Path:
    """A new directory of this user's alone: among temporary ones, or in ``/tmp`` where that is too deep.

    A socket's path has 107 bytes at the most (103 on macOS); schedulers' temporary directories can be longer.
    """
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) + len("/art-trainer-12345678/rank-1234") <= 103
    return Path(tempfile.mkdtemp(prefix="art-trainer-", dir=usual if short else "/tmp"))


class ChosenSteps:
    """A user's selection, decided here: his function need not be known to other processes."""

    def __init__(self, ids: frozenset[str]) -> None:
        self._ids = ids

    def __call__(self, step: Step) -> bool:
        """Whether the step was chosen."""
        return step.id in self._ids


class RemotePolicy:
    """The policy that the ranks hold, as far as checkpoints need it.

    Args:
        processes: the ranks.
        lora: its adapter; None: all weights are trained.
    """

    def __init__(self, processes: "TrainerProcesses", lora: LoRAConfig | None) -> None:
        self._processes = processes
        self.lora = lora
        self.lock = processes.lock

    @property
    def base_model(self) -> str:
        """The base model's hub name or directory."""
        return self._processes.description.base_model

    def base_fingerprint(self) -> str:
        """Tells base models apart by their weights."""
        return self._processes.description.base_fingerprint

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer, with the chat template of the ranks."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.base_model)
        tokenizer.chat_template = self._processes.description.chat_template
        return tokenizer

    def save_weights(self, directory: Path) -> None:
        """Write what is trained as an ordinary directory, of PEFT or of transformers."""
        self._processes.call("save_weights", directory)

    def load_weights(self, directory: Path) -> None:
        """Replace what is trained by what `save_weights` wrote."""
        self._processes.call("load_weights", directory)


class TrainerProcesses:
    """A trainer that runs in processes of its own, one or several.

    Args:
        build: makes the policy on a device; must be importable by name (or a `functools.partial` of such).
        lora: the policy's adapter; None: all weights are trained.
        config: how to train.
        parallel: how many processes, on which GPUs, and what they share.
        seed: of what is shuffled.
        log_dir: where each rank's log goes.

    Raises:
        ConfigError: there are fewer GPUs than processes, or the model cannot be loaded.
        TrainerProcessError: a process did not come up.
    """

    def __init__(
        self,
        build: Callable[[str], Policy],
        lora: LoRAConfig | None,
        config: TrainConfig,
        parallel: ParallelConfig,
        *,
        seed: int = 0,
        log_dir: Path,
    ) -> None:
        self.config = config
        self.lock = threading.RLock()
        self._size = parallel.processes
        self._ranks: list[RankProcess] = []
        self._scratch = socket_directory()
        self._ended: str | None = None
        try:
            environment = rank_environment(parallel)
            setups = [
                Setup(
                    Place(rank, self._size, self._scratch / "rendezvous", parallel.timeout),
                    parallel.strategy,
                    build,
                    config,
                    seed,
                )
                for rank in range(self._size)
            ]
            for setup in setups:
                self._ranks.append(
                    RankProcess(setup.place.rank, self._scratch, environment, log_dir / "trainer")
                )
            deadline = time.monotonic() + START_TIMEOUT
            for rank, setup in zip(self._ranks, setups, strict=True):
                rank.connect(deadline)
                rank.send(pickle.dumps(sys.path))
                rank.send(pickle.dumps(setup))
            self._pids = tuple(rank.process.pid for rank in self._ranks)
            described = self._answers("start", None, deadline)
            if isinstance(described, ArtError):
                raise described
            self.description: Description = described
        except BaseException:
            self.close()
            raise
        self.policy = RemotePolicy(self, lora)

    def train(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        train: Train = None,
        progress: "Callable[[int, int], None] | None" = None,
        **options: Any,
    ) -> TrainReport:
        """`Trainer.train` on all ranks.

        Raises:
            NothingToTrainError: as there.
            TrainerProcessError: a process died or failed.
        """
        chosen: ChosenSteps | None = None
        if train is not None:
            selection = as_selection(train)
            chosen = ChosenSteps(frozenset(s.id for g in groups for t in g for s in t.steps if selection(s)))
        return self.call("train", pack(groups), progress=progress, train=chosen, **options)

    def sft(
        self, data: Sequence[Any], *, progress: "Callable[[int, int], None] | None" = None, **options: Any
    ) -> TrainReport:
        """`Trainer.sft` on all ranks."""
        return self.call("sft", list(data), progress=progress, **options)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, beside the adapter and the configuration."""
        return torch.load(io.BytesIO(self.call("state")), map_location="cpu", weights_only=True)

    def save_state(self, path: Path, generators: Mapping[str, Any]) -> None:
        """`Trainer.save_state`, by the first rank: what stays on this machine need not pass through here."""
        self.call("save_state", path, dict(generators))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` said."""
        written = io.BytesIO()
        torch.save(dict(state), written)
        self.call("load_state", written.getvalue())

    def set_config(self, config: TrainConfig) -> None:
        """Go on under other settings; see `Trainer.set_config`."""
        self.call("set_config", config)
        self.config = config

    def stop(self, why: str) -> TrainEvent:
        """End the training as a guardrail does; see `Trainer.stop`."""
        return self.call("stop", why)

    def resume(self) -> None:
        """Train on after a guardrail's stop; see `Trainer.resume`."""
        self.call("resume")

    def forget_rewards(self) -> None:
        """Compare no later reward with earlier ones; see `Trainer.forget_rewards`."""
        self.call("forget_rewards")

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes, by rank; also when they have ended."""
        return self._pids

    def call(
        self,
        method: str,
        *arguments: Any,
        progress: "Callable[[int, int], None] | None" = None,
        **options: Any,
    ) -> Any:
        """Let every rank do something; the first one's result.

        Raises:
            ArtError: what all ranks raised alike.
            TrainerProcessError: a rank died, or failed by itself; all have been ended.
        """
        with self.lock:
            if self._ended is not None:
                raise TrainerProcessError(f"the trainer's processes have ended: {self._ended}")
            message = pickle.dumps(Call(method, arguments, options))
            try:
                for rank in self._ranks:
                    rank.send(message)
                answer = self._answers(method, progress, None)
            except BaseException as interrupted:
                # Ranks may be in the midst of it, and could not be told from ranks that answer the next call.
                lost = isinstance(interrupted, TrainerProcessError)
                given_up = f"a call of {method} was given up ({type(interrupted).__name__})"
                self._end(str(interrupted).splitlines()[0] if lost else given_up)
                raise
            if isinstance(answer, ArtError):
                raise answer
            return answer

    def close(self) -> None:
        """End the processes. Closing twice does nothing."""
        self._end("closed")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.ask_to_end()
        for rank in ranks:
            rank.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _answers(
        self, method: str, progress: "Callable[[int, int], None] | None", deadline: float | None
    ) -> Any:
        """What the first rank answered, or the error after which all of them stand where they stood.

        Raises:
            TrainerProcessError: a rank died, or failed by itself.
        """
        waiting = {rank.pipe: rank for rank in self._ranks}
        result: Any = None
        raised: dict[int, Raised] = {}
        while waiting:
            for ready in wait(list(waiting), LOOK_SECONDS):
                rank = waiting[ready]  # pyright: ignore[reportArgumentType] - it is one of those given
                try:
                    message = rank.receive()
                except TrainerProcessError as gone:
                    raise TrainerProcessError("\n".join([str(gone), *_told(raised)])) from None
                match message:
                    case Progress(done, total):
                        if progress is not None:
                            progress(done, total)
                    case Done(value):
                        result = value if rank.number == 0 else result
                        del waiting[rank.pipe]
                    case Raised() as failure:
                        raised[rank.number] = failure
                        del waiting[rank.pipe]
                        if deadline is None or method != "start":
                            deadline = time.monotonic() + ALONE_SECONDS
                    case other:
                        raise TrainerProcessError(f"{rank} answered {method} with {other!r}")
            if waiting and deadline is not None and time.monotonic() > deadline:
                if raised:
                    break
                late = ", ".join(map(str, waiting.values()))
                raise TrainerProcessError(f"no answer to {method} in time from {late}")
            if raised and len(raised) < self._size and method == "start":
                break
        return self._failure(method, raised, all_answered=not waiting) if raised else result

    def _failure(self, method: str, raised: Mapping[int, Raised], *, all_answered: bool) -> ArtError:
        error = raised[min(raised)].error
        alike = len({(type(r.error), str(r.error)) for r in raised.values()}) == 1
        whole = len(raised) == self._size or method == "start"
        harmless = all_answered and method in FIRST_ALONE and list(raised) == [0]
        if error is not None and ((alike and whole) or harmless):
            return error
        what = f"{len(raised)} of {self._size} trainer processes failed in {method}"
        way_out = "all have been ended, and training can go on from the last checkpoint"
        raise TrainerProcessError("\n".join([f"{what}; {way_out}:", *_told(raised)]))


def _told(raised: Mapping[int, Raised]) -> list[str]:
    return [f"rank {number}:\n{failure.traceback}" for number, failure in sorted(raised.items())]
