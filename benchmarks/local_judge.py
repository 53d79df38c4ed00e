"""How well a small local model judges: RULER with Qwen2.5-Coder-0.5B on groups of known quality.

    python benchmarks/local_judge.py                    # starts a vLLM of its own; minutes on a CPU
    python benchmarks/local_judge.py --judge http://127.0.0.1:8000/v1 --judge-model my-model

Each group is one question of the mailbox example, answered by four scripted runs of the example's graph:

    right     searches, reads the mail that settles it, answers, cites it
    unsourced the same answer, but another mail is cited
    outdated  reads another mail that the search has shown, and answers with a value that is not last
    none      searches, reads, and says that it does not know

The judge gets the example's rubric, which does not tell the answer. Pairwise accuracy is the share of a
group's pairs that come out in that order (a tie is half a pair; guessing has 0.5); ``right_or_wrong`` counts
only pairs of one of the upper and one of the lower two. Groups without a usable verdict are counted, and are
in no accuracy. The rows go to ``benchmarks/results/local_judge.json``, as they are.
"""

import argparse
import asyncio
import itertools
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_openai import ChatOpenAI
from rich.console import Console
from rich.table import Table

from art_core import EngineConfig, LoRAConfig, Scenario
from art_core.rewards import Answer, Judge, JudgeError, Ruler
from art_core.rewards.verdicts import read_verdicts
from art_core.types import Message, PolicyVersion, TrajectoryGroup
from art_langgraph import LangChainJudge, arollout
from benchmarks.environment import write_result
from benchmarks.ruler import pairs_in_order
from examples.email_research.agent import build_graph
from examples.email_research.judging import RUBRIC
from examples.email_research.mailbox import Mailbox, prepared
from examples.email_research.policies import Act, Policy, Scripted, expert
from examples.options import model_named

LEVELS = {"right": 1.0, "unsourced": 0.75, "outdated": 0.25, "none": 0.0}
"""The runs of a group, best first, and how good they are."""
WAYS = {"schema": (True, 1), "words": (False, 1), "votes": (True, 4)}
"""How the judge is asked: held to the verdict's schema or not, and how often."""
CONTEXT, VERDICT = 4096, 384
"""Tokens of the judge's context, and of its answer."""


def policies(scenario: Scenario) -> dict[str, Policy]:
    """Each level's policy on a question."""
    right = expert([scenario]).policy
    asked = scenario.metadata
    settling = set(asked["sources"])

    def other(messages: Sequence[BaseMessage]) -> str:
        """A mail that the search has shown and that does not settle the question."""
        told = "\n".join(m.text for m in messages if isinstance(m, ToolMessage))
        shown = re.findall(r"^(m\d+) ", told, re.MULTILINE)
        return next(one for one in shown if one not in settling)

    def unsourced(messages: Sequence[BaseMessage]) -> Act:
        name, given = right(messages)
        return (name, {**given, "sources": [other(messages)]}) if name == "answer" else (name, given)

    def outdated(messages: Sequence[BaseMessage]) -> Act:
        if len(messages) > 4:
            return "answer", {"text": asked["rivals"][0], "sources": [other(messages)]}
        name, given = right(messages)
        return (name, {"mail_id": other(messages)}) if name == "read" else (name, given)

    def none(messages: Sequence[BaseMessage]) -> Act:
        if len(messages) > 4:
            return "answer", {"text": "I do not know.", "sources": []}
        return outdated(messages)

    return {"right": right, "unsourced": unsourced, "outdated": outdated, "none": none}


async def groups_of(mailbox: Mailbox, count: int) -> list[TrajectoryGroup]:
    """Groups of known quality: questions whose answer has changed, of every kind that has one source."""
    usable = [s for s in mailbox.scenarios() if s.metadata["rivals"] and len(s.metadata["sources"]) == 1]
    by_kind = {
        kind: [s for s in usable if s.metadata["kind"] == kind]
        for kind in sorted({s.metadata["kind"] for s in usable})
    }
    mixed = [s for row in itertools.zip_longest(*by_kind.values()) for s in row if s is not None]
    made: list[TrajectoryGroup] = []
    for scenario in mixed[:count]:
        runs = [
            await arollout(
                build_graph(Scripted(policy=policy), mailbox),
                scenario,
                require_policy_calls=False,
                spans=False,  # as in training
            )
            for policy in policies(scenario).values()
        ]
        made.append(TrajectoryGroup(scenario, tuple(runs), scenario.id))
    return made


class Watched:
    """A judge whose usable answers are kept: the score at each place of a question."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.name = judge.name
        self.by_place: dict[str, list[float]] = {}

    async def ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
        """What the judge says."""
        answer = await self.judge.ask(messages, schema)
        ids = schema["properties"]["scores"]["items"]["properties"]["id"]["enum"]
        try:
            for name, verdict in read_verdicts(answer.text, ids).items():
                self.by_place.setdefault(name, []).append(verdict.score)
        except JudgeError:
            pass  # RULER counts it, and asks again
        return answer


async def measure(judge: LangChainJudge, groups: Sequence[TrajectoryGroup], votes: int) -> dict[str, Any]:
    """Accuracy and cost of a judge on the groups."""
    watched = Watched(judge)
    ruler = Ruler(
        watched,
        rubric=RUBRIC,
        votes=votes,
        token_budget=(CONTEXT - VERDICT) * 3 // 4,
        timeout=300,
        concurrency=8,
    )
    start = time.perf_counter()
    judgements = await ruler.ascore_groups(groups)
    seconds = time.perf_counter() - start
    true = list(LEVELS.values())
    in_order: list[float] = []
    right_or_wrong: list[float] = []
    by_level: dict[str, list[float]] = {level: [] for level in LEVELS}
    for group, judgement in zip(groups, judgements, strict=True):
        if judgement.unscored is not None:
            continue
        scores = [judgement.scores[run.id].score for run in group]
        in_order.append(statistics.mean(pairs_in_order(true, scores)))
        crossing = [(a, b) for a in (0, 1) for b in (2, 3)]
        right_or_wrong.append(
            statistics.mean(pairs_in_order([1.0, 0.0], [scores[a], scores[b]])[0] for a, b in crossing)
        )
        for level, score in zip(LEVELS, scores, strict=True):
            by_level[level].append(score)
    scored = len(in_order)
    return {
        "votes": votes,
        "groups": len(groups),
        "scored": scored,
        "accuracy": statistics.mean(in_order) if scored else None,
        "standard_error": statistics.stdev(in_order) / math.sqrt(scored) if scored > 1 else None,
        "right_or_wrong": statistics.mean(right_or_wrong) if scored else None,
        "mean_score": {level: statistics.mean(found) for level, found in by_level.items() if found},
        "mean_score_by_place": {p: statistics.mean(found) for p, found in sorted(watched.by_place.items())},
        "unusable_answers": sum(len(judgement.problems) for judgement in judgements),
        "first_problem": next((p for judgement in judgements for p in judgement.problems), None),
        "usage": asdict(ruler.usage),
        "seconds": seconds,
    }


@asynccontextmanager
async def served(model: str) -> AsyncIterator[tuple[str, str]]:
    """A vLLM with a model: its URL, and the model's name there."""
    from art_core.inference.vllm import VLLMEngine

    with tempfile.TemporaryDirectory() as logs:
        config = EngineConfig(max_model_len=CONTEXT, max_batch=8, start_timeout=900)
        engine = VLLMEngine(model_named(model), config, LoRAConfig(rank=4), "judge", Path(logs))
        await engine.start()
        try:
            version = PolicyVersion("judge", 0)
            await engine.publish(version, None)
            yield engine.base_url, version.name
        finally:
            await engine.close()


async def table(
    url: str, name: str, groups: Sequence[TrajectoryGroup], options: argparse.Namespace
) -> dict[str, Any]:
    """One row for each way of asking; written after each, so that a run that is cut off leaves them."""
    rows: dict[str, Any] = {}
    judge = options.judge_model or Path(model_named(options.model)).name
    for way in options.ways:
        structured, votes = WAYS[way]
        chat = ChatOpenAI(base_url=url, model=name, api_key="none", temperature=0.0, max_tokens=VERDICT)
        rows[way] = await measure(LangChainJudge(chat, structured=structured), groups, votes)
        Console().print(way, rows[way])
        if not options.quick:
            write_result("local_judge", {"judge": judge, "levels": LEVELS, "ways": rows}, {})
    return rows


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The rows as a table."""
    columns = ("votes", "groups", "scored", "accuracy", "standard_error", "right_or_wrong", "seconds")
    shown = Table("asked by", *columns)
    for way, row in rows.items():
        shown.add_row(way, *("-" if row[c] is None else f"{row[c]:.4g}" for c in columns))
    Console().print(shown)


async def main(options: argparse.Namespace) -> None:
    groups = await groups_of(prepared(), options.groups)
    if options.judge:
        rows = await table(options.judge, options.judge_model, groups, options)
    else:
        async with served(options.model) as (url, name):
            rows = await table(url, name, groups, options)
    show(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen2.5-coder-0.5b", help="hub name, directory, or a prepared model"
    )
    parser.add_argument("--judge", help="a server that runs already: its URL, ending in /v1")
    parser.add_argument("--judge-model", help="what that server calls the model")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--quick", action="store_true", help="writes nothing")
    given = parser.parse_args()
    if bool(given.judge) != bool(given.judge_model):
        parser.error("--judge and --judge-model belong together")
    asyncio.run(main(given))
