"""One choice of a request while it is decoded.

Invariant: ``path[:tip.depth]`` are the slots from the root to ``tip``, all ready, and ``tokens`` begins
with the tokens on that path.
"""

import random

import numpy as np
from transformers import PreTrainedTokenizerBase

from art_core.inference.embedded.job import Job, Output, Progress
from art_core.inference.embedded.runner import Chain
from art_core.inference.embedded.sampling import Draw, Sampled
from art_core.inference.embedded.text import Detokenizer, StopFinder
from art_core.inference.embedded.tree import Node, TokenTree


class Decoding:
    """A sequence that runs.

    Args:
        job: what it belongs to.
        choice: which of the job's choices.
        tree: where it walks; the sequence is pinned there until `leave`.
        root: of its version (and prompt).
        tokenizer: for stop texts.
    """

    def __init__(
        self, job: Job, choice: int, tree: TokenTree, root: Node, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.job = job
        self.output: Output = job.outputs[choice]
        self.tokens: list[int] = list(job.prompt)
        self.path = np.empty(len(job.prompt) + job.params.max_tokens, dtype=np.int64)
        self.rng: random.Random = job.params.generator(choice)
        self._tree = tree
        self.tip = root
        tree.move(None, root)
        stops = job.params.stop
        self._stops = StopFinder(stops) if stops else None
        self._text = Detokenizer(tokenizer, keep_special=job.keep_special) if stops else None

    @property
    def missing(self) -> int:
        """How many of its tokens are not computed yet."""
        return len(self.tokens) - self.tip.depth

    def advance(self) -> None:
        """Walk over nodes that are computed already, by whomever."""
        node, tokens = self.tip, self.tokens
        while node.depth < len(tokens):
            child = node.children.get(tokens[node.depth])
            if child is None or not child.ready:
                break
            self.path[node.depth] = child.slot
            node = child
        if node is not self.tip:
            self._tree.move(self.tip, node)
            self.tip = node

    def extend(self, most: int) -> Chain | None:
        """Add nodes for its next tokens; None when another sequence is computing the first of them."""
        tokens, start = self.tokens, self.tip.depth
        if tokens[start] in self.tip.children:
            return None
        nodes: list[Node] = []
        above = self.tip
        for token in tokens[start : start + most]:
            above = self._tree.add(above, token)
            nodes.append(above)
        return Chain(self.path[:start], nodes)

    def draw(self, row: int) -> Draw:
        """Its turn to sample, from a row of logits."""
        params = self.job.params
        if not params.shaping.acts:
            return Draw(row, params, self.rng.random())
        return Draw(row, params, self.rng.random(), self.job.prompt, self.tokens[len(self.job.prompt) :])

    def take(self, sampled: Sampled) -> bool:
        """Append a token; returns whether the sequence ends with it."""
        output, params = self.output, self.job.params
        self.tokens.append(sampled.token)
        output.sampled.append(sampled)
        count = len(output.sampled)
        progress = Progress(count, count)
        if sampled.token in params.stop_token_ids:
            progress = Progress(count, count - 1, "stop", sampled.token)
        elif self._stops is not None and self._text is not None:
            found = self._stops.push(self._text.push(sampled.token))
            if found is not None:
                progress = Progress(count, count, "stop", found[0], found[1])
        if progress.finish_reason is None and count >= params.max_tokens:
            progress = Progress(count, count, "length")
        output.progress = progress
        return progress.finish_reason is not None

    def leave(self) -> None:
        """Give up its place in the tree; what it computed stays as cache."""
        self._tree.move(self.tip, None)

    def enter(self, root: Node) -> None:
        """Take a place in the tree again: `advance` finds what is still there, the rest is computed again."""
        self.tip = root
        self._tree.move(None, root)
