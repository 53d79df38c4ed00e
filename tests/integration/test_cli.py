"""The command line, as its users start it: reading, exporting and judging what is recorded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import READING, art, mail_project, process, told
from helpers.trajectories import a_step, a_trajectory
from rich.cells import cell_len

from art_core.cli.exits import ExitCode
from art_core.jsonl import import_trajectories
from art_core.store import Store

ASK = ({"role": "user", "content": "Paris or Rome?"},)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mail_project(tmp_path_factory.mktemp("art"))


# -- lists -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [a for a in READING if a != ("watch",)], ids=" ".join)
def test_lists_are_readable_at_80_columns(root: Path, arguments: tuple[str, ...]) -> None:
    done = art(root, *arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) > 1 or arguments[0] == "feedback"
    assert max(map(cell_len, lines)) <= 80


def test_runs_are_listed_newest_first_with_what_tells_whether_they_learn(root: Path) -> None:
    listed = told(root, "runs")
    assert [run["id"] for run in listed["runs"]] == ["r-0002", "r-0001", "r-0000"]
    with Store.open("mail", root) as store:
        last = [m.value for m in store.metrics("r-0000", "reward_mean")][-1]
    assert listed["runs"][2]["reward_mean"] == last
    assert listed["project"] == "mail"
    assert len(told(root, "runs", "-n", "1")["runs"]) == 1
    assert "2 more: --limit 3" in art(root, "runs", "-n", "1").stdout


def test_a_run_is_found_by_a_part_of_its_id(root: Path) -> None:
    assert told(root, "runs", "0001")["run"]["id"] == "r-0001"
    assert told(root, "runs", "last")["run"]["id"] == "r-0002"
    assert json.loads(art(root, "audit", "last", "--json").stdout)["run"] == "r-0002"
    several = art(root, "runs", "r-")
    assert several.exit_code == ExitCode.NOT_FOUND
    assert "3 runs called 'r-'" in several.stderr


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (("--run", "r-0001"), lambda t: t["run_id"] == "r-0001"),
        (("--status", "failed"), lambda t: t["status"] == "failed"),
        (("--cause", "timeout"), lambda t: t["cause"] == "timeout"),
        (("--reward-min", "0.5", "--reward-max", "0.8"), lambda t: 0.5 <= (t["reward"] or 0.0) <= 0.8),
        (("--step", "2"), lambda t: t["policy_number"] == 2),
        (("--scenario", "question-007"), lambda t: t["scenario_id"] == "question-007"),
        (("--node", "search"), lambda t: "search" in t["nodes"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_filters_let_through_what_they_name_and_nothing_else(
    root: Path, options: tuple[str, ...], fits: Callable[[Any], bool]
) -> None:
    everything = told(root, "trajectories", "list", "-n", "500")["trajectories"]
    found = told(root, "trajectories", "list", "-n", "500", *options)["trajectories"]
    assert found == [t for t in everything if fits(t)]
    assert 0 < len(found) < len(everything)


def test_pages_go_through_the_whole_list_once(root: Path) -> None:
    seen, after = [], None
    while True:
        page = told(root, "trajectories", "list", "-n", "50", *(("--after", after) if after else ()))
        seen += [t["id"] for t in page["trajectories"]]
        if (after := page["next"]) is None:
            break
    assert len(seen) == len(set(seen)) == 121


# -- one or two ------------------------------------------------------------------------------------------


def test_a_trajectory_is_shown_with_rewards_and_what_people_said(root: Path) -> None:
    shown = art(root, "trajectories", "show", "0000001").stdout
    assert "t-0000001" in shown
    assert "reward 0.250  by judge" in shown
    assert "it guessed" in shown
    assert "thumb up  by ana" in shown
    assert max(map(cell_len, shown.splitlines())) <= 80
    whole = told(root, "trajectories", "show", "t-0000001")
    assert whole["scores"][-1]["explanation"] == "it guessed"
    assert whole["feedback"][0]["comment"] == "fine"
    tree = art(root, "trajectories", "show", "t-0000001", "--tree").stdout
    assert "planner" in tree


def test_a_node_that_made_no_call_is_a_usage_error_that_lists_those_that_did(root: Path) -> None:
    done = art(root, "trajectories", "show", "t-0000001", "--node", "painter")
    assert done.exit_code == ExitCode.USAGE
    assert "planner" in done.stderr


def test_two_trajectories_are_compared_from_where_they_part(tmp_path: Path) -> None:
    def answered(name: str, words: str, reward: float) -> Any:
        step = a_step(name, messages=ASK, response={"role": "assistant", "content": words})
        return replace(a_trajectory(name, reward=reward), steps=(step,))

    with Store.open("p", tmp_path) as store:
        store.save_trajectory(answered("t-a", "Paris", 1.0))
        store.save_trajectory(answered("t-b", "Rome", 0.0))
    compared = told(tmp_path, "trajectories", "compare", "t-a", "t-b")
    assert compared["same_scenario"] is True
    assert compared["common_messages"] == list(ASK)
    assert [t["messages"][0]["content"] for t in compared["trajectories"]] == ["Paris", "Rome"]
    assert [t["reward"] for t in compared["trajectories"]] == [1.0, 0.0]
    shown = art(tmp_path, "trajectories", "compare", "t-a", "t-b").stdout
    assert shown.count("Paris or Rome?") == 0
    assert "1 messages in common" in shown
    alike = told(tmp_path, "trajectories", "compare", "t-a", "t-a")
    assert [t["messages"] for t in alike["trajectories"]] == [[], []]


# -- export ----------------------------------------------------------------------------------------------


def test_an_export_reads_back_as_what_the_store_holds(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "out" / "some.jsonl"
    said = told(root, "trajectories", "export", "--run", "last", "--to", str(file))
    with Store.open("mail", root) as store:
        kept = list(store.trajectories("r-0002"))
    assert list(import_trajectories(file)) == kept
    assert said == {"path": str(file), "trajectories": len(kept), "lines": len(kept)}
    assert art(root, "trajectories", "export", "--run", "last").stdout == file.read_text()
    assert len(art(root, "trajectories", "export", "-n", "3").stdout.splitlines()) == 3


def test_conversations_are_exported_in_openais_form(root: Path) -> None:
    lines = art(root, "trajectories", "export", "-n", "2", "--form", "conversations").stdout.splitlines()
    for line in map(json.loads, lines):
        assert line["messages"][-1]["role"] == "assistant"


def test_a_file_that_cannot_be_written_is_left_out_whole(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    done = art(root, "trajectories", "export", "--to", str(tmp_path / "file" / "inside.jsonl"))
    assert done.exit_code == ExitCode.STORE
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# -- feedback ----------------------------------------------------------------------------------------------


def test_what_people_say_is_kept_listed_and_exported(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        for name in ("t-a", "t-b"):
            answer = a_step(name, messages=ASK, response={"role": "assistant", "content": name})
            store.save_trajectory(replace(a_trajectory(name), steps=(answer,)))
    told(tmp_path, "feedback", "thumb", "t-a", "down", "-c", "it lied")
    told(tmp_path, "feedback", "score", "t-a", "0.75", "--author", "bo")
    told(tmp_path, "feedback", "prefer", "t-a", "t-b")
    (pair,) = map(json.loads, art(tmp_path, "feedback", "export", "--form", "pairs").stdout.splitlines())
    assert set(pair) >= {"prompt", "chosen", "rejected"}
    told(tmp_path, "feedback", "prefer", "t-b", "t-a", "--tie")
    said = told(tmp_path, "feedback", "list")["feedback"]
    assert [(f["trajectory_id"], f["kind"], f["value"], f["author"], f["over"]) for f in said] == [
        ("t-a", "thumb", -1.0, "tester", None),
        ("t-a", "score", 0.75, "bo", None),
        ("t-a", "choice", 1.0, "tester", "t-b"),
        ("t-b", "choice", 0.5, "tester", "t-a"),
    ]
    with Store.open("p", tmp_path) as store:
        assert store.trajectory("t-a").reward == 0.5, "feedback is no reward"
    file = tmp_path / "said.jsonl"
    assert told(tmp_path, "feedback", "export", "--to", str(file))["lines"] == 4
    assert [json.loads(line) for line in file.read_text().splitlines()] == said
    assert art(tmp_path, "feedback", "score", "t-a", "7").exit_code == ExitCode.USAGE
    assert art(tmp_path, "feedback", "thumb", "t-z", "up").exit_code == ExitCode.NOT_FOUND


# -- which record ----------------------------------------------------------------------------------------


def test_the_only_project_needs_no_name_and_of_several_one_is_chosen(tmp_path: Path) -> None:
    nothing = art(tmp_path, "runs")
    assert nothing.exit_code == ExitCode.NOT_FOUND
    assert "--root" in nothing.stderr
    assert not list(tmp_path.iterdir()), "looking makes nothing"
    (tmp_path / "notes.db").write_text("no database")
    Store.open("one", tmp_path).close()
    assert told(tmp_path, "runs")["project"] == "one"
    Store.open("two", tmp_path).close()
    several = art(tmp_path, "runs")
    assert several.exit_code == ExitCode.NOT_FOUND
    assert "one, two" in several.stderr
    assert told(tmp_path, "runs", "--project", "two")["project"] == "two"
    wrong = art(tmp_path, "runs", "--project", "three")
    assert wrong.exit_code == ExitCode.NOT_FOUND
    assert "one, two" in wrong.stderr


def test_a_url_names_its_project_itself(root: Path, tmp_path: Path) -> None:
    assert told(tmp_path, "runs", "--url", f"sqlite:///{root / 'mail.db'}")["project"] == "mail"
    missing = art(tmp_path, "runs", "--url", f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.exit_code == ExitCode.STORE
    assert not (tmp_path / "none.db").exists()


def test_a_file_that_is_no_store_is_a_store_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "p.db").write_bytes(b"not a database at all" * 100)
    done = process(tmp_path, "runs", "--project", "p")
    assert done.returncode == ExitCode.STORE
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_filter_that_names_what_is_not_there_is_told_what_is(root: Path) -> None:
    done = art(root, "trajectories", "list", "--node", "plannner", "--cause", "timeouts", "--step", "900")
    assert done.exit_code == ExitCode.OK
    said = " ".join(done.stdout.split())
    assert said.startswith("no trajectory is like that; there are nodes: ")
    assert "planner" in said
    assert "causes of failures: " in said
    assert "steps: 0, 1, 2" in said
    assert (
        art(root, "trajectories", "list", "--reward-min", "9").stdout.strip() == "no trajectory is like that"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("runs", "none-such"), ExitCode.NOT_FOUND),
        (("trajectories", "show", "none-such"), ExitCode.NOT_FOUND),
        (("trajectories", "list", "--group", "none-such"), ExitCode.NOT_FOUND),
        (("trajectories", "list", "--after", "garbage"), ExitCode.USAGE),
        (("trajectories", "list", "--reward-min", "nan"), ExitCode.USAGE),
        (("trajectories", "list", "--order", "strange"), ExitCode.USAGE),
        (("trajectories", "export", "--json"), ExitCode.USAGE),
        (("report", "none-such"), ExitCode.NOT_FOUND),
        (("watch", "none-such"), ExitCode.NOT_FOUND),
        (("dashboard", "--host", "0.0.0.0"), ExitCode.USAGE),
        (("no-such-command",), ExitCode.USAGE),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else str(int(v)),
)
def test_mistakes_end_with_the_documented_code_and_say_the_way_out(
    root: Path, arguments: tuple[str, ...], code: ExitCode
) -> None:
    done = art(root, *arguments)
    assert done.exit_code == code, done.output
    assert not done.stdout
    assert done.stderr.strip()


# -- doctor ----------------------------------------------------------------------------------------------


def test_a_package_that_crashes_when_it_is_imported_is_a_finding(tmp_path: Path) -> None:
    for name, body in (
        ("torch", "import os; os.abort()"),
        ("vllm", "raise OSError('libcuda: no such file')"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body)
    done = process(tmp_path, "doctor", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == ExitCode.FINDING, done.stderr
    said = json.loads(done.stdout)
    checks = {check["name"]: check for check in said["checks"]}
    assert not said["ok"]
    assert checks["torch"]["status"] == "broken"
    assert "-6" in checks["torch"]["found"]
    if checks["vllm"]["status"] != "missing":
        assert "libcuda: no such file" in checks["vllm"]["found"]
    can = {ability["what"].partition(" on the ")[0]: ability["possible"] for ability in said["can"]}
    assert not can["train with GRPO"]
    assert can["capture, replay, rewards, RULER"]


def test_what_is_not_installed_is_said_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from art_core.observe import machine
    from art_core.observe.diagnosis import diagnose

    def without(package: str) -> str:
        if package in ("plotly", "torch"):
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(machine, "version", without)
    found = diagnose(tmp_path / "not" / "made" / "yet", quick=True)
    checks = {check.name: check for check in found.checks}
    assert found.ok, "what is not installed is no fault"
    assert checks["extra serve"].found == "lacks plotly"
    assert checks["extra serve"].fix == "pip install 'art-langgraph[serve]'"
    assert (checks["torch"].status, checks["torch"].fix) == ("missing", "pip install 'art-langgraph[train]'")
    assert not any(ability.possible for ability in found.can if ability.what.startswith("train"))
    assert "GiB free" in checks["disk"].found
    assert not (tmp_path / "not").exists()
