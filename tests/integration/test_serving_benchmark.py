"""The serving benchmark runs, reads its own results, and writes them into the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.vllm_server import FakeVLLM

from benchmarks import serving_table
from benchmarks.serving_load import Job, Load
from benchmarks.serving_profile import Profiling, hottest

ROOT = Path(__file__).parents[2]
RATES = {
    256: {
        "base": {"plain": [100.0, 200.0, 100.0], "packed": [90.0, 190.0, 95.0], "gateway": [90.0, 95.0, 95.0]}
    },
    1: {"adapter": {"plain": [10.0], "spelled": [5.0]}},
}
FACTS = {
    "publishing": {
        "seconds": [0.1, 0.2],
        "loading_seconds": [0.05, 0.06],
        "slowest_other_request_later_by": [0.3],
    },
    "sleeping": {
        "sleep_seconds": [0.5],
        "wake_seconds": [0.1],
        "mib": [[44000, 1500, 44000]],
        "logprobs_changed_by": [{"bench@0": 0.0, "bench@1": 0.5}],
    },
    "server": {"seconds_to_ready": 110.0},
    "gpus": [{"name": "A GPU"}],
}


def test_it_runs_against_a_server_without_a_model(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "benchmarks/serving.py", "--small"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for way in ("plain", "spelled", "packed", "gateway"):
        assert way in done.stdout
    assert "failed" not in done.stdout


def test_a_server_that_runs_already_is_measured_and_the_result_is_written(tmp_path: Path):
    out = tmp_path / "serving.json"
    with FakeVLLM("word " * 400, packed=True) as server:
        done = subprocess.run(
            [
                *(sys.executable, "benchmarks/serving.py", "--url", server.base_url),
                *("--served", "a@0", "a@1", "--concurrency", "1", "--tokens", "8", "--seconds", "1"),
                *("--out", str(out)),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert {body["model"] for body in server.bodies} == {"a@0", "a@1"}
    result = json.loads(out.read_text())
    assert result["raw"]["encoding"]["encoding"] == "packed"
    assert set(result["raw"]["tokens_per_second"]["1"]) == {"base", "adapter"}
    assert result["ratios"]["recording_vs_plain_c1"] > 0
    assert result["ratios"]["gateway_vs_direct_c1_adapter"] > 0


def test_an_answer_that_was_not_recorded_is_a_failure_and_no_fast_answer():
    with FakeVLLM("word " * 100, logprobs=False) as server, Load(1) as load:
        plain = load.run(Job(server.base_url, "a@0", "plain", 3, 2, 8))
        packed = load.run(Job(server.base_url, "a@0", "packed", 3, 2, 8))
    assert (plain.failed, plain.tokens) == (0, 48)
    assert (packed.failed, packed.tokens) == (6, 0)
    assert "no logprobs" in packed.problems[0]


def test_a_window_counts_the_part_of_each_answer_that_lies_in_it():
    with FakeVLLM("word " * 100, packed=True, latency=0.05) as server, Load(2) as load:
        job = Job(server.base_url, "a@0", "packed", 4, 0, 16, ramp=0.2, window=0.6)
        outcome = load.run(job)
        asked = [body["max_tokens"] for body in server.bodies]
    assert outcome.failed == 0
    assert outcome.seconds == 0.6
    assert sum(tokens for _, _, tokens in outcome.requests) == sum(asked)
    assert 0 < outcome.tokens < sum(asked)
    assert min(asked) >= 8
    assert max(asked) <= 24
    assert len(set(asked)) > 4


def test_streams_are_read_to_their_end():
    with FakeVLLM("word " * 100, packed=True) as server, Load(2) as load:
        outcome = load.run(Job(server.base_url, "a@0", "packed", 3, 2, 8, stream=True))
    assert (outcome.failed, outcome.tokens, len(outcome.requests)) == (0, 48, 6)


def test_ratios_are_medians_of_each_repetitions_ratio():
    found = serving_table.ratios(RATES, FACTS)
    assert found["recording_vs_plain_c256"] == pytest.approx(0.95)
    assert found["gateway_vs_direct_c256"] == pytest.approx(1.0)
    assert found["stock_recording_vs_plain_c1_adapter"] == pytest.approx(0.5)
    assert found["publish_seconds"] == 0.2
    assert found["others_delayed_seconds"] == 0.3


def test_the_tables_take_their_place_in_the_page_again_and_again(tmp_path: Path):
    page, results = tmp_path / "page.md", tmp_path / "serving.json"
    page.write_text(f"# Before\n\n{serving_table.BEGIN}\nold\n{serving_table.END}\n\nAfter\n")
    raw = {"tokens_per_second": {str(c): by for c, by in RATES.items()}, **FACTS}
    ratios = serving_table.ratios(RATES, FACTS)
    results.write_text(json.dumps({"hardware": {}, "versions": {}, "ratios": ratios, "raw": raw}))
    for _ in range(2):
        serving_table.into_docs(results, page)
        text = page.read_text()
        assert text.startswith("# Before\n")
        assert text.endswith("\n\nAfter\n")
        assert "old" not in text
        assert "| 256 | base | 100 |  | 95 | 95 |" in text
        assert "| `publish_seconds` | 0.200 | at most 0.5 |" in text
        assert "44000, 1500, 44000 MiB" in text


def test_another_files_models_are_added_to_a_result(tmp_path: Path):
    paths = []
    for name, target, rate in (("a", "base", 100.0), ("b", "merged", 120.0)):
        rates = {"256": {target: {"plain": [rate], "packed": [rate * 0.9]}}}
        raw = {
            "tokens_per_second": rates,
            "server" if name == "a" else "merged_server": {"seconds_to_publish": 9.0},
        }
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"hardware": {"processor": "x"}, "ratios": {}, "raw": raw}))
    joined = json.loads(serving_table.join(*paths).read_text())
    assert set(joined["raw"]["tokens_per_second"]["256"]) == {"base", "merged"}
    assert joined["ratios"]["recording_vs_plain_c256_merged"] == pytest.approx(0.9)
    assert "| 256 | merged | 120 |  | 108 |  |" in serving_table.markdown(joined)
    assert "merging a version, and reloading in place | 9.0 s" in serving_table.markdown(joined)


def test_a_process_with_the_profiler_leaves_where_it_was_seen(tmp_path: Path):
    """Here in a process that starts the plugin as vLLM does."""
    profiling = Profiling(tmp_path / "samples", Path(sys.executable))
    script = """
import importlib.metadata, sys, time
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="art_profile")
point.load()()
def busy():
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        pass
print("ready", flush=True)
sys.stdin.readline()
busy()
print("done", flush=True)
sys.stdin.readline()
"""
    child = subprocess.Popen(
        [profiling.python, "-c", script, "0.5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with profiling.label("work"):
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
    child.stdin.close()
    assert child.wait(120) == 0
    (samples,) = profiling.samples()
    assert any(name == "<string>.busy" for name, _, _ in hottest(samples))
