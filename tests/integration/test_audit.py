"""The audit beside training, and over a store, with a tiny model and a real record."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig
from art_core.errors import TrainingStoppedError
from art_core.rewards.audit import AuditReport, aaudit, audit
from art_core.rewards.feedback import prefer, rate, thumb
from art_core.rewards.labels import labels_of
from art_core.store import Event, Store
from art_langgraph import agather
from benchmarks.audit_cases import correct, scored
from benchmarks.audit_runs import world
from examples.email_research.agent import build_graph
from examples.email_research.mailbox import prepared
from examples.email_research.policies import Scripted, clueless, expert
from examples.email_research.rewards import rules

ASK = [{"role": "user", "content": "answer yes or no"}]


def registered(base_model: str, root: Path, **guardrails: object) -> TrainableModel:
    train = TrainConfig(guardrails=GuardrailConfig(**guardrails))  # type: ignore[arg-type]
    model = TrainableModel(base_model=base_model, project="p", name="agent", train=train, lora_rank=4)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=256))
    return model


@pytest.fixture
def watched(base_model: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with registered(base_model, tmp_path, audit_every=3, audit_stops=True) as model:
        yield model


def a_call(model: TrainableModel, rewards: tuple[float, ...]):
    for i, reward in enumerate(rewards):
        trajectory = model.start_trajectory()
        model.chat.completions.create(messages=ASK, max_tokens=2, seed=i)
        model.end_trajectory(trajectory, reward=reward)
    return model.train()


def events(model: TrainableModel, kind: str) -> list[Event]:
    return model._registration.store.events(kind=kind)  # type: ignore[union-attr]


def test_every_third_call_is_audited_and_a_critical_finding_ends_the_training_that_asked_for_it(
    watched: TrainableModel,
):
    kinds = [[e.kind for e in a_call(watched, (0.5, 0.5)).events] for _ in range(3)]
    assert kinds == [[], [], ["reward_audit", "training_stopped"]]
    [event] = events(watched, "reward_audit")
    assert "constant (critical)" in event.message
    [finding] = event.data["data"]["findings"]
    assert finding["name"] == "constant"
    known = {t.id for t in watched._registration.store.trajectories()}  # type: ignore[union-attr]
    assert set(finding["trajectories"]) <= known
    with pytest.raises(TrainingStoppedError, match=r"audit_stops.*constant"):
        a_call(watched, (0.0, 1.0))
    watched.resume_training()
    assert watched.train().updated


def test_an_audit_that_was_not_asked_to_stop_only_tells_and_a_sound_reward_is_not_mentioned(
    base_model: str, tmp_path: Path
):
    with registered(base_model, tmp_path, audit_every=3) as model:
        kinds = [[e.kind for e in a_call(model, (0.5, 0.5)).events] for _ in range(3)]
        assert kinds == [[], [], ["reward_audit"]]
        assert not [e for _ in range(3) for e in a_call(model, (0.0, 1.0)).events]


def test_runs_and_people_of_a_store_are_audited_as_they_were_gathered(tmp_path: Path):
    groups = scored(-1.0 * correct, world(3, 20, 6))
    with Store.open("p", tmp_path) as store:
        run = store.begin_run("agent")
        for group in groups:
            store.save_group(group, run_id=run)
            good, bad = (sorted(group, key=lambda t: t.reward or 0)[i] for i in (0, -1))
            thumb(store, good.id, up=True, author="ann")
            rate(store, bad.id, 0.1, author="ann")
            prefer(store, good.id, over=bad.id, author="bob")
        report = audit(store.trajectories(run), labels=labels_of(store.feedback(run_id=run)))
    [finding] = [f for f in report.findings if f.name == "disagrees_with_people"]
    assert "points the other way" in finding.message
    assert AuditReport.from_dict(report.as_dict()) == report


async def test_rules_of_a_real_agent_are_not_called_hacked_because_good_runs_take_more_steps(tmp_path: Path):
    """Right answers need searches and mails to be read, so reward, length and steps go together."""
    mailbox = prepared(0, tmp_path)
    questions = mailbox.scenarios("harbour")[:24]
    knows, guesses, draw = expert(questions), clueless(1), random.Random(1)
    policy = Scripted(policy=lambda m: (knows if draw.random() < 0.7 else guesses).policy(m))
    groups = await agather(
        build_graph(policy, mailbox),
        questions,
        group_size=6,
        reward=rules,
        concurrency=1,  # the draws are in one order
        progress=False,
        require_policy_calls=False,
    )
    report = await aaudit(groups, reward=rules)
    assert not report.findings, report
    assert (report.figure("steps", "rho_steps") or 0) > 0.3
    # The answer is in a tool call and in the graph's state, and the probes reach it there.
    assert report.figure("content", "kept_when_scrambled") == 0.0
    # Where even the best run of a group was poor, a list may be worth as much.
    assert (report.figure("listing", "list_is_paid") or 0.0) < 0.5
