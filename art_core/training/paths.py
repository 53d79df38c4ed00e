"""Which path trees take before a model: what is right there, and of that what is fastest.

Invariant: no path is used that does not give the hidden states of the rows taken one by one. A policy says
what it can take (``paths``), and is not believed: engines exist that take a mask and ignore it.

The probe runs once for a policy on a machine, and so does the measurement of how many places a second each
path does; both are kept (`measured`). A batch then takes the path on which its own places, which differ by
path, take the least time.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from art_core.config import PathName
from art_core.errors import ConfigError
from art_core.training.layout import PATHS, Layout, Path, lay_out
from art_core.training.logprobs import entry_logprobs
from art_core.training.measured import Measured, machine_key
from art_core.training.out_of_memory import is_out_of_memory, release
from art_core.training.policy import TRAINING, Policy
from art_core.training.ranks import Alone, Ranks
from art_core.training.samples import Sample
from art_core.training.token_tree import TokenTree, build_tree

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far hidden states may be from those of single rows, relative to their size."""


LONGEST, SHORTEST = 2560, 80
"""Tokens of the rollouts over which paths are timed: at the most, and where less memory than they take is an
error."""


class PathChoice:
    """The paths of one policy; probed and measured when first asked.

    Args:
        policy: whose they are; its ``path`` is not changed here.
        wanted: one path, or ``auto``.
        ranks: who trains together, and so takes the same path.
    """

    def __init__(self, policy: Policy, wanted: PathName = "auto", ranks: Ranks | None = None) -> None:
        self._policy = policy
        self._ranks: Ranks = ranks or Alone()
        self._wanted: PathName = wanted
        self._rates: dict[Path, float] | None = None

    def of(self, trees: Sequence[TokenTree]) -> Path:
        """The path for these trees.

        Raises:
            ConfigError: the path that was asked for, or every path, is wrong for this policy.
        """
        if self._rates is None:
            self._rates = self._allowed()
        rates = self._rates
        return min(rates, key=lambda path: sum(places(tree, path) for tree in trees) / rates[path])

    def _allowed(self) -> dict[Path, float]:
        policy, wanted = self._policy, self._wanted
        if wanted != "auto" and wanted not in policy.paths:
            raise ConfigError(
                f"path={wanted!r}: {type(policy).__name__} takes {', '.join(sorted(policy.paths))}"
            )
        asked: list[Path] = [p for p in PATHS if p in policy.paths and (wanted == "auto" or wanted == p)]
        found = self._kept(asked) if policy.device.type == "cuda" else self._probed(asked)
        wrong = {path: value for path, value in found.items() if isinstance(value, str)}
        for path, why in wrong.items():
            logger.warning("path %r is not used with this model: %s", path, why)
        rates = self._agreed({p: 0.0 if p in wrong else float(found.get(p, 0.0)) for p in asked})
        if not rates:
            why = "; ".join(f"{path}: {reason}" for path, reason in wrong.items()) or "on another process"
            raise ConfigError(
                f"{type(policy).__name__} does not compute what single rows give ({why}), so nothing can be "
                "trained with it; choose another path, policy or kernels"
            )
        return rates

    def _probed(self, asked: Sequence[Path]) -> dict[Path, float | str]:
        """Without a GPU time goes with places, so the first path that is right is the fastest."""
        found: dict[Path, float | str] = {}
        for path in asked:
            why = probe(self._policy, path)
            found[path] = 1.0 if why is None else why
            if why is None:
                break
        return found

    def _kept(self, asked: Sequence[Path]) -> dict[Path, float | str]:
        """What the table says, or what is found now and put there."""
        policy = self._policy
        table = Measured("paths")
        key = machine_key(policy)
        read = table.get(key) or {}
        known: dict[Path, float | str] = {path: read[path] for path in PATHS if path in read}
        missing: list[Path] = [path for path in asked if path not in known]
        # Ranks that share one model pass together or not at all, whatever their tables say.
        measured: Sequence[Path] = asked if self._ranks.sharded else missing
        whole = min(LONGEST, policy.context_length or LONGEST)
        shorter: set[Path] = set()
        for path in measured:
            why = probe(policy, path)
            known[path], length = self._rate(path, whole) if why is None else (why, whole)
            if length < whole:  # another time there may be more memory
                shorter.add(path)
            logger.info("path %r: %s places a second", path, known[path])
        if missing:
            table.put(key, {path: value for path, value in known.items() if path not in shorter})
        return {path: known[path] for path in asked}

    def _rate(self, path: Path, whole: int) -> tuple[float, int]:
        """Places a second, over rollouts of so many tokens or as many as fit into memory; and how many."""
        while True:
            try:
                return rate(self._policy, path, whole), whole
            except (RuntimeError, MemoryError) as error:
                # With a sharded model the other ranks wait within the same pass: it cannot be made again.
                if self._ranks.sharded or whole <= SHORTEST or not is_out_of_memory(error):
                    raise
            release()
            whole //= 2

    def _agreed(self, rates: dict[Path, float]) -> dict[Path, float]:
        """What is right on every rank, at the rate of all together."""
        own = torch.tensor(list(rates.values()), dtype=torch.float64)
        wrong = self._ranks.sum((own == 0).to(torch.int64))
        total = self._ranks.sum(own)
        return {
            path: float(speed)
            for path, speed, none in zip(rates, total, wrong.tolist(), strict=True)
            if not none
        }


def places(tree: TokenTree, path: Path) -> int:
    """Places that a tree takes on a path, without padding."""
    if path == "tree":
        return int(tree.inner.sum())
    ends = np.append(tree.branch_starts[1:], len(tree))
    return int(tree.depth[ends - 1].sum())


def probe(policy: Policy, path: Path) -> str | None:
    """What is wrong with a path; None when it gives what single rows give.

    Rows of one prompt with different answers go before the model on the path and one by one. Hidden states
    must agree to the type's precision, and better than with those of a model that ignores who sees whom.
    """
    words = _vocabulary(policy)
    prompt = tuple(i % words for i in range(20, 44))
    samples = [
        Sample(prompt, tuple((start + i) % words for i in range(8)), (None,) * 8, 1.0, f"{start}", f"{start}")
        for start in (1, 2, 3)
    ]
    tree = build_tree(samples)
    targets = np.unique(tree.entries.node)
    layout = lay_out(tree, targets, path)
    with torch.no_grad(), policy.using(TRAINING):
        found = policy.states(layout)[torch.from_numpy(layout.places).to(policy.device)]
        right = torch.cat([_alone(policy, sample) for sample in samples])
        careless = policy.states(_without_mask(layout))
        careless = careless[torch.from_numpy(layout.places).to(policy.device)]
    away, unmasked = _distance(found, right), _distance(careless, right)
    limit = TOLERANCE.get(found.dtype, 1e-3)
    if not away <= limit:
        return f"hidden states are {away:.2g} away from those of single rows, relative to their size"
    if layout.exits is not None and away > unmasked / 2:
        return f"who sees whom is ignored: {away:.2g} away from single rows, {unmasked:.2g} without a mask"
    return None


def _vocabulary(policy: Policy) -> int:
    """How many token ids there are."""
    if policy.head_weight is not None:
        return len(policy.head_weight)
    tree = build_tree([Sample((0, 1), (1,), (None,), 1.0, "", "")])
    return policy.head(policy.states(lay_out(tree, np.array([2]), "padded"))).shape[-1]


def _alone(policy: Policy, sample: Sample) -> torch.Tensor:
    """Hidden states that a sample's answer is read at, computed without company  [answer, width]."""
    tree = build_tree([sample])
    layout = lay_out(tree, np.unique(tree.entries.node), "padded")
    return policy.states(layout)[torch.from_numpy(layout.places).to(policy.device)]


def _without_mask(layout: Layout) -> Layout:
    """The same tokens as if they were one text: transformers would tell rows apart by their positions."""
    rows, columns = layout.token_ids.shape
    text = np.tile(np.arange(columns), (rows, 1))
    return Layout("padded", layout.token_ids, text, None, layout.places, layout.chains)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


def rate(policy: Policy, path: Path, whole: int) -> float:
    """Places a second, forward and backward, over a small group of agent rollouts of so many tokens."""
    words = _vocabulary(policy)
    answer = whole // 5
    prompt = tuple(i % words for i in range(whole - answer))
    samples = [
        Sample(
            prompt, tuple((7 * i + j) % words for j in range(answer)), (None,) * answer, 1.0, f"{i}", f"{i}"
        )
        for i in range(8)
    ]
    tree = build_tree(samples)
    seconds: list[float] = []
    before = policy.path
    parameters = policy.trainable_parameters()
    kept = [p.grad for p in parameters]
    try:
        policy.path = path
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            torch.cuda.synchronize(policy.device)
            began = time.perf_counter()
            with policy.using(TRAINING):
                entry_logprobs(policy, tree).logprob.sum().backward()
            torch.cuda.synchronize(policy.device)
            seconds.append(time.perf_counter() - began)
    finally:
        policy.path = before
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    return places(tree, path) / min(seconds)
