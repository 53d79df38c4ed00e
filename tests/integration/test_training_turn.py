"""One process trains a model at a time, from its newest version on; others may serve it meanwhile."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.registered import registered

from art_core.backends.training_turn import TrainingTurn
from art_core.errors import CheckpointError

ASK = {"role": "user", "content": "answer yes or no"}
TALK = [[ASK, {"role": "assistant", "content": "yes"}]]

HOLDING = """
import sys
from pathlib import Path
from art_core.backends.training_turn import TrainingTurn

turn = TrainingTurn("agent", Path(sys.argv[1]))
turn.take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a model's checkpoints would be."""
    (made := tmp_path / "agent" / "checkpoints").mkdir(parents=True)
    return made


def test_a_model_that_somebody_trains_is_served_to_others_and_trained_by_nobody_else(
    base_model: str, tmp_path: Path
) -> None:
    with registered(base_model, tmp_path) as first, registered(base_model, tmp_path) as second:
        assert first.sft(TALK).updated
        with pytest.raises(CheckpointError, match=r"'agent' in .* is being trained by somebody else"):
            second.sft(TALK)
        answer = second.chat.completions.create(model="agent", messages=[ASK], max_tokens=2)
        assert answer.choices[0].message.role == "assistant"
        assert first.sft(TALK).updated
        first.close()
        # Its weights are those of before: what the first one learned would be lost.
        with pytest.raises(
            CheckpointError, match=r"newest version in .* is 2, and it was 0; register it again"
        ):
            second.sft(TALK)
    with registered(base_model, tmp_path) as third:
        assert third.current_version().number == 2
        assert third.sft(TALK).updated
        assert third.current_version().number == 3


def test_the_turn_of_a_process_that_was_killed_is_free(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        turn = TrainingTurn("agent", directory)
        with pytest.raises(CheckpointError, match="being trained by somebody else"):
            turn.take()
        other.kill()
    turn.take()
    turn.take()  # it is held already
    turn.give_back()
    turn.give_back()


def test_a_file_system_without_locks_is_said_and_trained_on(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object, **__: object) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(FileLock, "acquire", unable)
    with caplog.at_level(logging.WARNING, logger="art_core"):
        TrainingTurn("agent", directory).take()
    assert "cannot be locked (no flock here)" in caplog.text
