"""Placement: which GPUs trainer processes get beside a server.

Invariant: GPUs that the settings name are taken as named; otherwise those that no server uses come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from art_core.config import EngineConfig, ParallelConfig
from art_core.inference.devices import replica_configs


@dataclass(frozen=True, slots=True)
class Placement:
    """Where trainer processes run.

    Attributes:
        parallel: with ``devices``, where there are GPUs.
        apart: no GPU is both a trainer's and the server's, so that neither has to wait for the other.
    """

    parallel: ParallelConfig
    apart: bool


def place(parallel: ParallelConfig, engine: EngineConfig, kind: str, visible: Sequence[str]) -> Placement:
    """Find GPUs for the trainer processes.

    Args:
        parallel: how many are needed, and which were asked for.
        engine: how the model is served.
        kind: of engine: ``embedded``, ``vllm`` or ``external``.
        visible: the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` lists them.

    Raises:
        ConfigError: there are fewer GPUs than the server's replicas need.
    """
    if not visible:
        return Placement(parallel, apart=True)
    serving = served_on(engine, kind, visible)
    devices = parallel.devices
    if devices is None:
        free = [i for i, name in enumerate(visible) if name not in serving]
        shared = [i for i, name in enumerate(visible) if name in serving]
        # Too few of them in all is for `rank_process.rank_environment` to say.
        devices = tuple([*free, *shared, *range(len(visible), parallel.processes)][: parallel.processes])
    names = {visible[i] for i in devices if i < len(visible)}
    return Placement(parallel.replace(devices=devices), apart=not names & serving)


def served_on(engine: EngineConfig, kind: str, visible: Sequence[str]) -> set[str]:
    """The GPUs that the server uses."""
    if kind == "external":
        return set()
    if kind == "embedded":
        return set(visible[:1])
    each = engine.tensor_parallel_size * engine.data_parallel_size
    blocks = [config.devices for config in replica_configs(engine, visible)]
    return {name for block in blocks for part in block or visible[:each] for name in part.split(",")}
