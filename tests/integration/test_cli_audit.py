"""Auditing rewards from the command line."""

import json
from pathlib import Path

import pytest
from helpers.command_line import art, mail_project, told
from helpers.trajectories import a_trajectory

from art_core.cli.exits import ExitCode
from art_core.store import Store
from benchmarks.audit_cases import scored
from benchmarks.audit_runs import world


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mail_project(tmp_path_factory.mktemp("art"))


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
