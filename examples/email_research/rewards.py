"""What a run is worth: by rules that know the right answer, or by a judge that does not.

Both come to 0 to 1. The rules' parts are on every trajectory as its components, also where the judge gives
the reward, so that the two can be compared.
"""

from collections.abc import Mapping
from typing import Any

from art_core.rewards import Efficiency, Steps, ToolErrors, component
from art_core.rewards.reading import tool_calls
from art_core.types import Trajectory
from examples.email_research.agent import MOST_TURNS
from examples.email_research.checking import is_right
from examples.email_research.tools import as_id


@component
def correct(trajectory: Trajectory, output: Mapping[str, Any]) -> float:
    """1.0 for the right answer, and nothing beside it."""
    asked = trajectory.scenario.metadata
    return float(is_right(output.get("answer"), asked["answer"], asked["answer_kind"], asked["rivals"]))


@component
def sources(trajectory: Trajectory, output: Mapping[str, Any]) -> float:
    """F1 of the cited mails with those that settle the question."""
    right = set(trajectory.scenario.metadata["sources"])
    cited = set(output.get("sources") or ())
    return 2 * len(cited & right) / (len(cited) + len(right))


@component
def read(trajectory: Trajectory) -> float:
    """Share of the mails that settle the question which were read."""
    right = set(trajectory.scenario.metadata["sources"])
    opened = {
        as_id(str(call.arguments.get("mail_id", "")))
        for call in tool_calls(trajectory)
        if call.name == "read" and call.arguments is not None
    }
    return len(opened & right) / len(right)


@component
def extra_steps(trajectory: Trajectory) -> float:
    """Calls of the model beyond a search and a look at each source, and the answer."""
    return Steps().value(trajectory) - (2 * len(trajectory.scenario.metadata["sources"]) + 1)


@component
def answered(trajectory: Trajectory, output: Mapping[str, Any]) -> float:
    """1.0 when there is an answer, right or wrong."""
    return float(output.get("answer") is not None)


rules = (
    0.6 * correct
    + 0.2 * sources
    + 0.1 * read
    + 0.1 * Efficiency(extra_steps, good=0, bad=MOST_TURNS - 3, name="quick").gated(correct.named("right"))
    - 0.1 * ToolErrors()
)
"""1.0 for an answer that is right, with its sources, in no more calls than it takes."""
