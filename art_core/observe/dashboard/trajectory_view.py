"""One rollout as its page shows it: sections in the order of its visits, each with its calls and tools.

Invariant: every step is in exactly one section, with what had not been said before it, and with what training
did with it, or why it was left out.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art_core.capture import superseded
from art_core.observe.dashboard.blocks import Block, pretty, span_text, step_blocks
from art_core.observe.dashboard.visits import Visit
from art_core.selection import SUPERSEDED
from art_core.store.records import TrainedStep
from art_core.types import Message, Span, Step, Trajectory
from art_core.views.messages import with_new_messages
from art_core.views.text import content_text, tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """An LLM call in a section.

    Attributes:
        step: the call.
        blocks: what was said in the request and not before it in the rollout, and what the model said.
        earlier: messages of the request that are not among them.
        trained: what each training step did with it, oldest first.
        left_out: why none did; empty if it is not known, or one did.
        reward: its own reward, where it got one.
    """

    step: Step
    blocks: tuple[Block, ...]
    earlier: int
    trained: tuple[TrainedStep, ...]
    left_out: str
    reward: float | None

    is_step = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolItem:
    """A traced tool or retriever in a section.

    Attributes:
        span: as it was traced.
        given: its inputs, for reading.
        returned: its outputs or its error.
    """

    span: Span
    given: str
    returned: str

    is_step = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A visit with what was done in it.

    Attributes:
        visit: which one.
        items: calls and tools in the order in which they began.
        reward: of its node, where nodes got rewards.
    """

    visit: Visit
    items: tuple[StepItem | ToolItem, ...]
    reward: float | None


def sections_of(
    trajectory: Trajectory, visits: Sequence[Visit], trained: Sequence[TrainedStep]
) -> list[Section]:
    """The sections of a rollout.

    Args:
        trajectory: the rollout.
        visits: its visits.
        trained: what training did with its steps.
    """
    new = _unseen(trajectory)
    by_step: dict[str, list[TrainedStep]] = defaultdict(list)
    for one in trained:
        by_step[one.step_id].append(one)
    replaced = superseded(trajectory.steps)
    sections: list[Section] = []
    for visit in visits:
        if visit.number:
            items = [
                _tool(made)
                if isinstance(made, Span)
                else _step(made, new[made.id], by_step[made.id], replaced, trajectory.step_rewards)
                for made in visit.made()
            ]
            name = visit.path[-1] if visit.path else None
            reward = trajectory.node_rewards.get(name) if name else None
            sections.append(Section(visit=visit, items=tuple(items), reward=reward))
    return sections


def _unseen(trajectory: Trajectory) -> dict[str, list[Message]]:
    """By step: the messages that are new to its agent, and that no step before it was given or said."""
    seen: set[tuple[str, str, str]] = set()
    found: dict[str, list[Message]] = {}
    for step, new in with_new_messages(trajectory):
        found[step.id] = [message for message in new if _key(message) not in seen]
        seen.update(map(_key, new))
        if step.response is not None:
            seen.add(_key(step.response))
    return found


def _key(message: Message) -> tuple[str, str, str]:
    calls = [(name, pretty(arguments)) for name, arguments in tool_calls(message)]
    return str(message.get("role")), content_text(message).strip(), repr((calls, message.get("tool_call_id")))


def _step(
    step: Step,
    new: Sequence[Message],
    trained: Sequence[TrainedStep],
    replaced: frozenset[str],
    rewards: Mapping[str, float],
) -> StepItem:
    left_out = ""
    if not trained:
        left_out = step.untrainable or (SUPERSEDED if step.id in replaced else "")
    return StepItem(
        step=step,
        blocks=tuple(step_blocks(step, new)),
        earlier=len(step.messages) - len(new),
        trained=tuple(trained),
        left_out=left_out,
        reward=rewards.get(step.id),
    )


def _tool(span: Span) -> ToolItem:
    return ToolItem(span=span, given=span_text(span, "inputs"), returned=span_text(span, "outputs"))


def last_words(trajectory: Trajectory) -> str:
    """What a rollout ended with: its failure, or the last text that a model wrote in it."""
    if trajectory.failure is not None:
        return f"{trajectory.failure.cause}: {trajectory.failure.message}"
    return next((text for step in reversed(trajectory.steps) if (text := step.message())), "")
