"""Which GPUs each replica has."""

import pytest

from art_core.config import EngineConfig
from art_core.errors import ConfigError
from art_core.inference.devices import replica_configs


def devices(config: EngineConfig, visible: list[str]) -> list[tuple[str, ...] | None]:
    return [one.devices for one in replica_configs(config, visible)]


def test_replicas_have_consecutive_gpus_of_those_that_are_visible() -> None:
    assert devices(EngineConfig(replicas=2), ["0", "1", "2"]) == [("0",), ("1",)]
    four = EngineConfig(replicas=2, tensor_parallel_size=2)
    assert devices(four, ["4", "5", "6", "7"]) == [("4,5",), ("6,7",)]


def test_what_is_chosen_wins_and_one_replica_has_all() -> None:
    assert devices(EngineConfig(replicas=2, devices=("3", "1")), ["0", "1", "2", "3"]) == [("3",), ("1",)]
    assert devices(EngineConfig(devices=("1",)), ["0", "1"]) == [("1",)]
    assert devices(EngineConfig(), ["0", "1"]) == [None]


def test_on_a_cpu_replicas_have_no_devices() -> None:
    assert devices(EngineConfig(replicas=2), []) == [None, None]


def test_too_few_gpus_are_an_error_that_says_how_many_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"replicas=2 of 2 GPUs each need 4, and 3 are visible; lower replicas"
    ):
        replica_configs(EngineConfig(replicas=2, tensor_parallel_size=2), ["0", "1", "2"])


def test_address_and_port_are_the_gateways() -> None:
    for one in replica_configs(EngineConfig(replicas=2, host="0.0.0.0", port=8000), []):
        assert (one.host, one.port, one.replicas, one.gateway) == ("127.0.0.1", None, 1, False)
    (alone,) = replica_configs(EngineConfig(host="0.0.0.0", port=8000), [])
    assert (alone.host, alone.port) == ("0.0.0.0", 8000)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "external"}, "base_url and kind='external' belong together"),
        ({"base_url": "http://a/v1"}, "base_url and kind='external' belong together"),
        ({"api_key": "k"}, "api_key is for kind='external'"),
        ({"kind": "embedded", "replicas": 2}, "replicas are vLLM servers"),
        ({"devices": ("0", "1")}, "replicas=1, but devices"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


def test_a_key_is_not_shown() -> None:
    config = EngineConfig(kind="external", base_url=("http://a/v1", "http://b/v1"), api_key="secret")
    assert "secret" not in repr(config)
    assert config.base_urls == ("http://a/v1", "http://b/v1")
