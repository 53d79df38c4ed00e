"""What pages draw: layered graphs, the way through one, token trees, tokens, cut and compared text."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.branching_run import write_byte_tokenizer
from helpers.trajectories import a_span, a_step, a_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.observe.dashboard.comparison import marked
from art_core.observe.dashboard.drawing import lay_out
from art_core.observe.dashboard.drawing_graph import draw, fitting_shape, shape_from
from art_core.observe.dashboard.drawing_tree import draw_tree
from art_core.observe.dashboard.texts import cut, pieces
from art_core.observe.dashboard.token_trie import trie_of
from art_core.observe.dashboard.token_view import spell, token_page, tokenizer_of
from art_core.observe.dashboard.visits import path_of, visits_of
from art_core.store.packing import ids_from_bytes, ids_to_bytes
from art_core.store.parts import TokenBytes
from art_core.store.records import TrainedStep
from art_core.training.samples import trajectory_samples
from art_core.training.token_tree import build_tree
from art_core.types import RolloutStatus, Step, StepIdentity, StepTokens, Trajectory

# -- layout ------------------------------------------------------------------------------------------

names = st.sampled_from("abcdefgh")
graphs = st.tuples(
    st.dictionaries(names, st.tuples(st.floats(20, 200), st.floats(20, 90)), min_size=1),
    st.lists(st.tuples(names, names), max_size=20),
)


@settings(max_examples=150, deadline=None)
@given(graphs)
def test_no_two_boxes_overlap_and_every_edge_is_drawn(graph: Any) -> None:
    sizes, edges = graph
    edges = [e for e in edges if e[0] in sizes and e[1] in sizes]
    layout = lay_out(sizes, edges)
    assert set(layout.boxes) == set(sizes)
    assert set(layout.lines) == set(edges)
    for (ax, ay, aw, ah), (bx, by, bw, bh) in combinations(layout.boxes.values(), 2):
        apart = ax + aw <= bx + 1e-6 or bx + bw <= ax + 1e-6 or ay + ah <= by + 1e-6 or by + bh <= ay + 1e-6
        assert apart
    for x, y, wide, high in layout.boxes.values():
        assert x >= -1e-6
        assert y >= -1e-6
        assert x + wide <= layout.width + 1e-6
        assert y + high <= layout.height + 1e-6
    for source, target in edges:
        if (source, target) not in layout.back:
            assert layout.boxes[source][1] < layout.boxes[target][1]  # downwards


@settings(max_examples=150, deadline=None)
@given(graphs)
def test_lines_pass_through_no_box_that_is_none_of_their_ends(graph: Any) -> None:
    sizes, edges = graph
    edges = [e for e in edges if e[0] in sizes and e[1] in sizes]
    layout = lay_out(sizes, edges)
    for edge, points in layout.lines.items():
        for (x0, y0), (x1, y1) in pairwise(points):
            for name, (x, y, wide, high) in layout.boxes.items():
                if name in edge:
                    continue
                # A curve stays between the heights and between the sides of its two points.
                beside = max(x0, x1) <= x or min(x0, x1) >= x + wide
                above = max(y0, y1) <= y + 1e-6 or min(y0, y1) >= y + high - 1e-6
                assert beside or above


def test_an_edge_back_is_told_from_one_down_and_a_loop_stays_beside_its_box() -> None:
    layout = lay_out(dict.fromkeys("abc", (60.0, 30.0)), [("a", "b"), ("b", "c"), ("c", "a"), ("b", "b")])
    assert layout.back == {("c", "a"), ("b", "b")}
    x, y, wide, high = layout.boxes["b"]
    assert all(px >= x + wide and y <= py <= y + high for px, py in layout.lines["b", "b"])


def test_nothing_is_laid_out_as_nothing() -> None:
    assert lay_out({}, []).boxes == {}


# -- the way through a graph ---------------------------------------------------------------------------


def call(number: int, namespace: str, graph_step: int, **changes: Any) -> Step:
    where = StepIdentity(
        node=path_of(namespace, None)[-1], namespace=namespace, graph_step=graph_step, **changes
    )
    return a_step("t", number, identity=where)


def way(*steps: Step, **changes: Any) -> Trajectory:
    return replace(a_trajectory("t"), steps=steps, **changes)


def walked(trajectory: Trajectory, shape: Any = None) -> dict[str, tuple[int, ...]]:
    drawing = draw(trajectory, visits_of(trajectory), shape)
    assert drawing is not None
    return {edge.title.partition(":")[0]: edge.walked for edge in drawing.edges}


def state(trajectory: Trajectory, shape: Any = None) -> dict[str, str]:
    drawing = draw(trajectory, visits_of(trajectory), shape)
    assert drawing is not None
    return {node.name: node.state for node in drawing.nodes}


@pytest.mark.parametrize(
    ("namespace", "path"),
    [("work:1|inner:2", ("work", "inner")), ("work:1|3|inner:2", ("work", "inner")), ("old", ("old",))],
)
def test_a_namespace_is_a_path_of_node_names(namespace: str, path: tuple[str, ...]) -> None:
    assert path_of(namespace, None) == path


def test_calls_of_one_execution_are_one_visit_and_another_attempt_is_another() -> None:
    visits = visits_of(
        way(
            call(0, "a:1", 1),
            call(1, "a:1", 1, call_index=1),
            call(2, "a:1", 1, attempt=2),
            call(3, "b:2", 2),
        )
    )
    assert [(v.number, v.path, v.attempt, len(v.steps), v.superseded) for v in visits] == [
        (1, ("a",), 1, 2, True),
        (2, ("a",), 2, 1, False),
        (3, ("b",), 1, 1, False),
    ]


def test_a_node_that_only_encloses_others_is_no_visit_of_its_own() -> None:
    spans = (
        a_span(0, kind="chain", name="desk", node="desk", namespace="desk:1", parent_id=None, started_at=1.0),
        a_span(1, kind="chain", name="write", node="write", namespace="desk:1|write:2", started_at=2.0),
    )
    visits = visits_of(way(replace(call(0, "desk:1|write:2", 1), started_at=2.5), spans=spans))
    assert [(v.number, v.path) for v in visits] == [(0, ("desk",)), (1, ("desk", "write"))]


def test_branches_side_by_side_are_one_stage_of_the_way() -> None:
    trajectory = way(
        call(0, "plan:1", 1),
        call(1, "work:2", 2),
        call(2, "work:3", 2),
        call(3, "other:4", 2),
        call(4, "end:5", 3),
    )
    assert walked(trajectory) == {
        "start to plan": (1,),
        "plan to work": (2,),
        "plan to other": (3,),
        "work to end": (4,),
        "other to end": (5,),
        "end to end": (6,),
    }


def test_a_known_shape_says_which_nodes_were_passed_without_a_record() -> None:
    shape = shape_from(
        {
            "nodes": ["__start__", "agent", "tools", "never", "__end__"],
            "edges": [
                ["__start__", "agent", False],
                ["agent", "tools", True],
                ["tools", "agent", False],
                ["agent", "__end__", True],
                ["agent", "never", True],
            ],
        }
    )
    trajectory = way(call(0, "agent:1", 1), call(1, "agent:2", 3))
    assert state(trajectory, shape) == {
        "start": "visited", "agent": "visited", "tools": "passed", "never": "unvisited", "end": "visited",
    }  # fmt: skip
    assert walked(trajectory, shape)["agent to tools"] == (2,)
    assert walked(trajectory, shape)["tools to agent"] == (3,)
    assert walked(trajectory, shape)["agent to never"] == ()


def test_a_drawing_is_wide_enough_for_the_labels_of_lines_that_lead_back() -> None:
    steps = [call(number, f"player:{number}", number) for number in range(1, 8)]
    trajectory = way(*steps)
    drawing = draw(trajectory, visits_of(trajectory), None)
    assert drawing is not None
    [loop] = [edge for edge in drawing.edges if edge.back]
    assert loop.label == "\u00d76"
    assert drawing.width >= loop.x + 4 + 6 * len(loop.label)


def test_a_line_says_how_often_it_was_walked_and_its_label_is_within_the_drawing() -> None:
    steps = [call(number, f"{'ab'[number % 2]}:{number}", number + 1) for number in range(24)]
    trajectory = way(*steps)
    drawing = draw(trajectory, visits_of(trajectory), None)
    assert drawing is not None
    labels = {edge.title: edge.label for edge in drawing.edges}
    assert labels == {
        "start to a: taken once": "",
        "a to b: taken 12 times": "\u00d712",
        "b to a: taken 11 times": "\u00d711",
        "b to end: taken once": "",
    }
    for edge in drawing.edges:
        ends = (
            (edge.x + 4, edge.x + 4 + 6 * len(edge.label))
            if edge.back
            else (edge.x - 5 - 6 * len(edge.label),)
        )
        assert all(drawing.left <= end <= drawing.left + drawing.width for end in ends), edge.title


def test_a_rollout_that_failed_did_not_reach_the_end() -> None:
    failed = way(call(0, "a:1", 1), status=RolloutStatus.FAILED, reward=None)
    assert "a to end" not in walked(failed)
    assert "a to end" in walked(way(call(0, "a:1", 1)))


def test_a_shape_of_another_graph_is_not_drawn() -> None:
    recorded = [{"nodes": ["x"], "edges": []}, {"nodes": ["a", "b"], "edges": []}, {"nodes": 7}, {}]
    assert fitting_shape(recorded, visits_of(way(call(0, "a:1", 1)))) == shape_from(recorded[1])
    assert fitting_shape(recorded, visits_of(way(call(0, "c:1", 1)))) is None


def test_without_a_graph_there_is_nothing_to_draw() -> None:
    plain = way(a_step("t", 0, identity=StepIdentity()), a_step("t", 1, identity=StepIdentity()))
    assert len(visits_of(plain)) == 2
    assert draw(plain, visits_of(plain), None) is None


# -- the token tree ------------------------------------------------------------------------------------

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
token_steps = st.lists(st.tuples(few_ids, few_ids), min_size=1, max_size=6)


def with_tokens(name: str, made: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Trajectory:
    steps = tuple(
        a_step(name, n, tokens=StepTokens(prompt, sampled, (-0.5,) * len(sampled)))
        for n, (prompt, sampled) in enumerate(made)
    )
    return replace(a_trajectory(name), steps=steps)


def raw(trajectory: Trajectory) -> list[TokenBytes | None]:
    """The tokens of a trajectory's steps as the store keeps them."""
    return [
        s.tokens and (ids_to_bytes(s.tokens.prompt), ids_to_bytes(s.tokens.completion))
        for s in trajectory.steps
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(token_steps, min_size=1, max_size=3))
def test_the_tree_that_is_looked_at_is_the_tree_that_is_trained(made: Any) -> None:
    group = [with_tokens(f"t{n}", steps) for n, steps in enumerate(made)]
    trie = trie_of([raw(t) for t in group])
    tree = build_tree([s for t in group for s in trajectory_samples(t, include_superseded=True)[0]])
    assert trie.tokens == len(tree)
    assert trie.tokens_total == tree.tokens_total
    sampled = {int(node) for node in tree.entries.node}
    assert sum(s.sampled_tokens for s in trie.walk()) == len(sampled)
    for stretch in trie.walk():
        assert [child.start for child in stretch.children] == [stretch.end] * len(stretch.children)
        assert len({child.tokens[0] for child in stretch.children}) == len(stretch.children)
        assert stretch.rollouts == {trie.rows[i].rollout for i in stretch.rows}
    assert [s.number for s in trie.walk()] == list(range(sum(1 for _ in trie.walk())))


@settings(max_examples=100, deadline=None)
@given(st.lists(token_steps, min_size=1, max_size=3))
def test_stretches_are_drawn_beside_each_other_never_over_each_other(made: Any) -> None:
    drawn = draw_tree(trie_of([raw(with_tokens(f"t{n}", s)) for n, s in enumerate(made)]), len(made))
    for a, b in combinations(drawn.stretches, 2):
        apart_x = a.x + a.width <= b.x + 1e-6 or b.x + b.width <= a.x + 1e-6
        apart_y = a.y + a.height <= b.y + 1e-6 or b.y + b.height <= a.y + 1e-6
        assert apart_x or apart_y
    assert max(s.x + s.width for s in drawn.stretches) == pytest.approx(drawn.width)


def test_steps_that_continue_each_other_are_one_row() -> None:
    trie = trie_of(
        [
            raw(
                with_tokens(
                    "t", [((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 2, 3, 4, 5, 6), (7,)), ((1, 9), (8,))]
                )
            )
        ]
    )
    assert [(ids_from_bytes(row.ids), row.steps) for row in trie.rows] == [
        ((1, 2, 3, 4, 5, 6, 7), 3),
        ((1, 9, 8), 1),
    ]
    assert [s.tokens for s in trie.forks] == [(1,)]


# -- tokens --------------------------------------------------------------------------------------------


def test_tokens_are_spelled_whole_characters_at_a_time(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(write_byte_tokenizer(tmp_path)))
    text = "héllo 🎉 日本"
    spelled = spell(tuple(text.encode()), tokenizer)
    assert "".join(part or "" for part in spelled) == text
    assert spelled[1:3] == ["", "é"]
    assert spell((104, 10**6), tokenizer) == ["h", None]
    assert spell((1, 2), None) == [None, None]


@pytest.mark.parametrize("named", [None, "nobody/nothing", "/dev/null", "a\0b", "x" * 5000])
def test_without_a_tokenizer_on_this_machine_there_is_none(named: str | None) -> None:
    assert tokenizer_of(named) is None


def test_a_damaged_tokenizer_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert tokenizer_of(str(tmp_path)) is None


def test_a_token_says_what_is_known_of_it_and_how_strong_its_colours_are() -> None:
    step = a_step("t", tokens=StepTokens((1,), (7, 8, 9), (-0.01, -2.0, None)))
    trained = TrainedStep(
        run_id="r", train_step=1, step_id=step.id, advantage=-0.5,
        ratio=(1.0, 0.4, None), trained=(True, True, False), clipped=(False, True, False),
    )  # fmt: skip
    page = token_page(step, trained=trained, advantage_scale=1.0)
    assert [page.classes(t) for t in page.tokens] == ["tok l0 a-2 r0", "tok l3 a-2 r-4", "tok a-2 untrained"]
    assert page.tokens[1].said == (
        "token 1: id 8, logprob -2.000 (14%), advantage -0.500, ratio 0.400, clipped, trained"
    )
    assert [page.classes(t) for t in token_page(step).tokens] == ["tok l0", "tok l3", "tok"]


# -- text ----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec=None), max_size=80))
def test_what_is_shown_can_be_encoded_and_holds_every_visible_character(text: str) -> None:
    shown = "".join(piece.text for piece in pieces(text))
    shown.encode()
    seen = "".join(piece.text for piece in pieces(text) if not piece.name)
    assert not set(seen) & set("\x00\x1b\x7f\u202e\u2066\ufeff")
    for piece in pieces(text):
        assert piece.name == "" or "U+" in piece.name


def test_a_long_text_is_cut_in_the_middle_and_says_how_much_is_missing() -> None:
    shown = cut("a" * 100 + "b" * 100, 60)
    assert (shown.head[0].text, shown.tail[0].text) == ("a" * 40, "b" * 20)
    assert (shown.omitted, shown.length) == (140, 200)
    assert cut("short", 60).omitted == 0


words = st.lists(st.sampled_from(["tea", "is", "green", "black", "\n", "  "]), max_size=30).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(words, words)
def test_marked_words_joined_are_the_text(text: str, reference: str) -> None:
    runs = marked(text, reference)
    assert "".join(run.text for run in runs) == text
    assert not any(run.own for run in marked(text, text))
