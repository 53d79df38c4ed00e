"""Train a small model to answer questions about a mailbox, and see what it knows of one it never saw.

    python examples/email_research/train.py --engine vllm --model qwen2.5-coder-0.5b --warm-start expert

The held-out inbox before; if asked for, a warm start by imitation; then GRPO on the questions of the two
other inboxes, rewarded by rules or by RULER alone; the held-out inbox in between and after.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from art_core import EngineConfig, LocalBackend, LoRAConfig, Scenario, TrainableModel, TrainConfig
from art_core.gather import FLAT, Gathered
from art_core.rewards import Ruler
from art_core.store import Store
from art_core.training.sft import Conversation
from art_core.types import TrajectoryGroup
from art_langgraph import agather
from examples.email_research.agent import MOST_TOKENS, build_graph, greedy_agent, sampling_agent
from examples.email_research.display import (
    Evaluation,
    TrainingStep,
    drawn,
    evaluations_table,
    part_means,
    steps_table,
)
from examples.email_research.judging import judged, ruler_of
from examples.email_research.mailbox import prepared
from examples.email_research.policies import expert
from examples.email_research.rewards import rules
from examples.options import PREPARED, knobs, model_named

PROJECT = "email-research"
IN_VAIN = 3
"""Batches in a row without one group that could be scored, after which something is wrong with them all."""
TRAINING, HELD_OUT = ("harbour", "museum"), "clinic"


def parse_options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="qwen2.5-coder-0.5b", help=f"hub name, directory, or one of {', '.join(PREPARED)}"
    )
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of another environment that has vLLM")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.3, help="share of a GPU that vLLM takes"
    )
    parser.add_argument("--max-model-len", type=int, default=6144, help="tokens of the longest run")
    parser.add_argument("--max-tokens", type=int, default=MOST_TOKENS, help="sampled in one turn")
    parser.add_argument("--seed", type=int, default=0, help="of the order of questions and of sampling")
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps; 0: evaluate (and warm up) alone")
    parser.add_argument("--minutes", type=float, help="begin no further step after so many minutes")
    parser.add_argument("--groups", type=int, default=8, help="questions in a step")
    parser.add_argument("--group-size", type=int, default=8, help="runs of each question")
    parser.add_argument("--concurrency", type=int, default=64, help="runs at the same time")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument(
        "--token-budget", type=int, help="most tree nodes in one forward pass; default: measured"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="any knob of TrainConfig"
    )
    parser.add_argument(
        "--warm-start",
        choices=("none", "expert", "own"),
        default="none",
        help="imitate a scripted expert, or the model's own right answers (rejection sampling)",
    )
    parser.add_argument("--warm-steps", type=int, default=12, help="supervised steps")
    parser.add_argument("--warm-batch", type=int, default=64, help="answers that each of them imitates")
    parser.add_argument("--warm-learning-rate", type=float, default=2e-4)
    parser.add_argument("--reward", choices=("rules", "ruler"), default="rules")
    parser.add_argument(
        "--judge", default="local", help="local, provider:model, or a server's URL ending in /v1"
    )
    parser.add_argument("--judge-model", help="what a server's model is called")
    parser.add_argument("--judge-context", type=int, help="tokens of its context; default: --max-model-len")
    parser.add_argument("--held-out", type=int, default=100, help="questions about the held-out inbox")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps; 0: before and after alone")
    parser.add_argument("--evaluate", choices=("greedy", "sampled"), default="greedy")
    parser.add_argument("--out", type=Path, default=Path(".art"), help="where record and adapter go")
    parser.add_argument("--plot", type=Path, help="the curve; default: in --out")
    parser.add_argument("--json", type=Path, help="all figures; default: in --out")
    return parser.parse_args(given)


class Training:
    """One run of the example."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.began = time.perf_counter()
        named = {} if options.token_budget is None else {"token_budget": options.token_budget}
        self.model = TrainableModel(
            base_model=model_named(options.model),
            project=PROJECT,
            name=f"researcher-{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed}",
            lora=LoRAConfig(rank=options.lora_rank, alpha=2 * options.lora_rank),
            train=TrainConfig(
                **{"learning_rate": options.learning_rate, "advantage": "std", **named, **knobs(options.set)}
            ),
            seed=options.seed,
        )
        self.mailbox = prepared()
        self.agents = {
            how: agent(
                self.model, self.mailbox, max_tokens=options.max_tokens, max_connections=options.concurrency
            )
            for how, agent in (("sampled", sampling_agent), ("greedy", greedy_agent))
        }
        self.held_out = self.mailbox.scenarios(HELD_OUT)[: options.held_out]
        self.order = self._endless(self.mailbox.scenarios(*TRAINING))
        self.steps: list[TrainingStep] = []
        self.evaluations: list[Evaluation] = []
        self.in_vain = 0
        self.ruler: Ruler | None = None

    def _endless(self, scenarios: list[Scenario]) -> Iterator[Scenario]:
        """All questions, then all of them again in another order."""
        rng = random.Random(self.options.seed)
        while True:
            rng.shuffle(scenarios)
            yield from list(scenarios)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.began

    async def ask(self, how: str, scenarios: Sequence[Scenario], group_size: int) -> Gathered:
        """Runs of the agent, rewarded by the rules."""
        return await agather(
            self.agents[how],
            scenarios,
            group_size=group_size,
            concurrency=self.options.concurrency,
            reward=rules,
            model=self.model,
            seed=1000 * self.options.seed + len(self.steps),
            min_group_size=0 if group_size == 1 else None,
            progress=False,
        )

    async def evaluate(self, name: str) -> None:
        """Ask about the held-out inbox."""
        start = time.perf_counter()
        with self.console.status(f"{len(self.held_out)} held-out questions, {name}"):
            groups = await self.ask(self.options.evaluate, self.held_out, 1)
        took = time.perf_counter() - start
        self.evaluations.append(Evaluation.of(name, len(self.steps), groups, len(groups.failed), took))
        self.console.print(evaluations_table(self.evaluations))
        self.save()

    async def step(self) -> bool:
        """Ask about the training inboxes, and learn from it; False when there was nothing to learn from."""
        start = time.perf_counter()
        gathered = await self.ask(
            "sampled", list(itertools.islice(self.order, self.options.groups)), self.options.group_size
        )
        groups, unscored = list[TrajectoryGroup](gathered), 0
        if self.ruler is not None:
            with Store.open(PROJECT, self.options.out) as store:
                groups, unscored = await judged(self.ruler, groups, store)
        if not groups:
            self.console.print(
                f"step {len(self.steps) + 1}, once more with other questions: too few runs came to an end in "
                f"{len(gathered.dropped)} groups, {unscored} could not be judged"
            )
            return False
        rolled = time.perf_counter()
        report = await self.model.atrain(groups)
        runs = [run for group in groups for run in group.scored]
        self.steps.append(
            TrainingStep(
                step=len(self.steps) + 1,
                reward=sum(run.reward or 0.0 for run in runs) / len(runs),
                **part_means(runs),
                flat=sum(max(group.rewards) - min(group.rewards) <= FLAT for group in groups),
                unscored=unscored,
                kl=report.metrics.get("kl_old_new"),
                entropy=report.metrics.get("entropy"),
                tokens=int(report.metrics["entries"]),
                rollout_seconds=rolled - start,
                train_seconds=time.perf_counter() - rolled,
            )
        )
        return True

    async def warm_start(self) -> None:
        """Imitate whoever `--warm-start` names."""
        options = self.options
        asked = self.mailbox.scenarios(*TRAINING)
        examples: list[Any] = []
        if options.warm_start == "expert":
            graph = build_graph(expert(asked), self.mailbox)
            shown = await agather(
                graph, asked, group_size=1, reward=rules, require_policy_calls=False, progress=False
            )
            for run in (run for group in shown for run in group.scored if run.components["correct"] == 1.0):
                last = run.steps[-1]
                assert last.response is not None
                examples.append(Conversation((*last.messages, last.response), last.tools))
        else:
            tried = await self.ask("sampled", asked[: 4 * options.groups], options.group_size)
            examples = [run for group in tried for run in group.scored if run.components["correct"] == 1.0]
        if not examples:
            raise SystemExit("the model gave no right answer of its own to imitate; take --warm-start expert")
        with Progress(console=self.console, transient=True) as bar:
            task = bar.add_task(f"warm start on {len(examples)} runs", total=options.warm_steps)
            await self.model.asft(
                examples,
                batch_size=options.warm_batch,
                steps=options.warm_steps,
                learning_rate=options.warm_learning_rate,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )

    async def learn(self) -> None:
        """All GRPO steps, with the evaluations between them."""
        options = self.options
        while len(self.steps) < options.steps and not self.late:
            until = options.steps if not options.evaluate_every else len(self.steps) + options.evaluate_every
            with Live(
                steps_table(self.steps, options.steps), console=self.console, refresh_per_second=4
            ) as live:
                while len(self.steps) < min(until, options.steps) and not self.late:
                    self.in_vain = 0 if await self.step() else self.in_vain + 1
                    if self.in_vain == IN_VAIN:
                        raise SystemExit(
                            f"{IN_VAIN} batches of questions in a row taught nothing; see the record"
                        )
                    self.save()
                    live.update(steps_table(self.steps, options.steps))
            await self.evaluate(f"step {len(self.steps)}")

    @property
    def late(self) -> bool:
        """Whether the time that was given is over."""
        return self.options.minutes is not None and self.seconds > 60 * self.options.minutes

    async def run(self) -> None:
        """The whole story."""
        options, console = self.options, self.console
        engine = EngineConfig(
            kind=options.engine,
            max_model_len=options.max_model_len,
            max_batch=max(options.concurrency, 1),
            python=options.vllm_python,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
        with console.status("loading the model"):
            await self.model.aregister(LocalBackend(engine=engine, root=options.out))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.model)
            if options.reward == "ruler":
                context = options.judge_context or options.max_model_len
                named = ruler_of(self.model, options.judge, options.judge_model, context)
                self.ruler = await stack.enter_async_context(named)
            await self.evaluate("as it comes")
            if options.warm_start != "none":
                await self.warm_start()
                await self.evaluate("warm start")
            await self.learn()
            adapter = await self.model.asave_lora_adapter(options.out / self.model.name / "adapter")
        first, last = self.evaluations[0], self.evaluations[-1]
        console.print(f"held-out inbox: {first.correct:.1%} right before, {last.correct:.1%} after")
        console.print(f"adapter  {adapter}\nfigures  {self.save()}\nrecord   {options.out / PROJECT}.db")
        if self.steps:
            path = options.plot or options.out / self.model.name / "curve.png"
            console.print(f"curve    {self.curve(path)}")

    def curve(self, path: Path) -> str:
        """Draw the curve; returns where it is, or why it is not."""
        try:
            return str(drawn(self.save(), path))
        except ImportError as missing:  # the figures are what a GPU was rented for
            return f"none here ({missing}); elsewhere: display.py {self.save()} curve.png"

    def save(self) -> Path:
        """Write the figures so far, so that a run that is cut off leaves them; returns the file."""
        path = self.options.json or self.options.out / self.model.name / "result.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # What a run elsewhere would be started with: no places of this machine.
        given = {
            n: v
            for n, v in vars(self.options).items()
            if not isinstance(v, Path) and n not in ("model", "judge")
        }
        usage = None if self.ruler is None else asdict(self.ruler.usage)
        result = {
            "model": Path(self.model.config.base_model).name,
            "seconds": self.seconds,
            "options": given,
            "judge": usage,
            "evaluations": [asdict(e) for e in self.evaluations],
            "steps": [asdict(s) for s in self.steps],
        }
        path.write_text(json.dumps(result, indent=1))
        return path


if __name__ == "__main__":
    asyncio.run(Training(parse_options(), Console()).run())
