"""One rank: a process that holds a trainer and does what it is told.

    python -m art_core.training.rank SOCKET

Invariant: every `Call` is answered by one `Done` or `Raised`; when whoever started it is gone, it ends.

Over its socket come first the parent's module search path, then the `Setup`, then calls. All ranks get the
same calls in the same order, so what they do together they do in step.
"""

import importlib
import io
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.config import Strategy, TrainConfig
from art_core.errors import ArtError
from art_core.training.sending import SentGroup, unpack

if TYPE_CHECKING:
    from art_core.training.policy import Policy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: from 0.
        size: how many ranks there are.
        rendezvous: a file that does not exist yet, through which they find each other.
        timeout: seconds that a rank waits for the others.
    """

    rank: int
    size: int
    rendezvous: Path
    timeout: float


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank needs to begin; everything in it can be pickled.

    Attributes:
        place: which rank it is.
        strategy: what the ranks share.
        build: makes the policy on the device that it is given; a function of some module's top level, or a
            `functools.partial` of one.
        config: how to train.
        seed: of what is shuffled.
    """

    place: Place
    strategy: Strategy
    build: "Callable[[str], Policy]"
    config: TrainConfig
    seed: int


@dataclass(frozen=True, slots=True)
class Call:
    """Do something: a method of `Serving`, with its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a call has come."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """A call's result; None from ranks other than the first."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """A call failed.

    Attributes:
        error: what was raised, if it is one of ours.
        traceback: as text.
    """

    error: ArtError | None
    traceback: str


@dataclass(frozen=True, slots=True)
class Description:
    """What the parent says of the policy without asking again.

    Attributes:
        base_model: its hub name or directory.
        base_fingerprint: of its weights.
        parameters: how many it has.
        held: how many of them lie on the first rank: fewer when the model is sharded.
        chat_template: what its tokenizer renders messages with.
    """

    base_model: str
    base_fingerprint: str
    parameters: int
    held: int
    chat_template: Any = None


class Serving:
    """What can be asked of a rank.

    Args:
        setup: what to build.
        report: takes progress.
    """

    def __init__(self, setup: Setup, report: Callable[[Progress], None]) -> None:
        from art_core.training.distributed import held_parameters, join, shard
        from art_core.training.grpo import Trainer

        self._report = report
        self._ranks, device = join(setup.place, setup.strategy)
        policy = setup.build("cpu" if self._ranks.sharded else str(device))
        fingerprint = policy.base_fingerprint()
        parameters = held = held_parameters(policy)
        if self._ranks.sharded:
            shard(policy, device)
            held = held_parameters(policy)
        template: Any = policy.tokenizer.chat_template
        self._description = Description(policy.base_model, fingerprint, parameters, held, template)
        self._trainer: Trainer = Trainer(policy, setup.config, seed=setup.seed, ranks=self._ranks)

    def describe(self) -> Description:
        """What the parent needs to know of the policy."""
        return self._description

    def train(self, groups: Sequence[SentGroup], **options: Any) -> Any:
        """`Trainer.train`."""
        return self._trainer.train(unpack(groups), progress=self._progress, **options)

    def sft(self, data: Sequence[Any], **options: Any) -> Any:
        """`Trainer.sft`."""
        return self._trainer.sft(data, progress=self._progress, **options)

    def set_config(self, config: TrainConfig) -> None:
        """`Trainer.set_config`."""
        self._trainer.set_config(config)

    def stop(self, why: str) -> Any:
        """`Trainer.stop`."""
        return self._trainer.stop(why)

    def resume(self) -> None:
        """`Trainer.resume`."""
        self._trainer.resume()

    def forget_rewards(self) -> None:
        """`Trainer.forget_rewards`."""
        self._trainer.forget_rewards()

    def peak_memory(self) -> int:
        """Most bytes of the GPU that tensors of this rank took so far; 0 without a GPU."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def state(self) -> bytes | None:
        """The trainer's state, as ``torch.save`` writes it; the first rank's is everyone's."""
        import torch

        if self._ranks.rank:
            return None
        written = io.BytesIO()
        torch.save(self._trainer.state_dict(), written)
        return written.getvalue()

    def save_state(self, path: Path, generators: Mapping[str, Any]) -> None:
        """`Trainer.save_state`, once.

        Raises:
            CheckpointError: the disk refuses.
        """
        from art_core.training.written_whole import refused_by_the_disk

        if not self._ranks.rank:
            with refused_by_the_disk(path):
                self._trainer.save_state(path, generators)

    def load_state(self, state: bytes) -> None:
        """Go on from a state."""
        import torch

        self._trainer.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))

    def save_weights(self, directory: Path) -> None:
        """Write the adapter; the first rank's is everyone's.

        Raises:
            CheckpointError: the disk refuses.
        """
        from art_core.training.written_whole import refused_by_the_disk

        if self._ranks.rank == 0:
            with refused_by_the_disk(directory):
                self._trainer.policy.save_weights(directory)

    def load_weights(self, directory: Path) -> None:
        """Read the adapter."""
        self._trainer.policy.load_weights(directory)

    def _progress(self, done: int, total: int) -> None:
        if self._ranks.rank == 0:
            self._report(Progress(done, total))


def serve(pipe: "Connection[Any, Any]") -> None:
    """Answer calls until the parent says, or shows, that there will be no more."""
    try:
        sys.path[:] = pickle.loads(pipe.recv_bytes())
        setup: Setup = pickle.loads(pipe.recv_bytes())
        if setup.config.policy == "unsloth":  # it patches transformers, and must be there before it
            importlib.import_module("unsloth")
        serving = Serving(setup, pipe.send)
        pipe.send(Done(serving.describe() if setup.place.rank == 0 else None))
    except EOFError:
        return
    except BaseException as error:
        pipe.send(_raised(error))
        return
    while True:
        try:
            call: Call | None = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if call is None:
            return
        try:
            result = getattr(serving, call.method)(*call.arguments, **call.options)
            answer: Done | Raised = Done(result if setup.place.rank == 0 else None)
        except Exception as error:
            answer = _raised(error)
        pipe.send(answer)


def _raised(error: BaseException) -> Raised:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    return Raised(error if isinstance(error, ArtError) else None, text)


def main(address: str) -> None:
    """Connect to the parent and serve it."""
    # An interrupt from the terminal reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as joined:
        joined.connect(address)
        pipe: Connection[Any, Any] = Connection(joined.detach())
    try:
        serve(pipe)
    finally:
        from art_core.training.distributed import leave

        pipe.close()
        leave()


if __name__ == "__main__":
    # Under its own name: what is pickled here must be found there, not in ``__main__``.
    from art_core.training import rank

    rank.main(sys.argv[1])
