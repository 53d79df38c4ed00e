from pathlib import Path

import pytest

from art_core.config import EngineConfig
from art_core.errors import ConfigError
from art_core.inference.gpu_share import limit_trainer, shared_with_trainer, trainer_share
from art_core.inference.vllm_command import InstalledVLLM, server_environment

CUDA = InstalledVLLM(Path("python"), "0.32.0", cpu=False)


def test_one_number_shares_a_gpu_between_both():
    assert trainer_share(EngineConfig(gpu_memory_utilization=0.3)) == pytest.approx(0.65)
    assert trainer_share(EngineConfig(gpu_memory_utilization=0.6)) == pytest.approx(0.35)


def test_in_turns_the_trainer_may_have_the_whole_gpu():
    assert trainer_share(EngineConfig(gpu_memory_utilization=0.9, colocate=True)) is None


def test_a_share_that_leaves_the_trainer_nothing_is_refused_with_the_ways_out():
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.95 leaves the trainer.*colocate=True"):
        trainer_share(EngineConfig(gpu_memory_utilization=0.95))


@pytest.mark.parametrize(
    ("devices", "visible", "shared"),
    [
        (None, ["0"], True),
        (None, ["0", "1"], True),
        (("1",), ["0", "1"], False),
        (("0,1",), ["0", "1"], True),
        (("3",), ["3", "1"], True),
        (None, [], False),
    ],
)
def test_only_a_gpu_that_both_use_is_shared(
    devices: tuple[str, ...] | None, visible: list[str], shared: bool
):
    assert shared_with_trainer(EngineConfig(devices=devices), visible) is shared


def test_no_limit_is_set_where_nothing_is_shared():
    assert limit_trainer(EngineConfig(devices=("1",), gpu_memory_utilization=0.95), ["0", "1"]) is None
    assert limit_trainer(EngineConfig(), []) is None


def test_a_server_that_sleeps_does_not_get_an_allocator_setting_that_sleep_refuses():
    ours = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    env = server_environment(CUDA, EngineConfig(colocate=True), ours)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env
    assert env["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" in server_environment(CUDA, EngineConfig(), ours)
