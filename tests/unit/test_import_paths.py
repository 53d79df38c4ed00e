"""Import paths: what a user names, and what they are told when it is not there."""

import sys
from pathlib import Path

import pytest

from art_core.errors import ConfigError
from art_core.import_paths import load_object


def test_what_lies_at_a_path_is_found_also_inside_a_class() -> None:
    assert load_object("pathlib:Path") is Path
    assert load_object("pathlib:Path.home") == Path.home


@pytest.mark.parametrize("path", ["pathlib", "pathlib:", ":Path", ""])
def test_what_has_no_two_halves_is_no_import_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:name"):
        load_object(path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        load_object("no_such_module:reward")
    with pytest.raises(ConfigError, match="has no 'Weg'"):
        load_object("pathlib:Weg")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_object("raises_at_import:reward")
    assert "raises_at_import" not in sys.modules


def test_a_script_that_ends_itself_when_it_is_imported_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the command that imports it would end with the script's own exit code, without a word."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_whole_script.py").write_text("def reward(t): return 1.0\nimport sys\nsys.exit(0)")
    with pytest.raises(ConfigError, match=r"ends by sys.exit\(0\); .*__main__"):
        load_object("a_whole_script:reward")
