"""Why a rollout holds no call of a policy: what capture knows about it, for people."""

from collections import Counter
from collections.abc import Mapping

from art_core.recording import Rollout

FAULTS: Mapping[str, str] = {
    "unattributed_calls": "made where the rollout is not known, such as a thread that the agent started by "
    "itself (start it in a copy of the context: contextvars.copy_context().run)",
    "cache_hits": "answered by an LLM cache without asking the policy (turn the cache off for rollouts)",
    "capture_errors": "made, but capture could not read what came back (the log says why)",
    "late_steps": "ended after the agent had returned (await background work before returning)",
}
"""What each kind of fault means for who looks for their calls."""


def where_calls_went(rollout: Rollout) -> str:
    """Say why a rollout holds no call of a policy, as far as capture can tell."""
    steps = rollout.steps
    found: list[str] = []
    faults = rollout.snapshot().faults
    for kind, count in sorted(faults.items()):
        found.append(f"{count} {kind.replace('_', ' ')}: {FAULTS.get(kind, 'counted by capture')}")
    cached = sum("cache" in (step.untrainable or "") for step in steps)
    if cached and "cache_hits" not in faults:
        found.append(f"{cached} cache hits: {FAULTS['cache_hits']}")
    for step in steps:
        if step.policy and step.error:
            found.append(f"a call of {step.policy} got no answer: {step.error}")
    others = Counter(
        step.model for step in steps if not step.policy and "cache" not in (step.untrainable or "")
    )
    for model, count in sorted(others.items()):
        found.append(f"{count} calls of {model!r}, which is no policy of ours")
    where = "; ".join(found) or (
        "capture saw no LLM call at all: look whether the agent calls a model that is recorded (OpenAI's "
        "client is not; model.chat is), passes on its config (callbacks=[] silences handlers), has a rollout "
        "of its own inside (a nested capture takes its calls), or was answered from a node's cache "
        "(cache_policy)"
    )
    return (
        f"no call of the policy was captured ({where}). To trace agents whose models are not trained, "
        "give require_policy_calls=False"
    )
