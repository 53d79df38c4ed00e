"""RULER as the only reward: a judge compares the runs of a question, and nobody tells it the answer."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from art_core import TrainableModel
from art_core.rewards import Ruler
from art_core.store import Store
from art_core.types import TrajectoryGroup
from art_langgraph import ChatART, LangChainJudge

RUBRIC = """\
Each run answers a question about a mailbox with the tools search, read and answer.
- Best is a run whose answer follows from mails that it has read, and from the newest one that settles the
  matter: facts change, and quotations, questions and hearsay settle nothing.
- An answer that its mails contradict or do not tell scores near 0. So does a run without an answer.
- A run that cites the mails which its answer is from scores higher than one that cites others or none.
- Of equally good answers, the one that took fewer calls scores higher. Failed tool calls cost a little."""

ANSWER_TOKENS = 1024
"""Room for the judge's verdict."""


@asynccontextmanager
async def ruler_of(
    model: TrainableModel, judge: str, judge_model: str | None, context: int
) -> AsyncIterator[Ruler]:
    """RULER with a judge by its name.

    Args:
        model: the policy; for ``local``, its own engine judges, with the weights from before training.
        judge: ``local``, ``provider:model`` as LangChain names chat models, or an OpenAI-compatible URL.
        judge_model: what a server at a URL calls its model.
        context: tokens that a local judge or one at a URL has for question and verdict.
    """
    # Four bytes to a token is a guess, and mails are full of names: leave a quarter of the room free.
    budget = (context - ANSWER_TOKENS) * 3 // 4
    if judge == "local":
        async with await model.aserve(0) as before:
            chat = ChatART(before, temperature=0.0, max_tokens=ANSWER_TOKENS)
            yield Ruler(LangChainJudge(chat), rubric=RUBRIC, token_budget=budget, concurrency=32)
    elif "://" in judge:
        if judge_model is None:
            raise SystemExit(f"--judge {judge} is a server: say which of its models with --judge-model")
        options = {"base_url": judge, "api_key": "none", "temperature": 0.0, "max_tokens": ANSWER_TOKENS}
        at = LangChainJudge(f"openai:{judge_model}", **options)
        yield Ruler(at, rubric=RUBRIC, token_budget=budget, concurrency=32)
    else:
        yield Ruler(LangChainJudge(judge, temperature=0.0), rubric=RUBRIC)


async def judged(
    ruler: Ruler, groups: Sequence[TrajectoryGroup], store: Store
) -> tuple[list[TrajectoryGroup], int]:
    """The groups with the judge's scores as rewards, and how many it could not score; those are left out."""
    judgements = await ruler.ascore_groups(groups)
    scored = [
        judgement.save(store, group)
        for judgement, group in zip(judgements, groups, strict=True)
        if judgement.unscored is None
    ]
    return scored, len(groups) - len(scored)
