"""Which GPUs trainer processes get."""

import pytest

from art_core.backends.placement import Placement, place, served_on
from art_core.config import EngineConfig, ParallelConfig


@pytest.mark.parametrize(
    ("parallel", "engine", "kind", "visible", "devices", "apart"),
    [
        (ParallelConfig(), EngineConfig(), "vllm", ["0", "1"], (1,), True),
        (ParallelConfig(), EngineConfig(), "vllm", ["0"], (0,), False),
        (ParallelConfig(processes=2), EngineConfig(), "vllm", ["0", "1"], (1, 0), False),
        (ParallelConfig(processes=2), EngineConfig(replicas=2), "vllm", list("4567"), (2, 3), True),
        (ParallelConfig(), EngineConfig(tensor_parallel_size=2), "vllm", list("012"), (2,), True),
        (ParallelConfig(), EngineConfig(devices=("1",)), "vllm", ["0", "1"], (0,), True),
        (ParallelConfig(devices=(0,)), EngineConfig(), "vllm", ["0", "1"], (0,), False),
        (ParallelConfig(processes=2), EngineConfig(), "embedded", list("012"), (1, 2), True),
        (ParallelConfig(processes=2), EngineConfig(), "external", ["0", "1"], (0, 1), True),
    ],
)
def test_trainers_take_gpus_that_no_server_uses_first(
    parallel: ParallelConfig,
    engine: EngineConfig,
    kind: str,
    visible: list[str],
    devices: tuple[int, ...],
    apart: bool,
):
    found = place(parallel, engine, kind, visible)
    assert found == Placement(parallel.replace(devices=devices), apart)


def test_without_gpus_nothing_is_placed_and_nobody_waits():
    parallel = ParallelConfig(processes=2)
    assert place(parallel, EngineConfig(), "embedded", []) == Placement(parallel, apart=True)


def test_more_processes_than_gpus_is_left_for_the_launch_to_say():
    found = place(ParallelConfig(processes=3), EngineConfig(), "vllm", ["0", "1"])
    assert found.parallel.devices == (1, 0, 2)


def test_a_server_s_gpus_are_those_of_its_replicas():
    assert served_on(EngineConfig(replicas=2, tensor_parallel_size=2), "vllm", list("01234")) == set("0123")
    assert served_on(EngineConfig(devices=("2,3",), tensor_parallel_size=2), "vllm", list("0123")) == set(
        "23"
    )
