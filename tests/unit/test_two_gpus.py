"""What the benchmark of several GPUs makes of its runs."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from art_core.types import PolicyVersion
from benchmarks.two_gpus import Sheet, main, merged, parse, ratios, read
from benchmarks.two_gpus_cpu import kind_of
from benchmarks.two_gpus_serving import TOKENS, Load, wanted

TOP = Path(__file__).parents[2]


def together(name: str, **figures: float) -> dict[str, object]:
    return {"part": "together", "name": name, "model": name.split()[0], **figures}


def test_ratios_are_to_one_gpu_of_the_same_model_and_to_the_shared_gpu():
    found = ratios(
        [
            together("7b ddp 1", tokens_per_second=1000.0),
            together("7b ddp 2", tokens_per_second=1900.0),
            together("7b fsdp2 2", tokens_per_second=1500.0),
            together("135m ddp 2", tokens_per_second=5.0),
            together("135m ddp 2 float32", largest_gradient_difference=1e-7),
            {"part": "apart", "name": "shared", "steps_per_minute": 4.0},
            {"part": "apart", "name": "overlap1", "steps_per_minute": 7.0},
            {"part": "apart", "name": "overlap4", "error": "EngineError: it did not start"},
            {"part": "serving", "name": "one", "tokens_per_second": 100.0},
            {"part": "serving", "name": "replicas", "tokens_per_second": 190.0},
        ]
    )
    assert found == {
        "7b ddp 2_vs_one_gpu": 1.9,
        "7b fsdp2 2_vs_one_gpu": 1.5,
        "135m ddp 2 float32_gradient_difference": 1e-7,
        "apart_overlap1_vs_shared_steps_per_minute": 1.75,
        "two_replicas_vs_one": 1.9,
    }


def test_a_run_that_failed_replaces_no_run_that_did_not():
    good, bad = together("7b ddp 2", tokens_per_second=1.0), {**together("7b ddp 2"), "error": "killed"}
    assert merged([[good], [bad]]) == [good]
    assert merged([[bad], [good]]) == [good]
    assert merged([[bad]]) == [bad]


def test_files_are_put_together_with_their_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for count, speed in ((1, 100.0), (2, 185.0)):
        Sheet(tmp_path / f"{count}.json").add(together(f"7b ddp {count}", tokens_per_second=speed))
    out = tmp_path / "two_gpus.json"
    main(["merge", str(tmp_path / "1.json"), str(tmp_path / "2.json"), "--out", str(out)])
    whole = json.loads(out.read_text())
    assert whole["ratios"] == {"7b ddp 2_vs_one_gpu": 1.85}
    assert len(read(out)) == 2
    assert {"processor", "cores", "gpus"} <= whole["hardware"].keys()


def test_a_merged_file_names_the_machine_of_its_runs_and_not_the_one_that_merges(tmp_path: Path):
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    for path, count in ((first, 1), (second, 2)):
        runs = [together(f"7b ddp {count}", tokens_per_second=100.0 * count)]
        there = {"hardware": {"gpus": ["A", "A"], "cores": 4 * count}, "versions": {"torch": "0"}}
        path.write_text(json.dumps({**there, "ratios": {}, "raw": {"runs": runs}}))
    out = tmp_path / "whole.json"
    main(["merge", str(first), str(second), "--out", str(out)])
    whole = json.loads(out.read_text())
    assert whole["hardware"] == {"gpus": ["A", "A"], "cores": 8}
    assert whole["versions"] == {"torch": "0"}
    assert [run["cores"] for run in read(out)] == [4, 8]
    assert whole["ratios"] == {"7b ddp 2_vs_one_gpu": 2.0}
    second.write_text(json.dumps({**json.loads(second.read_text()), "hardware": {"gpus": ["B"]}}))
    with pytest.raises(SystemExit, match="of 2 machines"):
        main(["merge", str(first), str(second), "--out", str(out)])


def test_modes_are_drawn_where_they_were_played(tmp_path: Path):
    steps = [{"step": n, "at": 4.0 * n, "reward": 0.2 * n} for n in (1, 2, 3)]
    sheet, picture = Sheet(tmp_path / "1.json"), tmp_path / "images" / "apart.png"
    sheet.add(together("7b ddp 1", tokens_per_second=1.0))
    command = [
        "merge",
        str(tmp_path / "1.json"),
        "--out",
        str(tmp_path / "2.json"),
        "--picture",
        str(picture),
    ]
    main(command)
    assert not picture.exists()
    sheet.add({"part": "apart", "name": "overlap1", "steps": steps})
    sheet.add({"part": "apart", "name": "shared", "error": "EngineError: it did not start"})
    main(command)
    assert picture.read_bytes().startswith(b"\x89PNG")


class EngineOf:
    base_url = "http://127.0.0.1:9/v1"


class Answered(Load):
    """Each request takes a few turns of the loop and gives five tokens."""

    async def _post(self, body: dict[str, object]) -> int:
        for _ in range(self.done % 3 + 1):
            await asyncio.sleep(0)
        return 5


async def test_tokens_of_requests_that_go_on_side_by_side_are_all_counted():
    async with Answered(EngineOf(), PolicyVersion("m", 1), 8) as load:
        await load.answered(200)
    assert load.tokens == 5 * load.done


def test_answers_are_as_long_for_every_caller_and_in_every_round():
    least, most = TOKENS
    for lengths in (
        [wanted(number, 1) for number in range(256)],
        [wanted(number, 2) for number in range(256)],
        [wanted(7, asked) for asked in range(256)],
    ):
        assert min(lengths) >= least
        assert max(lengths) <= most
        assert len(set(lengths)) > 100
        assert sum(lengths) / len(lengths) == pytest.approx((least + most) / 2, rel=0.02)


WATCHING = """
import json, subprocess, sys, time
import psutil
from benchmarks.two_gpus_cpu import CpuWatch

busy = "print('on', flush=True)\\nwhile True: pass"
with subprocess.Popen([sys.executable, "-c", busy, "EngineCore"], stdout=subprocess.PIPE) as working:
    working.stdout.readline()
    with CpuWatch() as watch:
        before = psutil.Process(working.pid).cpu_times().user
        while psutil.Process(working.pid).cpu_times().user < before + 0.2:
            time.sleep(0.01)
    working.kill()
print(json.dumps(watch.cores))
"""


def test_processes_are_told_apart_and_their_work_is_seen():
    # In a process of its own: this one may have a server that other tests use, with a core of its own.
    ran = subprocess.run([sys.executable, "-c", WATCHING], stdout=subprocess.PIPE, cwd=TOP, check=True)
    cores = json.loads(ran.stdout)
    assert cores.keys() == {"engine core", "main"}
    (share,) = cores["engine core"]
    assert 0 < share < 1.5
    assert len(cores["main"]) == 1
    assert kind_of(["python", "-m", "art_core.training.rank", "socket"]) == "trainer"
    assert kind_of(["python", "-c", "from multiprocessing.spawn import spawn_main; ..."]) == "worker"


def test_a_file_that_is_there_is_gone_on_with(tmp_path: Path):
    out = tmp_path / "two_gpus.json"
    Sheet(out).add(together("a ddp 1", tokens_per_second=1.0))
    Sheet(out).add(together("b ddp 1", tokens_per_second=1.0))
    assert [run["name"] for run in read(out)] == ["a ddp 1", "b ddp 1"]


def test_every_part_has_a_command():
    for part in ("together", "apart", "serving"):
        assert parse([part]).part == part
