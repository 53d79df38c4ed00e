"""RULER with a small local model as its judge: Qwen2.5-Coder-0.5B in a real vLLM, asked as in training.

It starts a vLLM of its own, needs 1.2 GB of weights and takes minutes on a CPU, so it runs when asked for:
``make test MODEL="smollm2 tokenizers qwen"``, or pytest's ``--qwen``. How well such a judge judges is no
matter of tests: `benchmarks/local_judge.py` measures it.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.researcher import tiny_researcher, train
from langchain_openai import ChatOpenAI

from art_core.rewards import Ruler
from art_langgraph import LangChainJudge
from benchmarks.local_judge import VERDICT, groups_of, served
from examples.email_research.judging import RUBRIC
from examples.email_research.mailbox import prepared


@pytest.fixture(scope="module")
def judge(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server's URL, and the model's name there."""
    if not request.config.getoption("--qwen"):
        pytest.skip("takes minutes on a CPU and a model of 1.2 GB: ask for it with --qwen")
    with asyncio.Runner() as runner:
        serving = served("qwen2.5-coder-0.5b")
        yield runner.run(serving.__aenter__())
        runner.run(serving.__aexit__(None, None, None))


async def test_a_small_model_scores_a_group_or_leaves_it_unscored_and_every_call_is_counted(
    judge: tuple[str, str], tmp_path: Path
) -> None:
    url, name = judge
    groups = await groups_of(prepared(0, tmp_path), 2)
    chat = ChatOpenAI(base_url=url, model=name, api_key="none", temperature=0.0, max_tokens=VERDICT)
    ruler = Ruler(LangChainJudge(chat), rubric=RUBRIC, token_budget=2600, timeout=300)
    for group, judgement in zip(groups, await ruler.ascore_groups(groups), strict=True):
        if judgement.unscored is None:
            assert set(judgement.scores) == {run.id for run in group}
            assert all(0 <= scored.score <= 1 for scored in judgement.scores.values())
        else:
            assert judgement.scores == {}
            assert judgement.problems, "it says what the judge did wrong"
        assert judgement.usage.calls in (1, 2)
    assert ruler.usage.prompt_tokens > 1000
    assert ruler.usage.completion_tokens > 0
    assert ruler.usage.untold == 0


def test_a_policy_is_trained_on_what_a_small_local_judge_says(judge: tuple[str, str], tmp_path: Path) -> None:
    url, name = judge
    policy = tiny_researcher(tmp_path / "model")
    by_judge = ("--reward", "ruler", "--judge", url, "--judge-model", name, "--judge-context", "4096")
    figures, _ = train(policy, tmp_path, tmp_path, *by_judge, seconds=900)
    (step,) = figures["steps"]
    assert 0 <= step["reward"] <= 1
    assert step["unscored"] in (0, 1)
    assert figures["judge"]["calls"] >= 2
    assert figures["judge"]["untold"] == 0
    assert [e["name"] for e in figures["evaluations"]] == ["as it comes", "step 1"]
