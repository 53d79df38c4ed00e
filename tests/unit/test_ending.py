"""How a run ended, by what was raised around it and what its guardrails did."""

import asyncio

import pytest

from art_core.backends.ending import in_words, state_at_the_end
from art_core.errors import TrainingStoppedError
from art_core.store import RunState


@pytest.mark.parametrize(
    ("failure", "stopped", "state"),
    [
        (None, False, RunState.FINISHED),
        (None, True, RunState.STOPPED),
        (SystemExit(0), False, RunState.FINISHED),
        (SystemExit(None), True, RunState.STOPPED),
        (SystemExit(3), False, RunState.FAILED),
        (SystemExit("no"), False, RunState.FAILED),
        (KeyboardInterrupt(), False, RunState.STOPPED),
        (asyncio.CancelledError(), False, RunState.STOPPED),
        (TrainingStoppedError("kl"), False, RunState.STOPPED),
        (ValueError("x"), False, RunState.FAILED),
        (ValueError("x"), True, RunState.FAILED),
    ],
)
def test_a_run_finished_only_if_nothing_cut_it_short(
    failure: BaseException | None, stopped: bool, state: RunState
) -> None:
    assert state_at_the_end(failure, stopped=stopped) is state


def test_what_was_raised_is_named_also_when_it_says_nothing() -> None:
    assert in_words(ValueError("too long")) == "ValueError: too long"
    assert in_words(ValueError()) == "ValueError"
