"""What one call of training did with each step, token by token, packed as it is kept.

Invariant: a step is here once for each call that trained it, and has a ratio and a mark for each token that
its rollout sampled, also for those that were not trained.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTraining:
    """What a call did with one step.

    Attributes:
        step_id: of the rollout's step.
        advantage: what its tokens were pushed by.
        ratio: probability of each sampled token under the policy that the last update found, divided by
            that under the policy that sampled it; little-endian float32, NaN where there is none
            [completion_tokens].
        marks: a byte for each sampled token: 1 when it gave a gradient, 2 more when its ratio was clipped
            [completion_tokens].
    """

    step_id: str
    advantage: float
    ratio: bytes
    marks: bytes
