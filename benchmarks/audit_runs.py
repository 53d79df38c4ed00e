"""Made-up runs for the audit: what a policy might have sampled, before anybody has scored it.

Invariant: runs follow from their seed alone; they are real trajectories, and only the words are made up.
"""

import random
from dataclasses import replace
from typing import Any

from art_core.rewards.audit.answers import answer
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
