import json
from pathlib import Path

import pytest

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.training.knobs import FILE, KnobBoard

CONFIG = TrainConfig(learning_rate=1e-4, kl_coef=0.1)


@pytest.fixture
def board(tmp_path: Path) -> KnobBoard:
    return KnobBoard(tmp_path / "model", CONFIG)


def test_a_turned_knob_takes_the_configurations_place_until_it_is_turned_back(board: KnobBoard):
    assert board.config == CONFIG
    (turned,) = board.turn(learning_rate=3e-5)
    assert (turned.kind, turned.name, turned.before, turned.after) == (
        "knob_turned",
        "learning_rate",
        None,
        3e-5,
    )
    assert board.config.learning_rate == 3e-5
    assert board.config.kl_coef == 0.1
    board.turn(temperature=0.7)
    assert board.config.learning_rate == 3e-5
    (back,) = board.turn(learning_rate=None)
    assert "3e-05 to as configured" in back.message
    assert board.config == CONFIG


def test_an_edited_file_is_read_once_and_a_removed_one_turns_everything_back(board: KnobBoard):
    board.path.parent.mkdir()
    board.path.write_text(json.dumps({"kl_target": 0.05, "temperature": 0.9}))
    assert [t.name for t in board.read()] == ["kl_target", "temperature"]
    assert board.read() == []
    assert board.config.kl_target == 0.05
    board.path.unlink()
    assert [t.after for t in board.read()] == [None, None]
    assert board.config == CONFIG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "found list"),
        ('{"learning_rat": 1}', "learning_rat: no such setting"),
        ('{"learning_rate": -1}', "learning_rate=-1"),
        ('{"learning_rate": 1e30}', "learning_rate=1e+30: Input should be less than or equal to 1"),
        ('{"learning_rate": 1e999}', "learning_rate=inf: Input should be a finite number"),
        ('{"clip_high": Infinity}', "clip_high=inf"),
        ('{"kl_coef": 0, "kl_target": 0.1}', "kl_target"),
        ('{"reward_weights": {"steps": "many"}}', "reward_weights.steps='many'"),
        ('{"reward_weights": {"steps": NaN}}', "reward_weights.steps=nan"),
        ('{"reward_weights": 0.5}', "reward_weights=0.5"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_of_once(
    board: KnobBoard, text: str, said: str
):
    board.turn(learning_rate=3e-5)
    board.path.write_text(text + " ")
    (refused,) = board.read()
    assert refused.kind == "knobs_refused"
    assert said in refused.message
    assert board.knobs.learning_rate == 3e-5
    assert board.read() == []


def test_a_call_that_cannot_be_used_changes_neither_knobs_nor_file(board: KnobBoard):
    board.turn(learning_rate=3e-5)
    before = board.path.read_text()
    with pytest.raises(ConfigError, match="tempratur"):
        board.turn(tempratur=1.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature"):
            board.turn(temperature=wrong)
    assert board.path.read_text() == before
    assert [p.name for p in board.path.parent.iterdir()] == [FILE]


def test_another_board_goes_on_with_what_was_turned(board: KnobBoard):
    board.turn(learning_rate=3e-5, temperature=0.5)
    resumed = KnobBoard(board.path.parent, CONFIG)
    assert {t.name for t in resumed.read()} == {"learning_rate", "temperature"}
    assert resumed.knobs == board.knobs


def test_weights_of_rewards_are_turned_one_by_one_and_each_turn_is_told_of(board: KnobBoard):
    (turned,) = board.turn(reward_weights={"steps": -0.05})
    assert (turned.name, turned.before, turned.after) == ("reward_weights/steps", None, -0.05)
    assert turned.message == "reward_weights/steps turned by call: as scored to -0.05"
    (turned,) = board.turn(reward_weights={"tool use": 0.0})
    assert board.knobs.reward_weights == {"steps": -0.05, "tool use": 0.0}
    (turned,) = board.turn(reward_weights={"steps": None})
    assert (turned.name, turned.before, turned.after) == ("reward_weights/steps", -0.05, None)
    assert json.loads(board.path.read_text()) == {"reward_weights": {"tool use": 0.0}}
    board.turn(temperature=0.5)
    assert board.knobs.reward_weights == {"tool use": 0.0}
    (turned,) = board.turn(reward_weights=None)
    assert (turned.name, turned.after) == ("reward_weights/tool use", None)
    assert board.knobs.reward_weights is None
    assert board.config == CONFIG


def test_weights_of_rewards_in_the_file_are_all_that_is_turned(board: KnobBoard):
    board.turn(reward_weights={"steps": -0.05, "quality": 2.0})
    board.path.write_text(json.dumps({"reward_weights": {"quality": 1.5, "steps": None}}))
    assert [(t.name, t.before, t.after) for t in board.read()] == [
        ("reward_weights/steps", -0.05, None),
        ("reward_weights/quality", 2.0, 1.5),
    ]
    with pytest.raises(ConfigError, match=r"reward_weights\.quality='much'"):
        board.turn(reward_weights={"quality": "much"})  # type: ignore[dict-item]
    assert board.knobs.values() == {"reward_weights/quality": 1.5}


def test_a_temperature_with_an_end_goes_there_in_a_straight_line_over_the_versions(board: KnobBoard):
    board.turn(temperature=1.2, temperature_final=0.8, temperature_since=10, temperature_until=30)
    found = [board.knobs.temperature_at(version) for version in (0, 10, 15, 20, 30, 99)]
    assert found == pytest.approx([1.2, 1.2, 1.1, 1.0, 0.8, 0.8])
    board.turn(temperature_since=None)
    assert board.knobs.temperature_at(15) == pytest.approx(1.0)
    board.turn(temperature_final=None, temperature_until=None)
    assert board.knobs.temperature_at(15) == 1.2
    board.turn(temperature=None)
    assert board.knobs.temperature_at(15) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature_final": 0.8, "temperature_until": 5}, "temperature not given"),
        ({"temperature": 1.0, "temperature_final": 0.8}, "temperature_until not given"),
        ({"temperature": 1.0, "temperature_since": 3}, "temperature_final, temperature_until not given"),
        (
            {"temperature": 1.0, "temperature_final": 0.8, "temperature_since": 5, "temperature_until": 5},
            "temperature_since=5 must be below temperature_until=5",
        ),
        ({"temperature_until": 2.5}, "temperature_until=2.5"),
    ],
)
def test_half_a_schedule_of_the_temperature_is_refused(board: KnobBoard, values: dict[str, float], said: str):
    with pytest.raises(ConfigError, match=said):
        board.turn(**values)
    assert not board.path.exists()
