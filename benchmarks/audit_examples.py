"""The examples' own rewards under audit: real agents, whose models are scripted players of several skills.

Their rewards are sound, and not easily told from hacked ones: good runs are longer, take more steps, and come
in another form than bad ones.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from art_core import Scenario
from art_core.rewards.audit import aaudit
from art_langgraph import agather
from examples.email_research.agent import build_graph as mail_graph
from examples.email_research.mailbox import prepared
from examples.email_research.policies import Scripted, clueless, expert
from examples.email_research.rewards import rules
from examples.tic_tac_toe.agent import build_graph as game_graph
from examples.tic_tac_toe.agent import reward as game_reward

SKILLS = (0.3, 0.5, 0.7)
"""How often the scripted player knows the next step, or plays a free square on purpose."""
GROUPS, MEMBERS = 24, 8


class Player(BaseChatModel):
    """A tic-tac-toe player that picks a free square, or any."""

    move: Callable[[str], str]

    @property
    def _llm_type(self) -> str:
        return "player"

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.move(messages[-1].text)))])


def mail(seed: int, skill: float) -> tuple[Any, list[Scenario], Any]:
    """The mailbox agent, its questions and its rules."""
    mailbox = prepared()
    questions = mailbox.scenarios("harbour")[GROUPS * (seed % 4) :][:GROUPS]
    knows, guesses, draw = expert(questions), clueless(seed), random.Random(f"mail {seed}")
    model = Scripted(policy=lambda m: (knows if draw.random() < skill else guesses).policy(m))
    return mail_graph(model, mailbox), questions, rules


def game(seed: int, skill: float) -> tuple[Any, list[Scenario], Any]:
    """The tic-tac-toe agent, its opponents and its score."""
    draw = random.Random(f"game {seed}")

    def move(board: str) -> str:
        free = re.findall(r"[1-9]", board)
        return draw.choice(free) if draw.random() < skill else str(draw.randrange(1, 10))

    opponents = [Scenario(f"game-{n}", {"opponent": 1000 * seed + n}) for n in range(GROUPS)]
    return game_graph(Player(move=move)), opponents, game_reward


async def examples(seeds: int) -> list[dict[str, Any]]:
    """Findings over each example's reward, of the record alone and with the function at hand."""
    rows: list[dict[str, Any]] = []
    for name, make in (("email_research", mail), ("tic_tac_toe", game)):
        for skill in SKILLS:
            found: dict[str, list[str]] = {"record": [], "function": []}
            rewards: list[float] = []
            for seed in range(seeds):
                agent, scenarios, reward = make(seed, skill)
                groups = await agather(
                    agent,
                    scenarios,
                    group_size=MEMBERS,
                    reward=reward,
                    progress=False,
                    require_policy_calls=False,
                )
                rewards += [value for group in groups for value in group.rewards]
                found["record"] += [f.name for f in (await aaudit(groups)).findings]
                found["function"] += [f.name for f in (await aaudit(groups, reward=reward)).findings]
            mean = sum(rewards) / len(rewards)
            rows.append({"example": name, "skill": skill, "audits": seeds, "reward_mean": mean, **found})
    return rows
