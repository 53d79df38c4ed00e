"""What one call of training did with each step, token by token, packed as it is kept.

Invariant: a step is here once for each update's minibatch that held it, with a ratio and a mark for each of
its tokens that was in the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from art_core.training.samples import Sample

if TYPE_CHECKING:
    from art_core.training.update import UpdateFigures

TRAINED, CLIPPED = 1, 2
"""Marks of a token: it gave a gradient; the loss clipped its ratio."""


@dataclass(frozen=True, slots=True)
class StepTraining:
    """What a call did with one step.

    Attributes:
        step_id: of the rollout's step.
        advantage: what its tokens were pushed by.
        ratio: probability of each token under the policy that the last update found, divided by that
            under the policy that sampled it, neither clipped nor truncated; little-endian float32, NaN
            where the server gave no probability  [trained_tokens].
        marks: a byte for each token, a sum of `TRAINED` and `CLIPPED`; shorter than the step's completion
            where its end was cut off  [trained_tokens].
    """

    step_id: str
    advantage: float
    ratio: bytes
    marks: bytes


def account(samples: Sequence[Sample], figures: "UpdateFigures") -> list[StepTraining]:
    """What an update did with each sample of its minibatch.

    Args:
        samples: in the order of the minibatch's entries.
        figures: of the last update that was made of them.
    """
    logprob, old = figures.logprob.double().cpu().numpy(), figures.old_logprob.double().cpu().numpy()
    ratio = np.exp(np.clip(logprob - old, -80.0, 80.0)).astype("<f4")  # within float32; a NaN stays
    marks = np.where(figures.importance.cpu().numpy() != 0, TRAINED, 0).astype(np.uint8)
    marks |= np.where(figures.clipped.bool().cpu().numpy(), CLIPPED, 0).astype(np.uint8)
    told: list[StepTraining] = []
    start = 0
    for sample in samples:
        end = start + len(sample.completion)
        told.append(
            StepTraining(
                sample.step, sample.advantage, ratio[start:end].tobytes(), marks[start:end].tobytes()
            )
        )
        start = end
    return told
