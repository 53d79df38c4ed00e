"""Runs and trajectories by a part of their ids; the only record of a directory."""

import re
from pathlib import Path

import pytest
from helpers.trajectories import a_trajectory

from art_core.errors import StoreError, UnknownProjectError, UnknownRunError, UnknownTrajectoryError
from art_core.store import Store
from art_core.store.finding import find_run, find_trajectory_id, open_existing


@pytest.mark.parametrize("part", ["t-abcdef", "t-ab", "def", "bcd"])
def test_a_trajectory_is_found_by_any_part_that_no_other_has(tmp_path: Path, part: str) -> None:
    with Store.open("p", tmp_path) as store:
        for name in ("t-abcdef", "t-xyz"):
            store.save_trajectory(a_trajectory(name))
        assert find_trajectory_id(store, part) == "t-abcdef"


def test_whole_ids_go_before_their_ends_and_those_before_what_is_inside(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        for name in ("t-12", "t-1", "x-t-12-9", "12-and-more"):
            store.save_trajectory(a_trajectory(name))
        assert find_trajectory_id(store, "t-1") == "t-1"
        assert find_trajectory_id(store, "and") == "12-and-more"
        with pytest.raises(UnknownTrajectoryError, match="several trajectories called '12', such as"):
            find_trajectory_id(store, "12")
        assert find_trajectory_id(store, "more") == "12-and-more"
        with pytest.raises(UnknownTrajectoryError, match="no trajectory '%'"):
            find_trajectory_id(store, "%")


def test_a_run_is_found_in_the_same_way_and_the_newest_ones_are_named_first(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        first, second = store.begin_run("a", {}), store.begin_run("a", {})
        assert find_run(store, first[3:-1]).id == first
        assert find_run(store, first[-8:]).id == first
        assert find_run(store).id == find_run(store, "last").id == second
        with pytest.raises(UnknownRunError, match=f"its newest: {second}, {first}"):
            find_run(store, "nobody")


def test_a_damaged_record_is_not_taken_for_none(tmp_path: Path) -> None:
    with Store.open("mail", tmp_path) as store:
        store.begin_run("agent")
    file = tmp_path / "mail.db"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(StoreError, match=re.escape(f"{file}: the file is damaged")):
        open_existing(root=tmp_path)


def test_a_file_in_place_of_its_directory_is_told_how_it_is_named(tmp_path: Path) -> None:
    Store.open("mail", tmp_path).close()
    file = tmp_path / "mail.db"
    with pytest.raises(UnknownProjectError, match=re.escape(f"--url sqlite:///{file}")):
        open_existing(root=file)
    with pytest.raises(StoreError, match=r"is not a database URL, such as sqlite:///"):
        open_existing(url=str(file))
