"""The rules of the demo's game, and the games that its scripted player plays."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tic_tac_toe.agent import score
from examples.tic_tac_toe.game import (
    EMPTY,
    LINES,
    free,
    opponent_move,
    place,
    play,
    random_player_moves,
    read_move,
    show,
    wins,
)


def test_free_squares_are_shown_as_their_numbers() -> None:
    assert show("X...O...X") == "X 2 3\n4 O 6\n7 8 X"


@pytest.mark.parametrize("answer", ["", "1", "0", "10", "2 3", "two", "²", "-2", "5"])
def test_an_answer_that_is_not_exactly_one_free_square_is_no_move(answer: str) -> None:
    assert read_move(answer, "X...O...X") is None


@pytest.mark.parametrize("answer", ["2", " 2", "2\n"])
def test_space_around_a_move_does_not_matter(answer: str) -> None:
    assert read_move(answer, "X...O...X") == 2


@pytest.mark.parametrize("line", LINES)
def test_three_in_a_row_win(line: tuple[int, int, int]) -> None:
    board = EMPTY
    for i in line:
        assert not wins(board, "X")
        board = place(board, i + 1, "X")
    assert wins(board, "X")
    assert not wins(board, "O")


@given(st.integers(0, 10**9))
def test_a_game_goes_on_until_somebody_wins_or_the_board_is_full(seed: int) -> None:
    board, outcome, moves = EMPTY, None, 0
    while outcome is None:
        before = board
        board, outcome = play(board, free(board)[seed % len(free(board))], seed)
        assert board.count("X") == before.count("X") + 1
        moves += 1
    assert moves <= 5
    assert {"win": wins(board, "X"), "loss": wins(board, "O"), "draw": not free(board)}[outcome]


def test_an_opponent_answers_the_same_board_the_same_way() -> None:
    replies = {opponent_move("X........", seed) for seed in range(100)}
    assert replies == set(range(2, 10))
    assert opponent_move("X........", 3) == opponent_move("X........", 3)


def test_the_scripted_player_makes_legal_moves_of_every_kind() -> None:
    moves = list(islice(random_player_moves(0), 1000))
    assert all(square in free(board) for board, square in moves)
    assert {square for board, square in moves if board == EMPTY} == set(range(1, 10))
    assert moves != list(islice(random_player_moves(1), 1000))


@pytest.mark.parametrize(
    ("outcome", "worth"), [("win", 1.0), ("draw", 0.5), ("loss", 0.0), ("illegal", -0.5), (None, -0.5)]
)
def test_a_games_input_may_say_what_an_illegal_move_is_worth(outcome: str | None, worth: float) -> None:
    assert score({"outcome": outcome, "illegal_reward": -0.5}) == worth
    assert score({"outcome": outcome}) == max(worth, 0.0)
