from helpers.judges import FunctionJudge, perfect, quality_run, told, truth
from helpers.trajectories import a_trajectory

from art_core.rewards import Format, Price, Relevance, UserFeedback, ascore_trajectories
from art_core.rewards.labels import Labels


async def test_relevance_is_a_judges_score_under_its_own_name_and_weight() -> None:
    judge = FunctionJudge(perfect)
    relevance = Relevance(judge, price=Price(prompt=1.0, completion=1.0))
    reward = 0.5 * relevance + 0.5 * Format(r".*quality.*")
    good, bad = await ascore_trajectories(reward, [quality_run("a", 0.9), quality_run("b", 0.1)])
    assert (good.components["relevance"], bad.components["relevance"]) == (0.9, 0.1)
    assert (good.reward, bad.reward) == (0.95, 0.55)
    assert good.metrics["weight/relevance"] == 0.5
    assert (judge.calls, relevance.ruler.usage.calls) == (2, 2)


async def test_the_judge_of_relevance_is_told_to_look_at_nothing_else() -> None:
    asked: list[str] = []

    def judge(messages: object) -> str:
        asked.extend(m["content"] for m in messages)  # type: ignore[attr-defined]
        return told(truth(messages))  # type: ignore[arg-type]

    await ascore_trajectories(Relevance(FunctionJudge(judge), votes=3), [quality_run("a", 0.5)])
    assert "talks past the user" in " ".join(asked)


async def test_a_judge_that_says_nothing_leaves_a_run_unscored_and_never_at_zero() -> None:
    [run] = await ascore_trajectories(Relevance(FunctionJudge(lambda _: "well")), [quality_run("a", 0.5)])
    assert run.reward is None
    assert run.failure is not None
    assert "'relevance'" in run.failure.message


async def test_peoples_feedback_is_a_part_of_a_reward_where_there_is_some() -> None:
    runs = [a_trajectory("liked"), a_trajectory("unseen")]
    for labels in (Labels({"liked": 0.75}), {"liked": 0.75}):
        liked, unseen = await ascore_trajectories(UserFeedback(labels), runs)
        assert (liked.reward, liked.components) == (0.75, {"user_feedback": 0.75})
        assert unseen.reward is None
        assert unseen.failure is not None
        assert "nobody scored trajectory unseen" in unseen.failure.message
    _, unseen = await ascore_trajectories(2 * UserFeedback({"liked": 0.75}, otherwise=0.5), runs)
    assert unseen.reward == 1.0
