import json
from pathlib import Path

import pytest

from art_core.errors import EngineError
from art_core.inference.vllm_versions import VersionTable
from art_core.types import PolicyVersion

V0, V1, V2, V3 = (PolicyVersion("agent", n) for n in range(4))


@pytest.fixture
def table() -> VersionTable:
    table = VersionTable("agent", slot_rank=8, room=2)
    table.begin(1)
    return table


def adapter(directory: Path, weights: bytes = b"w") -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def test_a_version_is_served_once_it_is_confirmed(table: VersionTable, tmp_path: Path):
    table.add(V1, adapter(tmp_path / "1"))
    assert table.served() == ()
    assert table.confirm(V1, 1)
    assert table.served() == (V1,)


def test_what_was_loaded_into_a_life_that_ended_is_not_confirmed(table: VersionTable, tmp_path: Path):
    table.add(V1, adapter(tmp_path / "1"))
    assert table.begin(2) == {}, "whoever loads it finds out by itself"
    assert not table.confirm(V1, 1)
    assert table.confirm(V1, 2)
    assert table.begin(3) == {V1: tmp_path / "1"}


def test_a_name_comes_back_with_its_own_weights_and_no_others(table: VersionTable, tmp_path: Path):
    first, second = adapter(tmp_path / "1"), adapter(tmp_path / "2")
    table.add(V1, first)
    with pytest.raises(EngineError, match=r"agent@1 was already published, and is still served"):
        table.add(V1, first)
    table.remove(V1)
    with pytest.raises(EngineError, match=r"agent@1 .*other weights.*new version number"):
        table.add(V1, second)
    table.add(V1, first)
    table.remove(V1)
    (first / "adapter_model.safetensors").write_bytes(b"changed")
    with pytest.raises(EngineError, match="other weights"):
        table.add(V1, first)


def test_a_name_whose_weights_were_never_loaded_is_free(table: VersionTable, tmp_path: Path):
    table.add(V1, adapter(tmp_path / "1"))
    table.drop(V1)
    table.add(V1, adapter(tmp_path / "2"))


def test_more_versions_than_stay_loaded_are_refused_with_the_way_out(table: VersionTable, tmp_path: Path):
    table.add(V0, None)
    table.add(V1, adapter(tmp_path / "1"))
    table.add(V2, adapter(tmp_path / "2"))
    with pytest.raises(EngineError, match=r"agent@3: vLLM keeps 2 .*max_cpu_loras.*agent@1, agent@2.*retire"):
        table.add(V3, adapter(tmp_path / "3"))
    table.remove(V1)
    table.add(V3, tmp_path / "3")


def test_what_a_server_lost_and_what_it_should_not_have_is_told_by_its_names(
    table: VersionTable, tmp_path: Path
):
    for version in (V1, V2):
        table.add(version, adapter(tmp_path / str(version.number)))
        table.confirm(version, 1)
    table.add(V0, None)
    table.confirm(V0, 1)
    names = ["agent@0", "agent", "agent@2", "agent@7", "other@1"]
    assert table.lost(names) == {V1: tmp_path / "1"}
    assert table.strays(names) == ["agent@7"]


def test_retiring_what_is_not_served_names_what_is(table: VersionTable, tmp_path: Path):
    table.add(V1, adapter(tmp_path / "1"))
    with pytest.raises(EngineError, match="agent@2 is not served; served: agent@1"):
        table.remove(V2)
