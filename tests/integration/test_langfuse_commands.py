import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import PUBLIC_KEY, SECRET_KEY, LangfuseServer
from helpers.trajectories import a_step, a_trajectory
from typer.testing import CliRunner

from art_core.cli.app import app
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.types import Scenario, TrajectoryGroup
from art_langgraph.langfuse.client import LangfuseClient, LangfuseRefusedError
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import export_to_langfuse
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.prompts import langfuse_prompt, resolve_prompts

RECORDED = Path(__file__).parents[1] / "data" / "langfuse_traces.json"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangfuseServer]:
    with LangfuseServer() as server:
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC_KEY)
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET_KEY)
        monkeypatch.setenv("LANGFUSE_BASE_URL", server.base_url)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["langfuse", *arguments, "--root", str(tmp_path)])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.output

    return run


def test_export_tells_what_was_confirmed_and_status_what_is_left(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    with Store.open("p", tmp_path) as store:
        store.save_trajectory(a_trajectory("t-1"))
    before = run("status", "--json", code=1)
    assert (before["project"], before["to_send"], before["last_confirmed"]) == ("test", 1, None)
    done = run("export", "--json", "--tag", "nightly", "--environment", "lab")
    assert (done["confirmed"], done["complete"]) == (1, True)
    root = server.trace(trace_id("t-1"))["rollout"]
    assert ("nightly" in root["tags"], root["environment"]) == (True, "lab")
    after = run("status", "--json")
    assert (after["confirmed"], after["to_send"]) == (1, 0)
    assert "1 unchanged" in run("export")


def test_the_documents_have_the_keys_that_the_page_names(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    with Store.open("p", tmp_path) as store:
        store.save_trajectory(a_trajectory("t-1"))
    page = (Path(__file__).parents[2] / "docs/langfuse.md").read_text()
    rows = re.findall(r"^\| `(status|export|import)` \| (.*?) \|", page, re.MULTILINE)
    named = {command: re.findall(r"`(\w+)`", keys) for command, keys in rows}
    assert named == {
        "status": list(run("status", "--json", code=1)),
        "export": list(run("export", "--json")),
        "import": list(run("import", "--json")),
    }
    assert isinstance(run("status", "--json")["last_confirmed"], float)


def test_what_was_refused_is_named_and_ends_with_one(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    with Store.open("p", tmp_path) as store:
        store.save_trajectory(a_trajectory("t-1"))
    server.refused_scores = {"reward"}
    output = run("export", code=1)
    assert "refused: t-1" in output
    assert "no config takes reward" in output


def test_import_makes_a_project_and_can_be_repeated(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    done = run("import", str(RECORDED), "--project", "prod", "--reward", "helpfulness", "--json")
    assert len(done["imported"]) == 2
    with Store.open("prod", tmp_path) as store:
        assert [t.reward for t in store.trajectories()] == [0.9, None]
    again = run("import", str(RECORDED), "--reward", "helpfulness", "--json")
    assert again["unchanged"] == 2
    assert "0 traces imported" in run("import", "--since", "7d", "--tag", "prod")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("import", "--since", "yesterday"), 2, "give a date"),
        (("import", "--score-min", "0.5"), 2, "name it"),
        (("export", "--run", "r-none"), 3, "no run"),
        (("import", "no/such/file.json"), 4, "cannot be read"),
        (("import", str(RECORDED), "--tag", "prod"), 2, "taken whole"),
        (("import", str(RECORDED), "--since", "last"), 2, "taken whole"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_code(
    server: LangfuseServer,
    run: Callable[..., Any],
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    Store.open("p", tmp_path).close()
    output = run(*arguments, code=code)
    assert says in output
    assert "Traceback" not in output


def test_without_keys_the_variables_are_named(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    Store.open("p", tmp_path).close()
    assert "LANGFUSE_PUBLIC_KEY" in run("export", code=2)


def test_an_export_that_is_killed_goes_on_where_it_was(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    """C60: whatever ends it, nothing is lost and nothing is there twice."""
    with Store.open("p", tmp_path) as store:
        members = tuple(a_trajectory(f"t-{number}", 1) for number in range(250))
        store.save_group(TrajectoryGroup(members[0].scenario, members))
    server.break_(path="/api/public/otel", after=1, times=1, delay=60, applied=True, status=500)
    command = [sys.executable, "-m", "art_core.cli", "langfuse", "export", "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 60
        while len(server.trace_ids) < 200:
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.kill()
    assert len(server.scores) == 100
    done = run("export", "--json")
    assert (done["unchanged"], done["confirmed"], done["complete"]) == (100, 150, True)
    assert (len(server.trace_ids), len(server.scores)) == (250, 250)
    assert len(server.observations) == 250 * 4  # the rollout, two nodes, the call


def test_an_import_that_cannot_begin_makes_no_project(
    server: LangfuseServer, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("import", "--project", "new", "--since", "yesterday", code=2)
    run("import", str(tmp_path / "none.json"), "--project", "new", code=4)
    run("import", __file__, "--project", "new", code=4)
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    run("import", "--project", "new", code=2)
    assert not list(tmp_path.iterdir())


# -- prompts -------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: LangfuseServer) -> Iterator[LangfuseClient]:
    common: dict[str, Any] = {"config": {}, "tags": []}
    server.prompts = {
        "brief": [
            {"name": "brief", "version": 1, "labels": [], "type": "text", "prompt": "Be short."} | common,
            {
                "name": "brief", "version": 2, "labels": ["production"], "type": "text",
                "prompt": "Be brief, {{name}}.",
            } | common,
        ],
        "team/chat": [
            {
                "name": "team/chat", "version": 7, "labels": ["staging"], "type": "chat",
                "prompt": [{"type": "chatmessage", "role": "system", "content": "You play {{game}}."}],
            } | common,
        ],
    }  # fmt: skip
    with LangfuseClient(LangfuseConnection.from_env().replace(requests_per_minute=60_000)) as client:
        yield client


def test_prompts_named_in_scenarios_are_filled_in_and_their_version_is_on_record(
    server: LangfuseServer, client: LangfuseClient, tmp_path: Path
) -> None:
    first = Scenario("a", {"system": {"langfuse_prompt": "brief", "variables": {"name": "Ada"}}})
    second = Scenario("b", {"system": {"langfuse_prompt": "brief", "version": 1}, "question": "why?"})
    third = Scenario("c", {"messages": langfuse_prompt("team/chat", label="staging", game="chess")})
    plain = Scenario("d", {"question": "how?"})
    one, two, three, four = resolve_prompts([first, second, third, plain], client)
    assert one.inputs == {"system": "Be brief, Ada."}
    assert one.metadata["langfuse_prompts"] == [{"name": "brief", "version": 2, "input": "system"}]
    assert two.inputs == {"system": "Be short.", "question": "why?"}
    assert three.inputs == {"messages": [{"role": "system", "content": "You play chess."}]}
    assert four is plain
    assert len(server.requests("/api/public/v2/prompts")) == 3
    with Store.open("p", tmp_path) as store:
        said = a_step("t-1", messages=({"role": "system", "content": "Be brief, Ada."},))
        other = a_step("t-1", 1)
        trajectory = a_trajectory("t-1", 0, scenario=one)
        store.save_trajectory(replace(trajectory, steps=(said, other)))
        export_to_langfuse(store, client=client)
    calls = sorted(
        (o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION"),
        key=lambda o: o["startTime"],
    )
    assert [(c["promptName"], c["promptVersion"]) for c in calls] == [("brief", 2), (None, None)]


@pytest.mark.parametrize(
    ("reference", "error", "says"),
    [
        ({"langfuse_prompt": "brief"}, ConfigError, "leaves name open"),
        ({"langfuse_prompt": "brief", "label": "a", "version": 1}, ConfigError, "not by both"),
        ({"langfuse_prompt": "brief", "tag": "a"}, ConfigError, "tag: no part of a reference"),
        ({"langfuse_prompt": "none"}, LangfuseRefusedError, "reading prompt 'none'"),
        ({"langfuse_prompt": "brief", "version": 9}, LangfuseRefusedError, "404"),
    ],
)
def test_a_wrong_reference_says_what_is_wrong(
    client: LangfuseClient, reference: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        resolve_prompts([Scenario("a", {"system": reference})], client)
