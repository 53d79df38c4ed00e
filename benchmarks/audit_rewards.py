"""Faulty and sound rewards for the audit, over made-up runs (`audit_runs`).

Invariant: a case (`audit_cases`) is a real reward function or judge at work; only its runs are made up.
"""

import math
import random
import re
from dataclasses import replace

from art_core.rewards import (
    Format,
    FuzzyMatch,
    Outcome,
    PerNode,
    Steps,
    component,
    score_trajectories,
)
from art_core.rewards.audit.answers import answer
from art_core.scoring import Reward
from art_core.types import Trajectory, TrajectoryGroup
from benchmarks.audit_cases import (
    Case,
    Make,
    correct,
    covered,
    facts,
    judged_by,
    people_of,
    scored,
    with_function,
)
from benchmarks.audit_runs import essays, teams, world
from benchmarks.ruler import Erring
from benchmarks.ruler import group as judged_group

# -- twelve faults -----------------------------------------------------------------------------------------


def constant(seed: int, groups: int, members: int) -> Case:
    """A field that is never there, with a default."""
    return with_function(lambda t: t.metrics.get("sucess", 1.0), world(seed, groups, members))


def length_hacked(seed: int, groups: int, members: int) -> Case:
    """Thoroughness, measured in characters."""

    @component
    def thorough(trajectory: Trajectory) -> float:
        return min(len(answer(trajectory)) / 500, 1.0)

    return with_function(0.7 * thorough + 0.3 * facts, essays(seed, groups, members))


def length_recorded(seed: int, groups: int, members: int) -> Case:
    """The same without the function at hand."""
    return Case(length_hacked(seed, groups, members).groups)


def format_only(seed: int, groups: int, members: int) -> Case:
    """The form without the content."""
    return with_function(1.0 * Format(r"Answer: \w+\.?"), world(seed, groups, members))


def format_recorded(seed: int, groups: int, members: int) -> Case:
    """The same without the function at hand."""
    return Case(format_only(seed, groups, members).groups)


def sign_error(seed: int, groups: int, members: int) -> Case:
    """A match that is subtracted."""
    return with_function(
        0.5 * Format(r"Answer: .*") - 1.0 * FuzzyMatch("answer"), world(seed, groups, members)
    )


def sign_error_people(seed: int, groups: int, members: int) -> Case:
    """A component of one's own that is subtracted, and people who know better."""
    made = world(seed, groups, members)
    done = scored(0.5 * Format(r"Answer: .*") - 1.0 * correct, made)
    return Case(done, {"labels": people_of(done, lambda t: t.metrics["won"], seed)})


def saturated(seed: int, groups: int, members: int) -> Case:
    """Full marks for little."""
    return with_function(lambda t: min(1.0, 0.6 + 1.7 * covered(answer(t), t)), essays(seed, groups, members))


def answer_leaked(seed: int, groups: int, members: int) -> Case:
    """A prompt made from all of the scenario, the expected answer with it."""
    told = "Which town is meant by riddle {number}?\nExpected answer: {answer}\nReply with it alone."
    return Case(scored(1.0 * correct, world(seed, groups, members, prompt=told)))


def answer_anywhere(seed: int, groups: int, members: int) -> Case:
    """The expected text, wherever it stands."""
    return with_function(
        lambda t: float(t.scenario.metadata["answer"].lower() in answer(t).lower()),
        world(seed, groups, members),
    )


def nan_on_rare_input(seed: int, groups: int, members: int) -> Case:
    """A share of the words, of which there may be none."""

    def share_of_names(trajectory: Trajectory) -> float:
        words = re.findall(r"\w+", answer(trajectory))
        named = sum(word == trajectory.scenario.metadata["answer"] for word in words)
        return named / len(words) if words else math.nan

    return with_function(share_of_names, world(seed, groups, members))


def place_biased(seed: int, groups: int, members: int) -> Case:
    """A judge that reads members in their order, and likes the first ones."""
    rng = random.Random(f"place {seed}")
    made = essays(seed, groups, members)
    return Case(
        [
            group.with_trajectories(
                [
                    t.with_reward(
                        min(
                            max(covered(answer(t), t) + 0.5 * (1 - i / (members - 1)) + rng.gauss(0, 0.1), 0),
                            1.5,
                        )
                    )
                    for i, t in enumerate(group)
                ]
            )
            for group in made
        ]
    )


def place_biased_judge(seed: int, groups: int, members: int) -> Case:
    """A judge of RULER that likes the first place, asked again."""
    return judged_by(seed, groups, members, Erring(noise=0.05, bias=0.4))


def stale_verdicts(seed: int, groups: int, members: int) -> Case:
    """A cache keyed by the scenario: the second round has the first one's verdicts."""
    half = max(groups // 2, 2)
    first = judged_by(seed, half, members, Erring(noise=0.05)).groups
    again = [judged_group(n, random.Random(f"{seed} again {n}"), members)[0] for n in range(half)]
    kept = [
        replace(
            new.with_trajectories(
                [
                    replace(t.with_reward(old.reward or 0.0), id=f"{t.id}-again", metadata=old.metadata)
                    for t, old in zip(new, before, strict=True)
                ]
            ),
            id=f"{new.id}-again",
        )
        for new, before in zip(again, first, strict=True)
    ]
    return Case([*first, *kept])


def stale_judge(seed: int, groups: int, members: int) -> Case:
    """Scores of other runs, and a judge that is asked again."""
    case = judged_by(seed, groups, members, Erring(noise=0.05))
    rng = random.Random(f"stale {seed}")
    moved: list[TrajectoryGroup] = []
    for group in case.groups:
        order = list(range(members))
        rng.shuffle(order)
        moved.append(
            group.with_trajectories(
                [
                    replace(t, reward=group.trajectories[i].reward, metadata=group.trajectories[i].metadata)
                    for t, i in zip(group, order, strict=True)
                ]
            )
        )
    return Case(moved, case.options)


def stale_function(seed: int, groups: int, members: int) -> Case:
    """A function that remembers by trajectory id, over ids that are used again."""
    known: dict[str, float] = {}

    def remembered(trajectory: Trajectory) -> float:
        return known.setdefault(trajectory.id, covered(answer(trajectory), trajectory))

    score_trajectories(remembered, [t for group in essays(seed + 1000, groups, members) for t in group])
    return with_function(remembered, essays(seed, groups, members))


def wrong_scale(seed: int, groups: int, members: int) -> Case:
    """A judge's marks from 0 to 100 beside parts from 0 to 1."""
    rng = random.Random(f"scale {seed}")
    noise = {f"e{g}-{m}": rng.gauss(0, 8) for g in range(groups) for m in range(members)}

    @component
    def marks(trajectory: Trajectory) -> float:
        return 100 * covered(answer(trajectory), trajectory) + noise[trajectory.id]

    @component
    def brief(trajectory: Trajectory) -> float:
        return float(len(answer(trajectory)) < 400)

    return with_function(0.5 * marks + 0.5 * brief, essays(seed, groups, members))


def failures_scored(seed: int, groups: int, members: int) -> Case:
    """An agent whose server times out, and a reward that turns every error into a zero."""
    rng = random.Random(f"failures {seed}")
    made: list[TrajectoryGroup] = []
    for group in world(seed, groups, members):
        runs: list[Trajectory] = []
        for t in group:
            if rng.random() < 0.08:
                last = replace(t.steps[-1], response=None, error="APITimeoutError: no answer", tokens=None)
                t = replace(t, steps=(*t.steps[:-1], last))
            runs.append(t)
        made.append(group.with_trajectories(runs))

    def forgiving(trajectory: Trajectory) -> float:
        try:
            if trajectory.steps[-1].response is None:
                raise RuntimeError("no answer")
            found = re.search(r"(\w+)\.?\s*$", answer(trajectory))
            return float(found is not None and found.group(1) == trajectory.scenario.metadata["answer"])
        except Exception:
            return 0.0

    return Case(scored(forgiving, made))


def node_misspelt(seed: int, groups: int, members: int) -> Case:
    """A reward for a node of another name."""

    def rewarded(trajectory: Trajectory) -> Reward:
        plan = covered(str((trajectory.steps[0].response or {}).get("content")), trajectory)
        return Reward(covered(answer(trajectory), trajectory), by_node={"Planner": plan})

    return Case(scored(rewarded, teams(seed, groups, members)))


def node_of_other(seed: int, groups: int, members: int) -> Case:
    """The planner is paid for what the writer wrote."""

    def rewarded(trajectory: Trajectory) -> Reward:
        written = covered(answer(trajectory), trajectory)
        return Reward(written, by_node={"planner": written})

    return with_function(rewarded, teams(seed, groups, members))


# -- five sound rewards ------------------------------------------------------------------------------------


def right_or_wrong(seed: int, groups: int, members: int) -> Case:
    """1 for the right answer, 0 for another."""
    made = world(seed, groups, members)
    case = with_function(1.0 * correct, made)
    return replace(
        case, options={**case.options, "labels": people_of(made, lambda t: t.metrics["won"], seed)}
    )


def mixed(seed: int, groups: int, members: int) -> Case:
    """What the page on rewards mixes."""
    return with_function(
        0.8 * correct + 0.2 * Format(r"Answer: .*") - 0.01 * Steps(), world(seed, groups, members)
    )


def coverage(seed: int, groups: int, members: int) -> Case:
    """A graded reward that goes with length, because more facts take more words."""
    made = essays(seed, groups, members)
    case = with_function(1.0 * facts, made)
    return replace(
        case, options={**case.options, "labels": people_of(made, lambda t: covered(answer(t), t), seed)}
    )


def judged(seed: int, groups: int, members: int) -> Case:
    """RULER with a judge that errs a little."""
    return judged_by(seed, groups, members, Erring(noise=0.05))


def node_by_node(seed: int, groups: int, members: int) -> Case:
    """The environment's word for the whole, and each node paid for what it said."""
    rng = random.Random(f"nodes {seed}")
    made = [
        group.with_trajectories(
            [replace(t, metrics={"won": float(rng.random() < covered(answer(t), t))}) for t in group]
        )
        for group in teams(seed, groups, members)
    ]
    return with_function(Outcome("won") + 0.5 * PerNode(facts), made)


FAULTS: dict[str, tuple[tuple[str, Make, frozenset[str]], ...]] = {
    "constant": (("function", constant, frozenset({"constant"})),),
    "length-hacked": (
        ("record", length_recorded, frozenset({"follows_length"})),
        ("function", length_hacked, frozenset({"pays_for_length", "follows_length"})),
    ),
    "format-only": (
        ("record", format_recorded, frozenset({"form_only"})),
        ("function", format_only, frozenset({"form_only", "pays_for_form"})),
    ),
    "sign error": (
        ("function", sign_error, frozenset({"wrong_sign"})),
        ("people", sign_error_people, frozenset({"disagrees_with_people"})),
    ),
    "saturated": (("function", saturated, frozenset({"saturated"})),),
    "leaking the answer": (
        ("record", answer_leaked, frozenset({"answer_in_prompt"})),
        ("function", answer_anywhere, frozenset({"pays_for_listing"})),
    ),
    "NaN on rare input": (("function", nan_on_rare_input, frozenset({"breaks_on_rare_input"})),),
    "judge bias by position": (
        ("record", place_biased, frozenset({"follows_place"})),
        ("judge", place_biased_judge, frozenset({"judge_prefers_place"})),
    ),
    "stale cache": (
        ("record", stale_verdicts, frozenset({"stale_verdicts"})),
        ("judge", stale_judge, frozenset({"stale_verdicts"})),
        ("function", stale_function, frozenset({"follows_id", "stale_rewards"})),
    ),
    "component on the wrong scale": (("function", wrong_scale, frozenset({"wrong_scale"})),),
    "reward of failures 0": (("record", failures_scored, frozenset({"failures_scored"})),),
    "per-node reward on the wrong node": (
        ("record", node_misspelt, frozenset({"reward_of_nobody"})),
        ("function", node_of_other, frozenset({"reward_of_other_node"})),
    ),
}
"""Each fault with what the audit has to find it by: the record, the function, the judge, people's labels; and
the findings of which one has to be there."""

SOUND: dict[str, Make] = {
    "right or wrong": right_or_wrong,
    "mixed": mixed,
    "coverage": coverage,
    "RULER": judged,
    "node by node": node_by_node,
}
