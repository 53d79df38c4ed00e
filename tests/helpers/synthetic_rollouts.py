"""Rollouts of a made-up project: conversations of a planner, a search and a writer, encoded as rows.

Invariant: rollouts of a scenario share a few conversations, as members of real groups share prompts, so that
very many of them are made in seconds.
"""

import json
import random
from dataclasses import asdict, replace
from typing import Any

from art_core.store import codec
from art_core.store.packing import to_json
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)

NODES = ("planner", "search", "writer")
VARIANTS = 12
"""Different conversations about each scenario; rollouts of a scenario share them."""

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202egnp.exe\u202c",
    "\x1b[31mred\x1b]0;title\x07",
    "{{ 7 * 7 }} {% raw %}",
    "x" * 1_000_000,
)
"""Texts that a careless page would obey, or drown in."""

Row = dict[str, Any]


def question(n: int) -> str:
    return f"Which of the {n + 3} invoices in the mailbox was paid twice, and by whom?"


class Rollouts:
    """Rows of rollouts, made from a few encoded conversations about each scenario."""

    def __init__(self, tasks: list[Scenario], size: int, chance: random.Random, hostile: bool) -> None:
        self._tasks = tasks
        self._size = size
        self._chance = chance
        self._hostile = hostile
        self.scenario_rows = [codec.scenario_row(task) for task in tasks]
        self.pieces: dict[bytes, bytes] = {}
        self._conversations = [
            [self._conversation(task, v) for v in range(VARIANTS)] for task in range(len(tasks))
        ]
        self._made = 0

    def _conversation(self, task: int, variant: int) -> tuple[list[Row], list[Span]]:
        made = _conversation(self._tasks[task], task, variant)
        encoded = [codec.encode_step(step) for step in made]
        for step in encoded:
            self.pieces.update(step.pieces)
        return [step.row for step in encoded], _spans(made)

    def group(
        self,
        made: dict[str, list[Row]],
        number: int,
        run_id: str,
        policy: PolicyVersion,
        at: float,
        quality: float,
    ) -> None:
        """A group's rows."""
        chance = self._chance
        task = chance.randrange(len(self._tasks))
        group_id, digest = f"g-{number:06}", self.scenario_rows[task]["digest"]
        made["group"].append({"id": group_id, "run_id": run_id, "scenario": digest, "created_at": at})
        for position in range(self._size):
            name, began = f"t-{self._made:07}", at + position * 0.5
            self._made += 1
            failed = chance.random() < 0.04
            reward = None if failed else min(1.0, max(0.0, round(chance.gauss(quality, 0.25), 2)))
            conversation, traced = self._conversations[task][chance.randrange(VARIANTS)]
            if failed:
                conversation = conversation[: chance.randint(1, 2)]
            failure = self._failure() if failed else None
            made["trajectory"].append(
                {
                    "id": name,
                    "run_id": run_id,
                    "group_id": group_id,
                    "group_position": position,
                    "scenario": digest,
                    "status": (RolloutStatus.FAILED if failed else RolloutStatus.FINISHED).value,
                    "reward": reward,
                    "components": "{}" if reward is None else to_json({"correct": reward, "brevity": 0.5}),
                    "step_rewards": "{}",
                    "node_rewards": "{}",
                    "metrics": "{}",
                    "metadata": "{}",
                    "faults": "{}",
                    "failure": None if failure is None else to_json(asdict(failure)),
                    "started_at": began,
                    "duration": 3.5 + chance.random(),
                    "policy_number": policy.number,
                }
            )
            for n, row in enumerate(conversation):
                made["step"].append(
                    row
                    | {
                        "id": f"s-{name}-{n}",
                        "rollout_id": name,
                        "model": policy.name,
                        "policy_model": policy.model,
                        "policy_number": policy.number,
                        "started_at": began + n,
                    }
                )
            spans = [replace(span, started_at=began + span.started_at) for span in traced]
            made["span"].append({"rollout_id": name, "body": codec.encode_spans(spans)})
            if reward is not None:
                made["score"].append(
                    {
                        "trajectory_id": name,
                        "reward": reward,
                        "components": to_json({"correct": reward}),
                        "author": "ruler",
                        "explanation": "It names the invoice and who paid it, but not the date.",
                        "created_at": began + 5,
                    }
                )

    def _failure(self) -> Failure:
        cause = self._chance.choice(("timeout", "exception", "exception", "judge"))
        message = HOSTILE[self._made % 6] if self._hostile else f"the rollout ended by {cause}"
        return Failure(cause, message, "builtins.TimeoutError" if cause == "timeout" else None)


def _conversation(task: Scenario, number: int, variant: int) -> list[Step]:
    """Three calls: a plan, a search with a tool, an answer; they share their beginning."""
    chance = random.Random(number * 1000 + variant)
    question = str(task.inputs["question"])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You look into a mailbox and answer in one sentence."},
        {"role": "user", "content": question},
    ]
    prompt = [1, 5, 9, *range(100, 160), *(1000 + number * 7 + k for k in range(20))]
    made: list[Step] = []
    for n, node in enumerate(NODES):
        said = 12 + chance.randrange(18)
        sampled = [2000 + chance.randrange(6 if k < 4 else 400) for k in range(said)] + [2]
        logprobs = tuple(-abs(chance.gauss(0, 1.1)) for _ in sampled)
        response: dict[str, Any] = {
            "role": "assistant",
            "content": f"{node} {variant}: " + "I look at it. " * 3,
        }
        if node == "search":
            arguments = json.dumps({"query": f"invoice {variant}", "limit": 5})
            call = {
                "id": f"c{variant}",
                "type": "function",
                "function": {"name": "search", "arguments": arguments},
            }
            response = {"role": "assistant", "content": None, "tool_calls": [call]}
        made.append(
            Step(
                id=f"s-{n}",
                rollout_id="",
                messages=tuple(messages),
                model="agent@0",
                started_at=float(n),
                duration=0.4 + chance.random(),
                response=response,
                finish_reason="tool_calls" if node == "search" else "stop",
                tokens=StepTokens(tuple(prompt), tuple(sampled), logprobs),
                identity=StepIdentity(node=node, namespace=f"{node}:{n}", graph_step=n + 1),
                usage={"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
            )
        )
        messages = [*messages, response]
        prompt = [*prompt, *sampled, 7]
        if node == "search":
            result = f"[{variant} mails found] From: ana@example.org. Paid on the 3rd. " * 4
            messages = [*messages, {"role": "tool", "tool_call_id": f"c{variant}", "content": result}]
            prompt = [*prompt, *(5000 + chance.randrange(300) for _ in range(60))]
    return made


def _spans(made: list[Step]) -> list[Span]:
    found = [Span(id="p-graph", kind="chain", name="LangGraph", started_at=0.0, duration=4.0)]
    for n, step in enumerate(made):
        node = step.identity.node or ""
        common = {"node": node, "namespace": step.identity.namespace}
        found.append(
            Span(
                id=f"p-{n}",
                kind="chain",
                name=node,
                started_at=float(n),
                duration=1.0,
                parent_id="p-graph",
                **common,
            )
        )
        if node == "search":
            found.append(
                Span(
                    id=f"p-{n}-tool",
                    kind="tool",
                    name="search",
                    started_at=n + 0.5,
                    duration=0.2,
                    parent_id=f"p-{n}",
                    inputs={"query": "invoice"},
                    outputs="2 mails",
                    **common,
                )
            )
    return found


def long_trajectory(tokens: int, task: Scenario, policy: PolicyVersion, now: float) -> Trajectory:
    """A rollout with that many tokens: thirty calls, half prompt and half answer."""
    chance = random.Random(7)
    calls = 30
    each = tokens // calls // 2
    made = tuple(
        Step(
            id=f"s-long-{n}",
            rollout_id="long-rollout",
            messages=({"role": "user", "content": f"part {n} " + "word " * each},),
            model=policy.name,
            started_at=now + n,
            duration=1.0,
            response={"role": "assistant", "content": "answer " * each},
            finish_reason="stop",
            tokens=StepTokens(
                tuple(range(each)),
                tuple(chance.randrange(30_000) for _ in range(each)),
                tuple(-abs(chance.gauss(0, 1)) for _ in range(each)),
            ),
            policy=policy,
            identity=StepIdentity(node=NODES[n % 3], namespace=f"{NODES[n % 3]}:{n}", graph_step=n + 1),
        )
        for n in range(calls)
    )
    return Trajectory(
        id="long-rollout",
        scenario=task,
        steps=made,
        status=RolloutStatus.FINISHED,
        reward=0.5,
        started_at=now,
        duration=30.0,
    )
