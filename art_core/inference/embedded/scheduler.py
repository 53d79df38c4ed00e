"""The decoding loop: one thread that turns waiting requests into tokens.

Invariant: every submitted job ends, with all its choices finished or with an error; an exception ends
the jobs that it touched and no other.

Each step samples wherever logits are known and then computes, in one or two forward passes, what the
remaining sequences need next: prompts, in pieces, and sampled tokens together. Requests join and leave
between steps. Sequences that agree share tree nodes, so that what was computed once is not computed
again. Versions take turns, because the model runs with one adapter at a time.
"""

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.embedded.job import Job, Output, Progress
from art_core.inference.embedded.runner import Batch, Runner, packed, rows
from art_core.inference.embedded.sampling import Draw, Sampled, sample
from art_core.inference.embedded.text import Detokenizer, StopFinder
from art_core.inference.embedded.tree import Node, TokenTree
from art_core.training.policy import Policy

logger = logging.getLogger(__name__)

PREFILL_NODES = 512
"""Most nodes of one packed pass: enough to keep matrix products efficient, little enough that a long
prompt does not hold up the others for long."""

PACKED_AREA = PREFILL_NODES * 2560
"""Most queries times context of one packed pass; beyond it attention, not the weights, takes the time."""

SAMPLE_ROWS = 64
"""Most rows of logits at once: [64, 150000] float64 is 77 MB."""

TURN_SECONDS = 0.25
"""How long one version decodes, and the model's lock is held, while others wait."""


class Sequence_:
    """One choice of a job while it is decoded."""

    def __init__(self, job: Job, choice: int, root: Node, tokenizer: PreTrainedTokenizerBase) -> None:
        self.job = job
        self.output: Output = job.outputs[choice]
        self.tokens: list[int] = list(job.prompt)
        self.root = root
        self.tip = root
        self.path = np.empty(len(job.prompt) + job.params.max_tokens, dtype=np.int64)
        self.rng: random.Random = job.params.generator(choice)
        stops = job.params.stop
        self.stops = StopFinder(stops) if stops else None
        self.text = Detokenizer(tokenizer, keep_special=job.keep_special) if stops else None

    @property
    def missing(self) -> int:
        """How many of its tokens are not computed yet."""
        return len(self.tokens) - self.tip.depth

    def take(self, sampled: Sampled) -> bool:
        """Append a token; returns whether the sequence ends with it."""
        output, params = self.output, self.job.params
        self.tokens.append(sampled.token)
        output.sampled.append(sampled)
        count = len(output.sampled)
        progress = Progress(count, count)
        if sampled.token in params.stop_token_ids:
            progress = Progress(count, count - 1, "stop", sampled.token)
        elif self.stops is not None and self.text is not None:
            found = self.stops.push(self.text.push(sampled.token))
            if found is not None:
                progress = Progress(count, count, "stop", found[0], found[1])
        if progress.finish_reason is None and count >= params.max_tokens:
            progress = Progress(count, count, "length")
        output.progress = progress
        return progress.finish_reason is not None


class Scheduler:
    """Owns the thread, the tree and the pool.

    Args:
        policy: the model; the scheduler holds its lock while it computes.
        tokenizer: for stop texts; used by this thread only.
        config: batch size, cache size, determinism.
    """

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._config = config
        self._tree = TokenTree(config.prefix_cache_tokens, whole_roots=config.deterministic)
        self._runner = Runner(policy)
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Job, int]] = deque()
        self._running: list[Sequence_] = []
        self._jobs: Counter[str] = Counter()
        self._errands: deque[Callable[[], None]] = deque()
        self._paused = False
        self._closed = False
        self._last_version = ""
        self._thread = threading.Thread(target=self._loop, name="embedded-engine", daemon=True)

    # -- for other threads -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Take a job; it is told of progress through its ``notify``.

        Raises:
            EngineError: the engine is closed.
        """
        with self._wake:
            if self._closed:
                raise EngineError("the embedded engine is closed")
            self._jobs[job.version] += 1
            self._waiting.extend((job, choice) for choice in range(len(job.outputs)))
            self._wake.notify_all()

    def pause(self) -> None:
        """Admit nothing more; returns once nothing runs."""
        with self._wake:
            self._paused = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._running or not self._paused or self._closed)

    def resume(self) -> None:
        """Admit again."""
        with self._wake:
            self._paused = False
            self._wake.notify_all()

    def drain(self, version: str) -> None:
        """Return once no job of this version is left and its cache is freed."""
        with self._wake:
            self._wake.wait_for(lambda: not self._jobs[version] or self._closed)
            self._errands.append(lambda: self._tree.forget(version))
            self._wake.notify_all()

    def close(self) -> None:
        """End every job with an error and stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._closed:
                    break
                while self._errands:
                    self._errands.popleft()()
            self._admit()
            version = self._next_version()
            if version is None:
                continue
            try:
                with self._policy.using(version), torch.inference_mode():
                    self._turn(version)
            except Exception as broken:
                logger.exception("decoding with version %s failed", version)
                self._fail([s for s in self._running if s.job.version == version], broken)
            # A trainer that waits for the model's lock gets it now: the lock itself is not fair.
            time.sleep(0.0005)
        self._end_all()

    def _has_work(self) -> bool:
        return bool(self._closed or self._errands or self._running or (self._waiting and not self._paused))

    def _admit(self) -> None:
        with self._wake:
            while self._waiting and not self._paused and len(self._running) < self._config.max_batch:
                job, choice = self._waiting.popleft()
                if job.cancelled.is_set() or job.error is not None:
                    self._settle(job)
                    continue
                key = job.prompt if self._config.deterministic else None
                sequence = Sequence_(job, choice, self._tree.root(job.version, key), self._tokenizer)
                self._tree.move(None, sequence.root)
                self._running.append(sequence)

    def _next_version(self) -> str | None:
        """Whose turn it is: the version after the last one, in order of arrival."""
        versions = list(dict.fromkeys(s.job.version for s in self._running))
        if not versions:
            return None
        later = versions.index(self._last_version) + 1 if self._last_version in versions else 0
        self._last_version = versions[later % len(versions)]
        return self._last_version

    def _turn(self, version: str) -> None:
        """Decode one version for a while."""
        end = time.monotonic() + TURN_SECONDS
        while time.monotonic() < end and not self._closed:
            mine = [s for s in self._running if s.job.version == version]
            if not mine:
                return
            self._step(mine)
            self._admit()

    def _step(self, sequences: list[Sequence_]) -> None:
        gone = [s for s in sequences if s.job.cancelled.is_set()]
        for sequence in gone:
            self._end(sequence)
        sequences = [s for s in sequences if not s.job.cancelled.is_set()]
        if self._config.deterministic:
            self._step_alone(sequences)
        else:
            self._step_together(sequences)

    def _step_together(self, sequences: list[Sequence_]) -> None:
        waiting = sequences
        while True:
            for sequence in waiting:
                self._advance(sequence)
            ready = [s for s in waiting if not s.missing]
            if not ready:
                break
            ended = self._sample(ready)
            waiting = [s for s in waiting if id(s) not in ended]
        if waiting:
            self._tree.trim(sum(min(s.missing, PREFILL_NODES) for s in waiting))
            for batch in self._plan(waiting):
                self._compute(batch)

    def _step_alone(self, sequences: list[Sequence_]) -> None:
        """One sequence after the other, each in shapes that its own tokens alone decide."""
        for sequence in sequences:
            self._advance(sequence)
            if sequence.missing:
                self._tree.trim(min(sequence.missing, PREFILL_NODES))
                whole_pieces = PREFILL_NODES - sequence.tip.depth % PREFILL_NODES
                nodes, paths = self._extend([sequence], whole_pieces)
                self._compute(packed(nodes, paths))
                self._advance(sequence)
            if not sequence.missing:
                self._sample([sequence])

    def _advance(self, sequence: Sequence_) -> None:
        """Walk over nodes that are computed already."""
        node, tokens = sequence.tip, sequence.tokens
        while node.depth < len(tokens):
            child = node.children.get(tokens[node.depth])
            if child is None or not child.ready:
                break
            sequence.path[node.depth] = child.slot
            node = child
        if node is not sequence.tip:
            self._tree.move(sequence.tip, node)
            sequence.tip = node

    def _plan(self, sequences: list[Sequence_]) -> list[Batch]:
        """What to compute now: one pass of single tokens where that pays, and one packed pass."""
        singles = [s for s in sequences if s.missing == 1]
        batches: list[Batch] = []
        shared = len(np.unique(np.concatenate([s.path[: s.tip.depth] for s in singles]))) if singles else 0
        longest = max((s.tip.depth for s in singles), default=0)
        if len(singles) * shared > 4 * len(singles) * (longest + 1) * 16:
            nodes, paths = self._extend(singles, len(singles))
            batches.append(rows(nodes, paths))
            sequences = [s for s in sequences if s.missing > 1]
        if sequences:
            nodes, paths = self._extend(sequences, PREFILL_NODES)
            batches.append(packed(nodes, paths))
        return batches

    def _extend(
        self, sequences: list[Sequence_], budget: int
    ) -> tuple[list[Node], list[np.typing.NDArray[np.int64]]]:
        """Add the nodes that the sequences need next, at most ``budget`` in all."""
        nodes: list[Node] = []
        paths: list[np.typing.NDArray[np.int64]] = []
        nothing = np.empty(0, dtype=np.int64)
        columns = 0
        for sequence in sorted(sequences, key=lambda s: s.missing > 1):
            if nodes and (len(nodes) >= budget or len(nodes) * (columns + len(nodes)) > PACKED_AREA):
                break
            node = sequence.tip
            columns += node.depth
            while node.depth < len(sequence.tokens):
                token = sequence.tokens[node.depth]
                child = node.children.get(token)
                if child is None:
                    if len(nodes) >= budget:
                        break
                    child = self._tree.add(node, token)
                    nodes.append(child)
                    paths.append(sequence.path[: node.depth] if node.ready else nothing)
                node = child
        return nodes, paths

    def _compute(self, batch: Batch) -> None:
        try:
            self._runner.reserve(self._tree.slots)
            self._runner.run(batch)
        except BaseException:
            self._tree.discard(batch.nodes)
            raise

    def _sample(self, sequences: list[Sequence_]) -> set[int]:
        """One token for each; returns the ids of those that ended."""
        ended: set[int] = set()
        nodes = list({id(s.tip): s.tip for s in sequences}.values())
        for start in range(0, len(nodes), SAMPLE_ROWS):
            part = nodes[start : start + SAMPLE_ROWS]
            row_of = {id(node): row for row, node in enumerate(part)}
            mine = [s for s in sequences if id(s.tip) in row_of]
            draws = [Draw(row_of[id(s.tip)], s.job.params, s.rng.random()) for s in mine]
            for sequence, sampled in zip(mine, sample(self._runner.logits(part), draws), strict=True):
                if sequence.take(sampled):
                    ended.add(id(sequence))
                    self._end(sequence)
                else:
                    sequence.job.notify()
        return ended

    # -- ends ------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence_) -> None:
        self._tree.move(sequence.tip, None)
        with self._wake:
            self._running.remove(sequence)
            self._settle(sequence.job)

    def _settle(self, job: Job) -> None:
        """Count one choice as gone, and the job with its last."""
        job.open -= 1
        if not job.open:
            self._jobs[job.version] -= 1
            self._wake.notify_all()
            job.notify()

    def _fail(self, sequences: Sequence[Sequence_], cause: Exception) -> None:
        for sequence in sequences:
            if sequence.job.error is None:
                error = EngineError(f"decoding failed: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                sequence.job.error = error
            self._end(sequence)

    def _end_all(self) -> None:
        closed = EngineError("the embedded engine was closed before the request was answered")
        self._fail(list(self._running), closed)
        with self._wake:
            for job, _ in self._waiting:
                job.error = job.error or closed
                job.notify()
            self._waiting.clear()
            self._jobs.clear()
            self._wake.notify_all()
