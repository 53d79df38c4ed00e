"""What there is to say about a step in one line."""

from collections.abc import Iterator

from art_core.types import Step
from art_core.views.text import safe


def where(step: Step) -> str:
    """The branch that made the call, by node names, and on which attempt."""
    path = " > ".join(s.partition(":")[0] for s in step.identity.namespace.split("|"))
    attempt = f" attempt {step.identity.attempt}" if step.identity.attempt > 1 else ""
    return safe(path or step.identity.node or "call") + attempt


def step_facts(step: Step) -> Iterator[str]:
    """Model, tokens, time (of a stream also to its first token), and why the step is not trained."""
    yield safe(step.policy.name if step.policy else step.model)
    if step.tokens is not None:
        yield f"{len(step.tokens.prompt)}+{len(step.tokens.completion)} tokens"
    yield f"{step.duration:.2f} s"
    if step.time_to_first_token is not None:
        yield f"{step.time_to_first_token:.2f} s to first token"
    if step.finish_reason not in (None, "stop", "tool_calls"):
        yield f"({safe(str(step.finish_reason))})"
    if step.untrainable is not None:
        yield f"not trained: {safe(step.untrainable)}"
