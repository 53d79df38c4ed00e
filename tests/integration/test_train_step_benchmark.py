"""The benchmark of training steps: every way computes the same step, and figures become ratios."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train_step import main, parse, specification
from benchmarks.train_step_results import merged, ratios, read, read_all, write
from benchmarks.train_step_work import SMALL, W1, W3, WORKLOADS, groups, trajectory_groups

SAID = {"compile_s": 0.0, "grad_norm": 1.0}


def run(way: str, speed: float | None, gib: float = 1.0, **other: Any) -> dict[str, Any]:
    spec = specification(parse([]), other.pop("model", "135m"), other.pop("workload", "w1"), way)
    found = {} if speed is None else {"step_s": 1.0, "trained_tokens_per_s": speed, "peak_gib": gib} | SAID
    return {**spec, **found, **other}


def test_the_small_form_runs_and_all_ways_compute_one_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "train_step.json"
    main(["--small", "--repeats", "1", "--scratch", str(tmp_path / "models"), "--out", str(out)])
    result = json.loads(out.read_text())
    runs = result["raw"]["runs"]
    for workload in SMALL:
        norms = {r["way"]: r["grad_norm"] for r in runs if r["workload"] == workload}
        assert len(norms) == 5
        for norm in norms.values():
            assert math.isclose(norm, norms["peft_rows"], rel_tol=1e-3)
    assert {"w1_tree_vs_step_rows", "w2_best_vs_peer", "w1_tree_vs_best_peer_tiny"} <= set(result["ratios"])
    assert "tree_fused" in capsys.readouterr().out


def test_ratios_compare_with_the_fastest_of_the_others_and_with_its_memory():
    found = ratios(
        [
            run("tree_fused", 300.0, 8.0),
            run("unsloth_rows", 100.0, 4.0),
            run("unsloth_rows", 150.0, 16.0, rows=16),
            run("peft_rows", 75.0),
            run("peft_step_rows", 30.0),
            run("tree_fused", 90.0, model="05b", workload="w2"),
            run("trl", 100.0, model="05b", workload="w2"),
            run("trl_unsloth", None, error="not done"),
        ]
    )
    assert found["w1_tree_vs_best_peer_135m"] == 2.0
    assert found["w1_tree_vs_best_peer_135m_memory"] == 0.5
    assert found["w1_tree_vs_peft_rows_135m"] == 4.0
    assert found["w1_tree_vs_step_rows"] == 10.0
    assert found["w2_best_vs_peer"] == 0.9
    assert not any("trl_unsloth" in name for name in found)


def test_a_failed_repetition_does_not_take_the_place_of_a_result():
    good, bad = run("trl", 10.0), run("trl", None, error="out of memory")
    assert merged([good, bad]) == [good]
    assert merged([bad, good]) == [good]
    assert merged([good, run("trl", 12.0)])[0]["trained_tokens_per_s"] == 12.0


def test_runs_of_several_machines_lie_in_one_file_and_are_compared_within_their_own(tmp_path: Path):
    def machine(name: str, *runs: dict[str, Any]) -> Path:
        path = tmp_path / f"{name}.json"
        write(path, [{**r, "place": {"hardware": {"cores": 1}, "versions": {}, "gpu": name}} for r in runs])
        return path

    old = machine("old", run("tree_fused", 300.0), run("trl", 100.0), run("peft_step_rows", 10.0))
    new = machine("new", run("tree_fused", 500.0), run("trl", 250.0))
    both = tmp_path / "both.json"
    main(["--merge", str(old), str(new), "--out", str(both)])
    result = json.loads(both.read_text())
    assert [m["gpu"] for m in result["machines"]] == ["old", "new"]
    assert result["gpu"] == "new"
    assert [r["machine"] for r in result["raw"]["runs"]] == [0, 0, 0, 1, 1]
    assert result["ratios"]["w1_tree_vs_best_peer_135m"] == 2.0, "the newer machine's"
    assert result["ratios"]["w1_tree_vs_step_rows"] == 30.0, "measured on the older one alone"
    assert read(both) == read_all([old, new])


def test_the_last_machine_is_named_unless_it_took_more_memory_there(tmp_path: Path):
    def place(name: str) -> dict[str, Any]:
        return {"hardware": {}, "versions": {}, "gpu": name}

    def both(name: str, speed: float, gib: float) -> list[dict[str, Any]]:
        ours = {**run("tree_fused", speed), "peak_gib": gib, "place": place(name)}
        return [ours, {**run("trl", 100.0), "peak_gib": 10.0, "place": place(name)}]

    little, much = both("little", 200.0, 10.2), both("much", 300.0, 19.0)
    found = ratios([*little, *much])
    assert (found["w1_tree_vs_trl_135m"], found["w1_tree_vs_trl_135m_memory"]) == (2.0, 1.02)
    assert ratios([*much, *little])["w1_tree_vs_trl_135m"] == 2.0
    assert ratios([*little, *both("less", 150.0, 5.0)])["w1_tree_vs_trl_135m"] == 1.5
    assert ratios([*much, *both("more", 400.0, 30.0)])["w1_tree_vs_trl_135m"] == 4.0


def test_calls_on_one_machine_may_have_had_different_cores_of_it(tmp_path: Path):
    for name, cores, way, speed in (("a", 4, "tree_fused", 300.0), ("b", 8, "trl", 100.0)):
        place = {"hardware": {"processor": "P", "cores": cores}, "versions": {}, "gpu": "G"}
        write(tmp_path / name, [{**run(way, speed), "place": place}])
    found = read_all([tmp_path / "a", tmp_path / "b"])
    assert ratios(found)["w1_tree_vs_trl_135m"] == 3.0
    assert [r["cores"] for r in found] == [4, 8]
    write(tmp_path / "whole", found)
    assert "machines" not in json.loads((tmp_path / "whole").read_text())


def test_workloads_have_the_sizes_that_they_are_named_for():
    assert (W1.merged, W1.unique, W1.trained) == (5360, 4000 + 16 * 1360, 5760)
    assert 63_000 <= W3.merged <= 65_000
    for work in (SMALL["w1"], WORKLOADS["g4"]):
        (members,) = groups(work, 1024)
        assert all(len(m.ids) == work.merged for m in members)
        assert sum(sum(m.sampled) for m in members) == work.trained
        assert math.isclose(sum(m.advantage for m in members), 0.0, abs_tol=1e-9)
        (group,) = trajectory_groups([members])
        assert sum(len(s.tokens.completion) for t in group for s in t.steps) == work.trained
