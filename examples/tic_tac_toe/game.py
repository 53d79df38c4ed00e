"""The rules of tic-tac-toe, an opponent that plays at random, and how a board is shown to a model.

Squares are numbered 1 to 9, row by row. The agent is X and moves first; the opponent is O.
"""

import random
from collections.abc import Iterator

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
SYSTEM = "You are X in tic-tac-toe. Answer with the number of a free square."
SCORES = {"win": 1.0, "draw": 0.5, "loss": 0.0, "illegal": 0.0}


def show(board: str) -> str:
    """The board as text, free squares as their numbers: the model sees which answers are possible."""
    cells = [str(i + 1) if mark == "." else mark for i, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def free(board: str) -> list[int]:
    """Numbers of the free squares."""
    return [i + 1 for i, mark in enumerate(board) if mark == "."]


def place(board: str, square: int, mark: str) -> str:
    """The board with a mark on a square."""
    return board[: square - 1] + mark + board[square:]


def read_move(answer: str, board: str) -> int | None:
    """The square that an answer names; None when it is not exactly one free square's number."""
    answer = answer.strip()
    square = int(answer) if answer.isascii() and answer.isdigit() and len(answer) == 1 else 0
    return square if square in free(board) else None


def wins(board: str, mark: str) -> bool:
    """Whether a mark has three in a row."""
    return any(all(board[i] == mark for i in line) for line in LINES)


def opponent_move(board: str, seed: int) -> int:
    """A random free square: the same seed answers the same board the same way."""
    return random.Random(f"{seed}/{board}").choice(free(board))


def play(board: str, square: int, seed: int) -> tuple[str, str | None]:
    """X takes a square and O answers; returns the board and the outcome (None: the game goes on)."""
    board = place(board, square, "X")
    if wins(board, "X"):
        return board, "win"
    if not free(board):
        return board, "draw"
    board = place(board, opponent_move(board, seed), "O")
    return board, "loss" if wins(board, "O") else None


def random_player_moves(seed: int) -> Iterator[tuple[str, int]]:
    """Boards and moves of a player that takes any free square, game after game, without end."""
    rng = random.Random(f"random player {seed}")
    while True:
        board, outcome, opponent = EMPTY, None, rng.randrange(2**31)
        while outcome is None:
            square = rng.choice(free(board))
            yield board, square
            board, outcome = play(board, square, opponent)
