"""The command line, as its users start it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.synthetic_store import HOSTILE, fill
from helpers.trajectories import a_step, a_trajectory
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from art_core.cli.app import app
from art_core.cli.exits import ExitCode
from art_core.cli.reference import reference
from art_core.cli.shapes import MEMBERS, SHAPES
from art_core.jsonl import import_trajectories
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, Scenario
from benchmarks.audit_cases import scored
from benchmarks.audit_runs import world

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


ASK = ({"role": "user", "content": "Paris or Rome?"},)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with three runs."""
    root = tmp_path_factory.mktemp("art")
    with Store.open("mail", root) as store:
        fill(store, run_count=3, rollouts=120, train_steps=6)
        store.save_trajectory(
            a_trajectory(
                "t-lost", status=RolloutStatus.FAILED, reward=None, failure=Failure("timeout", "slow")
            )
        )
        store.score("t-0000001", 0.25, author="judge", explanation="it guessed")
        store.add_feedback("t-0000001", kind="thumb", value=1, author="ana", comment="fine")
    return root


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose every text was written by somebody who means harm."""
    root = tmp_path_factory.mktemp("hostile")
    with Store.open("mail", root) as store:
        fill(store, run_count=5, rollouts=80, train_steps=4, hostile=True)
        texts = "".join(HOSTILE[:5]) + "[red]x[/red] [link=http://e]y[/link] :smile:"
        said = a_step("t-evil", messages=({"role": texts, "content": texts + HOSTILE[5]},), model=texts)
        evil = a_trajectory("t-evil", scenario=Scenario(texts), components={texts: 1.0})
        store.save_trajectory(replace(evil, steps=(said,)))
        store.score("t-evil", 0.5, author=texts, explanation=texts, components={texts: 0.5})
        store.add_feedback("t-evil", kind="score", value=0.5, author=texts, comment=texts)
    return root


def art(root: Path, *arguments: str, columns: int = 80) -> Result:
    """Run a command in this process."""
    environment = {"ART_ROOT": str(root), "COLUMNS": str(columns), "ART_PROJECT": "", "ART_AUTHOR": "tester"}
    return CliRunner().invoke(app, list(arguments), env={k: v or None for k, v in environment.items()})


def told(root: Path, *arguments: str) -> Any:
    """What a command says with --json."""
    done = art(root, *arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    assert done.stdout.isascii()
    return json.loads(done.stdout)


def process(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whose output is no terminal."""
    return subprocess.run(
        [sys.executable, "-m", "art_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "ART_ROOT": str(root), "COLUMNS": "80", **environment},
    )


# -- help ----------------------------------------------------------------------------------------------


def test_help_loads_neither_the_store_nor_engines_nor_other_packages_commands() -> None:
    heavy = (
        "sqlalchemy",
        "openai",
        "fastapi",
        "torch",
        "langchain_core",
        "langfuse",
        "art_langgraph",
        "plotly",
    )
    code = (
        "import sys\n"
        "from art_core.cli import main\n"
        "sys.argv = ['art-langgraph', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        f"    print('LOADED', *(name for name in {heavy} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1].split() == ["LOADED"], done.stdout + done.stderr
    assert "langfuse" in done.stdout


def commands() -> list[tuple[str, Any]]:
    """Every command with its path."""
    import typer

    def walk(path: tuple[str, ...], command: Any) -> Any:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(path), command
        else:
            for name, sub in inner.items():
                yield from walk((*path, name), sub)

    return list(walk((), typer.main.get_command(app)))


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_says_what_it_and_each_of_its_options_is_for(name: str, root: Path) -> None:
    command = dict(commands())[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"
    shown = art(root, *name.split(), "--help")
    assert shown.exit_code == 0
    assert all(cell_len(line) <= 80 for line in shown.stdout.splitlines())


def test_commands_of_other_packages_are_there_and_run() -> None:
    shown = art(Path("."), "langfuse", "--help")
    assert shown.exit_code == 0, shown.output
    assert "export" in shown.stdout
    assert "import" in shown.stdout


# -- lists -----------------------------------------------------------------------------------------------

READING = (
    ("runs",),
    ("runs", "last"),
    ("trajectories", "list", "-n", "50"),
    ("trajectories", "list", "--order", "best"),
    ("feedback", "list"),
    ("watch",),
)


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


# -- audit -----------------------------------------------------------------------------------------------


def test_an_audit_ends_with_1_when_it_finds_something(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        run = store.begin_run("agent", {})
        for number in range(24):
            store.save_trajectory(
                a_trajectory(f"t-{number}", group_id=f"g-{number // 8}", reward=1.0), run_id=run
            )
    done = art(tmp_path, "audit", "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == ExitCode.FINDING
    assert said["run"] == run
    assert said["findings"]
    assert "1 finding\n" in art(tmp_path, "audit").stdout


def test_a_record_without_runs_is_audited_whole(tmp_path: Path) -> None:
    with Store.open("imported", tmp_path) as store:
        for number in range(24):
            store.save_trajectory(a_trajectory(f"t-{number}", group_id=f"g-{number // 8}", reward=1.0))
    done = art(tmp_path, "audit", "--json")
    said = json.loads(done.stdout)
    assert (said["run"], said["scored"]) == (None, 24)
    assert done.exit_code == ExitCode.FINDING
    assert art(tmp_path, "audit", "last").exit_code == ExitCode.NOT_FOUND


MINE = """
import json, re
from art_core.rewards import Ruler
from art_core.rewards.judge import Answer

print("imported")

def words(trajectory):
    print("asked")
    return float(sum(len(step.response['content'].split()) for step in trajectory.steps))

class Last:
    name = "likes what stands last"

    async def ask(self, messages, schema):
        asked = next(m["content"] for m in messages if m["role"] == "user")
        found = re.findall(r"^<<<run (\\S+) ", asked, re.MULTILINE)
        scores = [{"id": n, "explanation": "", "score": i / len(found)} for i, n in enumerate(found, 1)]
        return Answer(json.dumps({"scores": scores}))

ruler = Ruler(Last())
"""


def test_an_audit_asks_the_function_and_the_judge_that_gave_the_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards_of_the_audit.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with Store.open("p", tmp_path) as store:
        run = store.begin_run("agent", {})
        for group in scored(
            lambda t: float(sum(len(str((s.response or {}).get("content")).split()) for s in t.steps)),
            world(5, 8, 4),
        ):
            store.save_group(group, run_id=run)
    alone = told(tmp_path, "audit")
    assert (alone["reward_calls"], alone["judge_calls"]) == (0, 0)
    asked = told(
        tmp_path,
        *("audit", "--reward", "my_rewards_of_the_audit:words", "--ruler", "my_rewards_of_the_audit:ruler"),
        *("--groups", "6", "--expected", "answer"),
    )
    assert asked["reward_calls"] > 20
    assert asked["judge_calls"] >= 24
    names = {finding["name"] for finding in asked["findings"]}
    assert {"pays_for_length", "judge_prefers_place"} <= names, names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--reward", "words"), "package.module:name"),
        (("--reward", "no_such_module_here:words"), "no_such_module_here"),
        (("--reward", "math:pi"), "expected a reward function"),
        (("--ruler", "math:cos"), "expected a Ruler"),
        (("--groups", "0"), "--groups"),
        (("--timeout", "0"), "timeout"),
    ],
)
def test_an_audit_that_cannot_ask_says_why_with_2(root: Path, options: tuple[str, ...], said: str) -> None:
    done = art(root, "audit", *options)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert said in done.stderr


# -- untrusted text ----------------------------------------------------------------------------------------

EVERYTHING = (
    *READING,
    ("trajectories", "show", "t-evil"),
    ("trajectories", "show", "t-evil", "--full"),
    ("trajectories", "show", "t-evil", "--tree"),
    ("trajectories", "compare", "t-evil", "t-0000001"),
    ("trajectories", "list", "--scenario", "nothing\x1b[2J"),
    ("audit",),
)


@pytest.mark.parametrize("arguments", EVERYTHING, ids=lambda a: " ".join(a)[:40])
def test_untrusted_text_neither_commands_the_terminal_nor_drowns_it(
    hostile: Path, arguments: tuple[str, ...]
) -> None:
    done = art(hostile, *arguments)
    assert done.exit_code in (0, 1), done.output
    assert not CONTROL.search(done.output), CONTROL.findall(done.output)[:5]
    done.output.encode()
    if "--full" not in arguments:
        assert len(done.output) < 200_000
    if arguments[:2] == ("trajectories", "show") and "--tree" not in arguments:
        plain = done.output.replace("\n", "").replace(" ", "")
        assert "[red]x[/red]" in plain, "markup is shown, not obeyed"
        assert ":smile:" in plain


@pytest.mark.parametrize("arguments", [a for a in EVERYTHING if "--full" not in a and "--tree" not in a])
def test_json_is_ascii_whatever_was_recorded(hostile: Path, arguments: tuple[str, ...]) -> None:
    done = art(hostile, *arguments, "--json")
    assert done.stdout.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    for line in done.stdout.splitlines():
        json.loads(line)


def test_errors_repeat_what_was_typed_harmlessly(root: Path) -> None:
    done = art(root, "trajectories", "show", "\x1b]0;owned\x07[red]no[/red]")
    assert done.exit_code == ExitCode.NOT_FOUND
    assert not CONTROL.search(done.stderr)
    assert "[red]no[/red]" in done.stderr


# -- where output goes -----------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_error(hostile: Path) -> None:
    for arguments in (("trajectories", "export"), ("trajectories", "list"), ("watch", "--json")):
        command = [sys.executable, "-m", "art_core.cli", *arguments]
        environment = {**os.environ, "ART_ROOT": str(hostile)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as started:
            assert started.stdout is not None
            assert started.stderr is not None
            started.stdout.close()  # before anything was written
            complaint = started.stderr.read()
            assert started.wait(timeout=60) == ExitCode.PIPE_CLOSED, complaint
        assert complaint == b""


def test_without_a_terminal_or_with_no_color_there_are_no_escapes(root: Path) -> None:
    assert "\x1b" not in process(root, "runs").stdout
    # NO_COLOR takes colours, also where one is forced to believe in a terminal.
    forced = process(root, "runs", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", forced)
    assert "\x1b[" in process(root, "runs", FORCE_COLOR="1", TERM="xterm-256color").stdout


def test_output_that_cannot_spell_a_character_goes_on(root: Path) -> None:
    done = process(root, "runs", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "r-0002" in done.stdout


# -- the documented shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_json_has_the_documented_keys(name: str, root: Path, tmp_path: Path) -> None:
    arguments = {
        "runs RUN": ("runs", "last"),
        "trajectories show": ("trajectories", "show", "t-0000001"),
        "trajectories compare": ("trajectories", "compare", "t-0000001", "t-0000002"),
        "trajectories export": ("trajectories", "export", "-n", "1", "--to", str(tmp_path / "t.jsonl")),
        "report": ("report", "--examples", "1", "--to", str(tmp_path / "r.html")),
        "feedback thumb": ("feedback", "thumb", "t-0000002", "up"),
        "feedback score": ("feedback", "score", "t-0000002", "0.5"),
        "feedback prefer": ("feedback", "prefer", "t-0000002", "t-0000003"),
        "feedback export": ("feedback", "export", "--to", str(tmp_path / "f.jsonl")),
        "doctor": ("doctor", "--quick"),
    }.get(name, tuple(name.split()))
    document = told(root, *arguments)
    expected = [key.removesuffix("[]") for key in SHAPES[name]]
    assert set(document) == set(expected)
    for key in SHAPES[name]:
        if key.endswith("[]"):
            assert isinstance(document[key[:-2]], list)
            members = MEMBERS.get(f"{name}: {key}")
            if members and document[key[:-2]]:
                assert set(document[key[:-2]][0]) == set(members)


def test_the_documented_commands_are_those_that_there_are() -> None:
    """``python -m art_core.cli.reference > docs/command-line.md`` brings the page up to date."""
    page = Path(__file__).parents[2] / "docs/command-line.md"
    assert page.read_text() == reference()


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
