"""A tic-tac-toe agent as a LangGraph user writes it: a player node, an environment node, an edge back.

The graph knows nothing of training. Its model is any LangChain chat model; hand it `ChatART` and every
move is recorded with its exact tokens.
"""

from typing import TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from art_core.inference.endpoint import PolicyEndpoint
from art_core.types import Trajectory
from art_langgraph import ChatART
from examples.tic_tac_toe.game import EMPTY, SCORES, SYSTEM, play, read_move, show


class Game(TypedDict, total=False):
    """The graph's state."""

    opponent: int  # seed of the opponent's moves: the input
    illegal_reward: float  # what an illegal move is worth: an input, 0 where it is not given
    board: str
    answer: str  # what the model said
    answers: list[str]
    outcome: str | None  # win, draw, loss, illegal


def build_graph(llm: BaseChatModel) -> CompiledStateGraph:
    """The agent around a chat model."""

    async def player(game: Game) -> Game:
        board = show(game.get("board", EMPTY))
        reply = await llm.ainvoke([SystemMessage(SYSTEM), HumanMessage(board)])
        return {"answer": reply.text, "answers": [*game.get("answers", []), reply.text]}

    async def environment(game: Game) -> Game:
        board = game.get("board", EMPTY)
        square = read_move(game["answer"], board)
        if square is None:
            return {"board": board, "outcome": "illegal"}
        board, outcome = play(board, square, game["opponent"])
        return {"board": board, "outcome": outcome}

    graph = StateGraph(Game)
    graph.add_node("player", player)
    graph.add_node("environment", environment)
    graph.add_edge(START, "player")
    graph.add_edge("player", "environment")
    graph.add_conditional_edges("environment", lambda game: END if game.get("outcome") else "player")
    return graph.compile()


def score(game: Game) -> float:
    """What a finished game is worth: win 1, draw 0.5, loss 0, illegal move 0 or what the input says."""
    outcome = game["outcome"] or "illegal"
    return game.get("illegal_reward", SCORES[outcome]) if outcome == "illegal" else SCORES[outcome]


def reward(trajectory: Trajectory, game: Game) -> float:
    """The reward of a rollout, as worker processes import it."""
    return score(game)


def sampling_agent(model: PolicyEndpoint) -> CompiledStateGraph:
    """The agent as it is trained: answers are drawn as the policy thinks them likely."""
    return build_graph(ChatART(model, temperature=1.0, max_tokens=3))


def greedy_agent(model: PolicyEndpoint) -> CompiledStateGraph:
    """The agent as it may be deployed: always the likeliest answer."""
    return build_graph(ChatART(model, temperature=0.0, max_tokens=3))
