"""The decoding loop: one thread that turns waiting requests into tokens.

Invariant: every submitted job ends, with all its choices finished or with an error; an exception ends
the jobs that it touched and no other.

Each step samples wherever logits are known and then makes one forward pass: over prompts (long ones in
pieces) or over the sampled tokens of all that decode. Requests join and leave between steps. Sequences
that agree share tree nodes, so that what was computed once is not computed again. Versions take turns,
because the model runs with one adapter at a time; so do requests of many choices, one place at a time.

Memory is bounded: when the running sequences' keys and values do not fit, the youngest is suspended, keeps
its tokens and random numbers, and goes on when others have ended. It answers as it would have.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.embedded.job import Job
from art_core.inference.embedded.runner import Batch, Chain, Runner, cheapest, rows
from art_core.inference.embedded.sampling import sample
from art_core.inference.embedded.sequence import Decoding
from art_core.inference.embedded.tree import Node, TokenTree
from art_core.training.policy import Policy

logger = logging.getLogger(__name__)

PREFILL_NODES = 512
"""Most prompt tokens of one pass: enough to keep matrix products efficient, little enough that a long
prompt does not hold up the others for long."""

MIN_FILL = 0.7
"""Least share of a batch of prompts that is not padding."""

MAX_PREFILLS = 4
"""Passes over prompts before those that decode get their next token."""

SAMPLE_ROWS = 64
"""Most rows of logits at once: [64, 150000] float64 is 77 MB."""

TURN_SECONDS = 0.25
"""How long one version decodes, and the model's lock is held, while others wait."""


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
        # One request of full length always fits, however little is to be kept.
        limit = max(config.prefix_cache_tokens, config.max_model_len)
        self._tree = TokenTree(config.prefix_cache_tokens, limit=limit, whole_roots=config.deterministic)
        self._runner = Runner(policy, limit)
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Job, int]] = deque()  # and its first choice that waits
        self._running: dict[Decoding, None] = {}  # a set in order of arrival
        self._suspended: list[Decoding] = []  # the oldest last
        self._ended = 0  # running sequences that made room since one was suspended
        self._prefills = 0
        self._suspensions = 0
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
            self._waiting.append((job, 0))
            self._wake.notify_all()

    def pause(self) -> None:
        """Admit nothing more; returns once nothing runs."""
        with self._wake:
            self._paused = True
            self._wake.notify_all()
            self._wake.wait_for(
                lambda: not (self._running or self._suspended) or not self._paused or self._closed
            )

    def resume(self) -> None:
        """Admit again."""
        with self._wake:
            self._paused = False
            self._wake.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more: forget what waits, and what runs at the next step."""
        with self._wake:
            job.cancelled.set()
            mine = sum(len(job.outputs) - first for waiting, first in self._waiting if waiting is job)
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)
            for _ in range(mine):
                self._settle(job)
            self._wake.notify_all()

    def drain(self, version: str) -> None:
        """Return once no job of this version is left; its cache is freed."""
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
            mine = [s for s in self._running if s.job.version == version]
            try:
                with self._policy.using(version), torch.inference_mode():
                    self._turn(version)
            except Exception as broken:
                logger.exception("decoding with version %s failed", version)
                self._fail(mine, broken)
            # A trainer that waits for the model's lock gets it now: the lock itself is not fair.
            time.sleep(0.0005)
        self._end_all()

    def _has_work(self) -> bool:
        return bool(
            self._closed
            or self._errands
            or self._running
            or self._suspended
            or (self._waiting and not self._paused)
        )

    def _admit(self) -> None:
        with self._wake:
            self._resume_suspended()
            while (
                self._waiting
                and not self._paused
                and not self._suspended  # what was begun comes first
                and len(self._running) < self._config.max_batch
            ):
                job, choice = self._waiting.popleft()
                if choice + 1 < len(job.outputs):
                    self._waiting.append((job, choice + 1))
                if job.cancelled.is_set() or job.error is not None:
                    self._settle(job)
                    continue
                self._running[Decoding(job, choice, self._tree, self._root(job), self._tokenizer)] = None

    def _root(self, job: Job) -> Node:
        return self._tree.root(job.version, job.prompt if self._config.deterministic else None)

    def _resume_suspended(self) -> None:
        for sequence in [s for s in self._suspended if s.job.cancelled.is_set() or s.job.error is not None]:
            self._suspended.remove(sequence)
            self._settle(sequence.job)
        while self._suspended and (self._ended or not self._running):
            if len(self._running) >= self._config.max_batch:
                return
            self._ended = max(0, self._ended - 1)
            sequence = self._suspended.pop()
            sequence.enter(self._root(sequence.job))
            self._running[sequence] = None

    def _make_room(self, needed: int) -> None:
        """Evict, and suspend the youngest, until so many more tokens fit; one sequence always goes on."""
        while not self._tree.trim(needed) and len(self._running) > 1:
            youngest = next(reversed(self._running))
            if not self._suspensions:
                logger.warning(
                    "the embedded engine's memory of %d tokens is full: requests take turns; "
                    "raise EngineConfig.prefix_cache_tokens if there is room, or lower max_batch",
                    self._tree.limit,
                )
            self._suspensions += 1
            self._ended = 0
            youngest.leave()
            with self._wake:
                del self._running[youngest]
                self._suspended.append(youngest)

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

    def _step(self, sequences: list[Decoding]) -> None:
        """Sample where logits are known, then compute what the others need next."""
        for sequence in sequences:
            if sequence.job.cancelled.is_set() or sequence.job.error is not None:
                self._end(sequence)
        sequences = [s for s in sequences if s in self._running]
        if self._config.deterministic:
            for sequence in sequences:
                self._guard([sequence], self._step_alone)
            return
        waiting = sequences
        while True:
            for sequence in waiting:
                sequence.advance()
            ready = [s for s in waiting if not s.missing]
            if not ready:
                break
            self._guard(ready, self._sample)
            waiting = [s for s in waiting if s in self._running]
        singles = [s for s in waiting if s.missing == 1]
        prompts = [s for s in waiting if s.missing > 1]
        if prompts and (not singles or self._prefills < MAX_PREFILLS):
            self._prefills += 1
            self._guard(prompts, self._compute_prompts)
        elif singles:
            self._prefills = 0
            self._guard(singles, self._compute_singles)

    def _step_alone(self, sequences: list[Decoding]) -> None:
        """One sequence, in shapes that its own tokens alone decide, whatever is in the cache."""
        (sequence,) = sequences
        sequence.advance()
        if sequence.missing:
            # Pieces of a prompt begin at multiples, also when an earlier request left off in between; what
            # was sampled goes in one by one, also when it is computed again.
            done, prompt = sequence.tip.depth, len(sequence.job.prompt)
            most = min(PREFILL_NODES - done % PREFILL_NODES, prompt - done) if done < prompt else 1
            self._make_room(min(most, sequence.missing))
            if sequence not in self._running:
                return
            chain = sequence.extend(most)
            assert chain is not None  # nothing else is being computed
            self._compute(rows([chain]))
            sequence.advance()
        if not sequence.missing:
            self._sample([sequence])

    def _compute_singles(self, sequences: list[Decoding]) -> None:
        self._make_room(len(sequences))
        chains = [chain for s in sequences if s in self._running and (chain := s.extend(1)) is not None]
        if chains:
            self._compute(cheapest(chains))

    def _compute_prompts(self, sequences: list[Decoding]) -> None:
        """Prompts of similar length together, the oldest first.

        A prompt whose next token another one of the batch computes waits for that: it shares more than
        what is cached yet, and after this pass it needs only the rest.
        """
        self._make_room(min(PREFILL_NODES, sum(s.missing for s in sequences)))
        chains: list[Chain] = []
        total = longest = 0
        for sequence in sequences:
            if sequence not in self._running:
                continue
            length = min(sequence.missing, PREFILL_NODES)
            area = (len(chains) + 1) * max(longest, length)
            if chains and (area > PREFILL_NODES or total + length < MIN_FILL * area):
                continue
            chain = sequence.extend(length)
            if chain is not None:
                chains.append(chain)
                total, longest = total + length, max(longest, length)
        if chains:
            self._compute(rows(chains))

    def _compute(self, batch: Batch) -> None:
        try:
            self._runner.reserve(self._tree.slots)
            self._runner.run(batch)
        except BaseException:
            self._tree.discard(batch.nodes)
            raise

    def _guard(self, sequences: list[Decoding], work: Callable[[list[Decoding]], None]) -> None:
        """Do work for some sequences; if it fails, they end with the error and the engine lives on."""
        try:
            work(sequences)
        except Exception as broken:
            logger.exception("decoding failed for %d sequences", len(sequences))
            self._fail(sequences, broken)

    def _sample(self, sequences: list[Decoding]) -> None:
        """One token for each."""
        nodes = list({id(s.tip): s.tip for s in sequences}.values())
        for start in range(0, len(nodes), SAMPLE_ROWS):
            part = nodes[start : start + SAMPLE_ROWS]
            row_of = {id(node): row for row, node in enumerate(part)}
            mine = [s for s in sequences if id(s.tip) in row_of]
            draws = [s.draw(row_of[id(s.tip)]) for s in mine]
            for sequence, sampled in zip(mine, sample(self._runner.logits(part), draws), strict=True):
                if sequence.take(sampled):
                    self._end(sequence)
                if sequence.job.follow:
                    sequence.job.notify()

    # -- ends ------------------------------------------------------------------------------------------

    def _end(self, sequence: Decoding) -> None:
        sequence.leave()
        with self._wake:
            del self._running[sequence]
            self._ended += 1
            self._settle(sequence.job)

    def _settle(self, job: Job) -> None:
        """Count one choice as gone, and the job with its last."""
        job.open -= 1
        if not job.open:
            self._jobs[job.version] -= 1
            self._wake.notify_all()
            job.notify()

    def _fail(self, sequences: Sequence[Decoding], cause: Exception) -> None:
        for sequence in [s for s in sequences if s in self._running]:
            if sequence.job.error is None:
                error = cause
                if not isinstance(error, EngineError):
                    error = EngineError(f"decoding failed: {type(cause).__name__}: {cause}")
                    error.__cause__ = cause
                sequence.job.error = error
            self._end(sequence)

    def _end_all(self) -> None:
        closed = EngineError("the embedded engine was closed before the request was answered")
        self._fail(list(self._running), closed)
        with self._wake:
            for sequence in self._suspended:
                sequence.job.error = sequence.job.error or closed
                sequence.job.notify()
            self._suspended.clear()
            for job, _ in self._waiting:
                job.error = job.error or closed
                job.notify()
            self._waiting.clear()
            self._jobs.clear()
            self._wake.notify_all()
