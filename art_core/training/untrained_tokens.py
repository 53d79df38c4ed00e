"""Untrained tokens: those of a vocabulary that a model cannot single out, as it never learned to write them.

Invariant: nothing is changed and nothing is refused; each token is looked at once, and told of once.

The output row of a token that no text of the pretraining held is that of every other such token. An adapter
on the layers before the head moves their logits together, so no fine-tuning makes the model choose one of
them: what it learns to write instead is any of thousands. Tokenizers reserve such tokens, and some chat
templates write them (Land and Bartolo 2024, "Fishing for Magikarp", arXiv:2405.05417, find them by their rows
as well).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.training.guardrails import TrainEvent
from art_core.training.policy import Policy
from art_core.training.samples import Sample

logger = logging.getLogger(__name__)

ALIKE = 0.999
"""Cosine of two rows beyond which they are one to the model.

Of Qwen2.5-Coder-0.5B's ``<tool_call>``, 2,451 other rows lie beyond it, of ``<|im_end|>`` none. At 0.99 there
would be 18 beside the ``<|im_end|>`` of SmolLM2-135M, which that model writes well.
"""
FEW = 8
"""As many rows may be like that of a token that was trained."""
CHUNK = 1 << 14
"""Rows of the head that are compared at a time."""

UNTRAINED = "tokens_untrained"
"""The kind of the event."""


@dataclass(frozen=True, slots=True)
class UntrainedToken:
    """A token whose output row is that of many others.

    Attributes:
        id: of the token.
        text: as the tokenizer names it.
        alike: how many other rows are like its own.
    """

    id: int
    text: str
    alike: int


class UntrainedTokens:
    """Looks at the tokens that a policy is to imitate.

    Args:
        policy: whose head is looked at, where that is one frozen matrix; one that is trained can still learn.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._looked_at: set[int] = set()

    def among(self, samples: Iterable[Sample], *, aloud: bool = True) -> tuple[TrainEvent, ...]:
        """What is to be said of the answers' added tokens; those looked at before are passed over.

        Args:
            samples: to be imitated.
            aloud: whether it is logged, too; one of several ranks says it for all.
        """
        added = self._policy.tokenizer.added_tokens_decoder
        new = {t for sample in samples for t in sample.completion if t in added} - self._looked_at
        self._looked_at |= new
        rows = self._policy.head_weight
        if not new or rows is None:
            return ()
        ids = sorted(new)
        found = [
            UntrainedToken(i, str(added[i]), alike)
            for i, alike in zip(ids, rows_alike(rows, ids), strict=True)
            if alike > FEW
        ]
        if not found:
            return ()
        event = _event(found)
        if aloud:
            logger.warning(event.message)
        return (event,)


@torch.no_grad()
def rows_alike(rows: Tensor, ids: Sequence[int]) -> list[int]:
    """How many other rows point where these do, or are zero as they are.

    Args:
        rows: of the head  [vocabulary, width].
        ids: whose rows are compared with all.
    """
    own = _directions(rows[list(ids)])
    counts = torch.zeros(len(ids), dtype=torch.long, device=rows.device)
    zero = own.abs().sum(1) == 0
    for chunk in rows.split(CHUNK):
        others = _directions(chunk)
        counts += (others @ own.T > ALIKE).sum(0)
        counts += zero * (others.abs().sum(1) == 0).sum()
    return [count - 1 for count in counts.tolist()]


def _directions(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.float(), dim=1)


def _event(found: Sequence[UntrainedToken]) -> TrainEvent:
    named = ", ".join(f"{t.text!r} ({t.alike} rows)" for t in found)
    message = (
        f"the answers to imitate hold tokens that the base model never learned to write: {named} of its "
        "output embedding point the same way, so an adapter before it cannot single them out, and the model "
        "will write other tokens in their place. Let it write tool calls without them "
        "(EngineConfig(chat_template=CHATML_JSON_TOOLS), of art_core.inference.chat_templates), train the "
        "output embedding too (lora=None trains all weights), or take another model"
    )
    tokens = [{"id": t.id, "token": t.text, "alike": t.alike} for t in found]
    return TrainEvent(
        UNTRAINED, message, float(max(t.alike for t in found)), float(FEW), data={"tokens": tokens}
    )
