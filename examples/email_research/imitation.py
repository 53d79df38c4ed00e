"""What a warm start imitates: a scripted expert's runs, or the model's own right ones.

Invariant: only runs whose answer is right are imitated.
"""

from collections.abc import Sequence

from art_core import Scenario
from art_core.training.sft import Conversation
from art_core.types import Trajectory, TrajectoryGroup
from art_langgraph import agather
from examples.email_research.agent import build_graph
from examples.email_research.mailbox import Mailbox
from examples.email_research.policies import expert
from examples.email_research.rewards import rules


async def expert_answers(mailbox: Mailbox, asked: Sequence[Scenario]) -> list[Conversation]:
    """The expert's conversations with the tools."""
    shown = await agather(
        build_graph(expert(asked), mailbox),
        asked,
        group_size=1,
        reward=rules,
        require_policy_calls=False,
        progress=False,
    )
    conversations: list[Conversation] = []
    for run in right_answers(shown):
        last = run.steps[-1]
        assert last.response is not None
        conversations.append(Conversation((*last.messages, last.response), last.tools))
    return conversations


def right_answers(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """Runs that answered rightly (rejection sampling)."""
    return [run for group in groups for run in group.scored if run.components["correct"] == 1.0]
