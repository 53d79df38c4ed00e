"""What RULER makes of judges that err in known ways: noise, a liking for a place, votes, overlapping sets.

    python benchmarks/ruler.py            # about a minute on one core
    python benchmarks/ruler.py --quick    # the same parts, small: to see that they work

Groups of eight runs of known quality, drawn evenly from 0 to 1. The judge is a function of the question: it
reads each run's quality and adds

    noise  a Gaussian of this standard deviation, drawn anew for each run and vote
    bias   a bonus that falls evenly from the first place of the question to the last
    scale  what judges that compare do: the best run it sees gets 1, the worst 0

Pairwise accuracy is the share of pairs of a group that come out in the true order (a tie is half a pair).
Theory for noise: a pair at distance d is in order with probability Phi(d / (sqrt(2) sigma)) (Thurstone, 1927,
"A law of comparative judgment", case V), where sigma is the standard deviation of the median of the votes'
noise. The rows go to ``benchmarks/results/ruler.json``.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from rich.console import Console
from rich.table import Table

from art_core.rewards import Answer, Ruler, Usage
from art_core.types import Message, RolloutStatus, Scenario, Step, Trajectory, TrajectoryGroup
from benchmarks.environment import write_result

MEMBERS = 8
RUN = re.compile(r"^<<<run (\S+) (\w+)$\n(.*?)^\2 run \1>>>$", re.MULTILINE | re.DOTALL)


@dataclass
class Erring:
    """A judge that knows the truth and errs as it is told to."""

    noise: float = 0.0
    bias: float = 0.0
    scale: bool = False
    name: str = "erring"
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
        """Answer with the truth and this judge's errors."""
        found = RUN.findall(messages[1]["content"])
        true = [float(re.findall(r"quality=([\d.]+)", text)[-1]) for _, _, text in found]
        if self.scale:
            low, high = min(true), max(true)
            true = [(q - low) / (high - low) for q in true]
        last = max(len(true) - 1, 1)
        said = [q + self.draw.gauss(0, self.noise) + self.bias * (1 - i / last) for i, q in enumerate(true)]
        # Its own unit: everything it may say fits between 0 and 1, and no score is cut off.
        margin = 6 * self.noise
        scores = [(s + margin) / (1 + 2 * margin + self.bias) for s in said]
        entries = [{"id": i, "score": min(max(s, 0), 1)} for (i, _, _), s in zip(found, scores, strict=True)]
        return Answer(json.dumps({"scores": entries}), Usage(1, 0, 0))


def group(
    number: int, rng: random.Random, members: int, words: int = 0
) -> tuple[TrajectoryGroup, list[float]]:
    """A group of runs whose texts say how good they are."""
    qualities = [round(rng.random(), 6) for _ in range(members)]
    scenario = Scenario(f"s{number}")
    runs = [
        Trajectory(
            id=f"{number}-{i}",
            scenario=scenario,
            steps=(
                Step(
                    id=f"{number}-{i}-0",
                    rollout_id=f"{number}-{i}",
                    messages=({"role": "user", "content": "Go."},),
                    response={"role": "assistant", "content": f"{quality} " * words + f"quality={quality}"},
                    model="agent",
                    started_at=0.0,
                    duration=0.0,
                ),
            ),
            status=RolloutStatus.FINISHED,
        )
        for i, quality in enumerate(qualities)
    ]
    return TrajectoryGroup(scenario, tuple(runs), f"g{number}"), qualities


def pairs_in_order(true: Sequence[float], scores: Sequence[float]) -> list[float]:
    """1, 0 or (tied) 0.5 for each pair."""
    return [
        0.5 if a == b else float((a < b) == (x < y))
        for (x, a), (y, b) in itertools.combinations(zip(true, scores, strict=True), 2)
    ]


async def measure(
    judge: Erring, groups: int, *, votes: int = 1, members: int = MEMBERS, words: int = 0, **options: Any
) -> dict[str, float]:
    """Pairwise accuracy over groups, with the standard error over groups."""
    rng = random.Random(11)
    made = [group(n, rng, members, words) for n in range(groups)]
    ruler = Ruler(judge, votes=votes, **options)
    judgements = await ruler.ascore_groups([one for one, _ in made])
    accuracies: list[float] = []
    for (_, true), judgement in zip(made, judgements, strict=True):
        if judgement.unscored is not None:
            raise SystemExit(f"unscored: {judgement.unscored}")
        scores = [scored.score for scored in judgement.scores.values()]
        accuracies.append(statistics.mean(pairs_in_order(true, scores)))
    error = statistics.stdev(accuracies) / math.sqrt(groups)
    return {
        "accuracy": statistics.mean(accuracies),
        "standard_error": error,
        "calls_per_group": ruler.usage.calls / groups,
    }


@lru_cache
def sigma_of_median(votes: int) -> float:
    """Standard deviation of the median of standard Gaussians, by simulation."""
    rng = random.Random(5)
    return statistics.pstdev(statistics.median(rng.gauss(0, 1) for _ in range(votes)) for _ in range(20_000))


def theory(noise: float, votes: int) -> float:
    """Expected accuracy for two qualities drawn evenly from 0 to 1, whose distance has density 2 (1 - d)."""
    sigma = noise * sigma_of_median(votes)
    if sigma == 0:
        return 1.0
    steps = 2000
    distances = ((i + 0.5) / steps for i in range(steps))
    return sum(2 * (1 - d) * 0.5 * (1 + math.erf(d / (2 * sigma))) for d in distances) / steps


async def table(groups: int) -> dict[str, Any]:
    """Every row."""
    noisy = [
        {"noise": noise, "votes": votes, "theory": theory(noise, votes)}
        | await measure(Erring(noise), groups, votes=votes)
        for noise in (0.0, 0.1, 0.2, 0.4)
        for votes in (1, 3, 5)
    ]
    biased = [
        {"bias": bias, "votes": votes} | await measure(Erring(bias=bias), groups, votes=votes)
        for bias in (0.25, 0.5)
        for votes in (1, 2, 4, 8)
    ]
    # A question has room for about eight of these runs; the judge spreads what it sees over the whole scale.
    split = [
        {"members": members}
        | await measure(
            Erring(scale=True), max(groups // 8, 2), members=members, words=300, token_budget=4400
        )
        for members in (8, 16, 32)
    ]
    return {"members": MEMBERS, "groups": groups, "noise": noisy, "bias": biased, "split": split}


def show(result: Mapping[str, Any]) -> None:
    """The rows as tables."""
    console = Console()
    for part in ("noise", "bias", "split"):
        rows = result[part]
        shown = Table(*rows[0], title=part)
        for row in rows:
            shown.add_row(*(f"{value:.4g}" for value in row.values()))
        console.print(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few groups; writes nothing")
    quick = parser.parse_args().quick
    measured = asyncio.run(table(20 if quick else 400))
    show(measured)
    if not quick:
        write_result("ruler", measured, {})
