"""Traces that Langfuse exported to a file."""

import json
from pathlib import Path

import pytest

from art_core.store import Store
from art_langgraph.langfuse.client import LangfuseError
from art_langgraph.langfuse.importing import import_file

RECORDED = Path(__file__).parents[2] / "data" / "langfuse_traces.json"


def test_a_recorded_export_is_read_from_a_file(store: Store, tmp_path: Path) -> None:
    result = import_file(store, RECORDED, reward="helpfulness")
    assert (len(result.imported), result.failed) == (2, {})
    one, two = store.trajectories()
    assert (one.reward, one.components) == (0.9, {"concise": 1.0})
    assert [s.identity.node for s in one.steps] == ["answer"]
    assert one.steps[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert one.steps[0].usage == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    assert two.failure is not None
    lines = tmp_path / "traces.jsonl"
    lines.write_text("".join(json.dumps(trace) + "\n" for trace in json.loads(RECORDED.read_text())))
    assert import_file(store, lines, reward="helpfulness").unchanged == 2
    loose = tmp_path / "observations.json"
    recorded = json.loads(RECORDED.read_text())
    loose.write_text(json.dumps({"data": [o for trace in recorded for o in trace["observations"]]}))
    with Store.open("q", tmp_path) as other:
        assert len(import_file(other, loose).imported) == 2
        assert [len(t.steps) for t in other.trajectories()] == [1, 1]


def test_odd_traces_in_a_file_do_no_harm(store: Store, tmp_path: Path) -> None:
    time = {"startTime": "2026-10-02T09:15:00Z", "endTime": "2026-10-02T09:15:01Z"}
    circle = [
        {"id": "a", "type": "SPAN", "parentObservationId": "b", "level": "DEBUG", **time},
        {"id": "b", "type": "GENERATION", "parentObservationId": "a", "input": 3, "output": [[]], **time},
    ]
    odd = [{"id": "c", "type": "GENERATION", "input": {"lc": 1}, "metadata": "none", "usage": [], **time}]
    path = tmp_path / "odd.json"
    traces = [{"id": "t-1", "observations": circle}, {"id": "t-2", "observations": odd}]
    path.write_text(json.dumps([*traces, {"id": "t-3", "observations": []}]))
    result = import_file(store, path)
    assert (len(result.imported), result.failed) == (2, {"t-3": "it has no observations"})
    one, two = store.trajectories()
    assert one.steps[0].messages == ({"role": "user", "content": "3"},)
    assert two.steps[0].messages == ({"role": "user", "content": '{"lc": 1}'},)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{nonsense", "line 1: not JSON"),
        ('[{"id": "t", "observations": ["o-1"]}]', "without holding them"),
        ('[{"id": "t"}]', "neither a trace with its observations nor an observation"),
        ("[3]", "expected an object, found int"),
        ("3", "expected a list of traces or observations, found int"),
        ('{"data": null}', "expected a list of traces or observations, found NoneType"),
        ('[{"id": "t", "observations": [{"id": "o"}]}]', "no type, startTime"),
        (
            '[{"id": "t", "observations": [{"id": "o", "type": "SPAN", "startTime": "noon"}]}]',
            "observation o: 'noon' is not a time",
        ),
    ],
)
def test_a_file_of_something_else_says_where_it_goes_wrong(
    store: Store, tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "traces.json"
    path.write_text(content)
    with pytest.raises(LangfuseError, match=says):
        import_file(store, path)
    assert not list(store.trajectories())
