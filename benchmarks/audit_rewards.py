"""Faulty and sound rewards for the audit, over made-up runs: what a policy might have sampled.

Invariant: a case follows from its seed alone. Every run is a real trajectory, scored by a real reward
function or judge; only the words are made up.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from art_core.rewards import (
    Format,
    FuzzyMatch,
    Outcome,
    PerNode,
    Ruler,
    Steps,
    component,
    score_trajectories,
)
from art_core.rewards.audit.answers import answer
from art_core.rewards.labels import Labels
from art_core.rewards.text import plain
from art_core.scoring import Reward, RewardFunction
from art_core.types import (
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)
from benchmarks.ruler import Erring
from benchmarks.ruler import group as judged_group

PLACES = [
    "Accra", "Ankara", "Athens", "Bergen", "Bogota", "Bremen", "Cairo", "Cork", "Dakar", "Delhi",
    "Dresden", "Dublin", "Fez", "Geneva", "Ghent", "Graz", "Hanoi", "Havana", "Izmir", "Jena", "Kobe",
    "Krakow", "Lagos", "Leeds", "Lima", "Lisbon", "Lyon", "Madrid", "Malmo", "Milan", "Minsk", "Nantes",
    "Naples", "Osaka", "Oslo", "Paris", "Porto", "Prague", "Quito", "Riga", "Rome", "Seoul", "Siena",
    "Sofia", "Split", "Tallinn", "Tirana", "Trieste", "Tunis", "Turin", "Utrecht", "Varna", "Vienna",
    "Vilnius", "Warsaw", "Zagreb",
]  # fmt: skip
FACTS = [
    "harbour", "cathedral", "tramway", "university", "fortress", "aqueduct", "observatory", "lighthouse",
    "theatre", "monastery", "shipyard", "vineyard", "canal", "stadium", "glassworks", "market",
]  # fmt: skip
FILL = (
    "I looked at the map once more.",
    "Several guides describe the place.",
    "The weather there is mild for most of the year.",
    "It has been written about at length.",
    "Travellers remember it well.",
    "There is more to say on this.",
    "The records go back a long way.",
    "Trains run there every hour or so.",
)


@dataclass(frozen=True)
class Case:
    """A reward to audit.

    Attributes:
        groups: scored runs.
        options: what `audit` is given beside them.
    """

    groups: list[TrajectoryGroup]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


Make = Callable[[int, int, int], Case]
"""``(seed, groups, members)``."""


def step(
    run: str, number: int, said: str, *, node: str | None = None, prompt: str = "", **changes: Any
) -> Step:
    """A call of the policy."""
    words = len(said.split()) + 1
    values: dict[str, Any] = {
        "id": f"{run}-{number}",
        "rollout_id": run,
        "messages": ({"role": "user", "content": prompt or "Which town is meant?"},),
        "model": "agent@1",
        "started_at": float(number),
        "duration": 0.5,
        "response": {"role": "assistant", "content": said},
        "finish_reason": "stop",
        "tokens": StepTokens((1, 2, 3), tuple(range(words)), (-0.5,) * words),
        "policy": PolicyVersion("agent", 1),
        "identity": StepIdentity(node=node, namespace=f"{node}:1" if node else ""),
    }
    return Step(**(values | changes))


def world(
    seed: int, groups: int, members: int, *, prompt: str = "Which town is meant by riddle {number}?"
) -> list[TrajectoryGroup]:
    """Unscored runs that guess towns: some right, some in good form, some long, some of many steps."""
    rng = random.Random(f"world {seed}")
    made: list[TrajectoryGroup] = []
    for number in range(groups):
        right = rng.choice(PLACES)
        scenario = Scenario(f"s{number}", {"question": f"riddle {number}"}, {"answer": right})
        able = rng.uniform(0.2, 0.8)
        runs: list[Trajectory] = []
        for member in range(members):
            name = f"t{number}-{member}"
            good = rng.random() < able
            guess = right if good else rng.choice([p for p in PLACES if p != right])
            form = rng.choice(["Answer: {}.", "Answer: {}.", "Answer: {}", "It is {}.", "{}"])
            # Right runs think a little longer, as they do.
            thoughts = rng.randrange(1, 4) + (rng.random() < 0.4 if good else 0)
            text = prompt.format(number=number, answer=right)
            steps = [
                step(name, i, " ".join(rng.sample(FILL, rng.randrange(1, 4))), prompt=text)
                for i in range(thoughts)
            ]
            steps.append(step(name, thoughts, form.format(guess), prompt=text))
            runs.append(
                Trajectory(
                    id=name,
                    scenario=scenario,
                    steps=tuple(steps),
                    group_id=f"g{number}",
                    status=RolloutStatus.FINISHED,
                    metrics={"won": float(good)},
                    duration=float(thoughts),
                )
            )
        made.append(TrajectoryGroup(scenario, tuple(runs), f"g{number}"))
    return made


def essays(seed: int, groups: int, members: int) -> list[TrajectoryGroup]:
    """Unscored runs that describe a town: by facts that were asked for, and by words around them."""
    rng = random.Random(f"essays {seed}")
    made: list[TrajectoryGroup] = []
    for number in range(groups):
        wanted = rng.sample(FACTS, 8)
        scenario = Scenario(f"e{number}", {"town": rng.choice(PLACES)}, {"facts": wanted})
        runs: list[Trajectory] = []
        for member in range(members):
            name = f"e{number}-{member}"
            told = rng.sample(wanted, rng.randrange(1, 8))
            parts = [f"There is a {fact}." for fact in told] + rng.choices(FILL, k=rng.randrange(0, 9))
            rng.shuffle(parts)
            text = " ".join(parts)
            run = Trajectory(
                id=name,
                scenario=scenario,
                steps=(step(name, 0, text, prompt="Describe the town."),),
                group_id=f"h{number}",
                status=RolloutStatus.FINISHED,
            )
            runs.append(run)
        made.append(TrajectoryGroup(scenario, tuple(runs), f"h{number}"))
    return made


def teams(seed: int, groups: int, members: int) -> list[TrajectoryGroup]:
    """Unscored runs of two nodes: a planner that names facts, and a writer that writes with them."""
    made: list[TrajectoryGroup] = []
    rng = random.Random(f"teams {seed}")
    for group in essays(seed, groups, members):
        runs: list[Trajectory] = []
        for t in group:
            wanted = t.scenario.metadata["facts"]
            plan = "Plan: " + ", ".join(rng.sample(wanted, rng.randrange(1, 8)))
            written = answer(t)
            steps = (
                step(t.id, 0, plan, node="planner", prompt="Plan."),
                step(t.id, 1, written, node="writer", prompt=f"Write. {plan}"),
            )
            runs.append(replace(t, steps=steps))
        made.append(group.with_trajectories(runs))
    return made


# -- rewards -----------------------------------------------------------------------------------------------


@component
def correct(trajectory: Trajectory) -> float:
    """Whether the guess is right."""
    text = answer(trajectory)
    found = re.search(r"(?:answer:|it is)\s+(\w+)\.?\s*$", text, re.IGNORECASE)
    guess = found.group(1) if found else text
    return float(plain(guess) == plain(trajectory.scenario.metadata["answer"]))


@component
def facts(trajectory: Trajectory) -> float:
    """The share of the wanted facts that are told."""
    return covered(answer(trajectory), trajectory)


def covered(text: str, trajectory: Trajectory) -> float:
    """The share of the wanted facts in a text."""
    wanted = trajectory.scenario.metadata["facts"]
    return sum(fact in text for fact in wanted) / len(wanted)


def scored(reward: RewardFunction, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups, each member scored (or failed) by the function."""
    runs = score_trajectories(reward, [t for group in groups for t in group])
    by_id = {t.id: t for t in runs}
    return [group.with_trajectories([by_id[t.id] for t in group]) for group in groups]


def with_function(reward: RewardFunction, groups: Sequence[TrajectoryGroup], **options: Any) -> Case:
    """A case in which the audit has the function, too."""
    return Case(scored(reward, groups), {"reward": reward, **options})


def people_of(groups: Sequence[TrajectoryGroup], truth: Callable[[Trajectory], float], seed: int) -> Labels:
    """What people who err now and then would say of a third of the runs."""
    rng = random.Random(f"people {seed}")
    runs = [t for group in groups for t in group if rng.random() < 0.33]
    return Labels({t.id: min(max(truth(t) + rng.gauss(0, 0.15), 0.0), 1.0) for t in runs})


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
    return _judged(seed, groups, members, Erring(noise=0.05, bias=0.4))


def stale_verdicts(seed: int, groups: int, members: int) -> Case:
    """A cache keyed by the scenario: the second round has the first one's verdicts."""
    half = max(groups // 2, 2)
    first = _judged(seed, half, members, Erring(noise=0.05)).groups
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
    case = _judged(seed, groups, members, Erring(noise=0.05))
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
    return _judged(seed, groups, members, Erring(noise=0.05))


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


def _judged(seed: int, groups: int, members: int, judge: Erring) -> Case:
    rng = random.Random(f"judged {seed}")
    made = [judged_group(number, rng, members)[0] for number in range(groups)]
    ruler = Ruler(judge)
    judgements = ruler.score_groups(made)
    done = [judgement.apply(group) for judgement, group in zip(judgements, made, strict=True)]
    return Case(done, {"ruler": Ruler(judge)})


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
