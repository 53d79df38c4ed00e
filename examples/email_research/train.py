"""Train a small model to answer questions about a mailbox, and see what it knows of one it never saw.

    python examples/email_research/train.py --engine vllm --model qwen2.5-coder-0.5b --warm-start expert

The held-out inbox before; if asked for, a warm start by imitation; then GRPO on the questions of the two
other inboxes, rewarded by rules or by RULER alone; the held-out inbox in between and after.

Whatever ends the training, be it its steps, its time, a signal or a fault, the held-out inbox is asked about
afterwards. Figures are written after each step, the curve after each evaluation.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from art_core import EngineConfig, LocalBackend, LoRAConfig, Scenario, TrainableModel, TrainConfig
from art_core.errors import NothingToTrainError
from art_core.gather import FLAT, Gathered
from art_core.rewards import Ruler
from art_core.store import Store
from art_core.types import TrajectoryGroup
from art_langgraph import agather
from examples.email_research.agent import greedy_agent, sampling_agent
from examples.email_research.display import (
    Evaluation,
    TrainingStep,
    drawn,
    evaluations_table,
    part_means,
    step_line,
    steps_table,
)
from examples.email_research.imitation import expert_answers, right_answers
from examples.email_research.judging import judged, ruler_of
from examples.email_research.mailbox import prepared
from examples.email_research.options import chat_template, parse_options
from examples.email_research.rewards import rules
from examples.email_research.stopping import Stopping
from examples.options import knobs, model_named

PROJECT = "email-research"
IN_VAIN = 3
"""Batches in a row without one group that could be scored, after which something is wrong with them all."""
TRAINING, HELD_OUT = ("harbour", "museum"), "clinic"


class Training:
    """One run of the example."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.stopping = Stopping(options.minutes)
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
        self.warmed: dict[str, Any] | None = None
        self.ended: str | None = None
        self.in_vain = 0
        self.ruler: Ruler | None = None

    def _endless(self, scenarios: list[Scenario]) -> Iterator[Scenario]:
        """All questions, then all of them again in another order."""
        rng = random.Random(self.options.seed)
        while True:
            rng.shuffle(scenarios)
            yield from list(scenarios)

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
        if self.steps:
            self.curve()

    async def step(self) -> None:
        """Ask about the training inboxes, and learn from it.

        Raises:
            NothingToTrainError: nothing could be learnt from too many batches in a row.
        """
        start = time.perf_counter()
        asked = list(itertools.islice(self.order, self.options.groups))
        gathered = await self.stopping.unless_told(self.ask("sampled", asked, self.options.group_size))
        if gathered is None:
            return
        groups, unscored = list[TrajectoryGroup](gathered), 0
        if self.ruler is not None:
            with Store.open(PROJECT, self.options.out) as store:
                groups, unscored = await judged(self.ruler, groups, store)
        if not groups:
            self.console.print(
                f"step {len(self.steps) + 1}, once more with other questions: too few runs came to an end in "
                f"{len(gathered.dropped)} groups, {unscored} could not be judged"
            )
            self.in_vain += 1
            if self.in_vain == IN_VAIN:
                raise NothingToTrainError(
                    f"{IN_VAIN} batches of questions in a row taught nothing; see the record"
                )
            return
        self.in_vain = 0
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
        self.save()

    async def warm_start(self) -> None:
        """Imitate whoever `--warm-start` names.

        Raises:
            SystemExit: the model has no right answer of its own.
        """
        options, start = self.options, time.perf_counter()
        examples: Sequence[Any]
        if options.warm_start == "expert":
            with self.console.status("the expert answers"):
                examples = await expert_answers(self.mailbox, self.mailbox.scenarios(*TRAINING))
        else:
            asked = list(itertools.islice(self.order, 4 * options.groups))
            with self.console.status("the model answers"):
                tried = await self.stopping.unless_told(self.ask("sampled", asked, options.group_size))
            if tried is None:
                return
            examples = right_answers(tried)
            if not examples:
                runs = len(asked) * options.group_size
                raise SystemExit(
                    f"none of {runs} answers of the model's own was right: there is nothing to imitate; take "
                    "--warm-start expert, or a model that can do more"
                )
        with Progress(console=self.console, transient=True) as bar:
            task = bar.add_task(f"warm start on {len(examples)} runs", total=options.warm_steps)
            report = await self.model.asft(
                examples,
                batch_size=options.warm_batch,
                steps=options.warm_steps,
                learning_rate=options.warm_learning_rate,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        took = time.perf_counter() - start
        self.warmed = {"runs": len(examples), "loss": report.metrics.get("loss"), "seconds": took}
        self.console.print(
            f"warm start: {len(examples)} runs imitated in {options.warm_steps} updates, {took:.0f} s"
        )
        await self.evaluate("warm start")

    async def learn(self) -> None:
        """All GRPO steps, with the evaluations between them."""
        options, console = self.options, self.console
        while self.reason() is None:
            until = min(options.steps, len(self.steps) + (options.evaluate_every or options.steps))
            table = Live(console=console, refresh_per_second=4) if console.is_terminal else None
            with table or nullcontext():
                while len(self.steps) < until and self.reason() is None:
                    done = len(self.steps)
                    await self.step()
                    if table is not None:
                        table.update(steps_table(self.steps, options.steps))
                    elif len(self.steps) > done:  # nobody sees a table grow in a file
                        console.print(step_line(self.steps[-1], options.steps))
            await self.evaluate_after()

    def reason(self) -> str | None:
        """Why no further step should begin, or None: it would have to leave time to evaluate after it."""
        if len(self.steps) >= self.options.steps:
            return "all steps"
        latest = [s.rollout_seconds + s.train_seconds for s in self.steps[-5:]]
        return self.stopping.reason(max(latest, default=0.0) + self.evaluations[-1].seconds)

    async def evaluate_after(self) -> None:
        """Ask about the held-out inbox, unless nothing was learnt since it was last asked about."""
        if self.steps and self.evaluations[-1].step < len(self.steps):
            await self.evaluate(f"step {len(self.steps)}")

    async def teach(self) -> None:
        """Warm start and GRPO, and an evaluation also where a fault ends them."""
        try:
            if self.options.warm_start != "none" and self.stopping.reason() is None:
                await self.warm_start()
            await self.learn()
            self.ended = self.reason()
        except Exception as failure:
            self.ended = f"{type(failure).__name__}: {failure}"
            await self.evaluate_after()
            raise

    async def run(self) -> int:
        """The whole story; returns the exit status."""
        self.stopping.listen(self.console.print)
        try:
            async with AsyncExitStack() as stack:
                await self.begin(stack)
                await self.evaluate("as it comes")
                await self.teach()
                adapter = await self.model.asave_lora_adapter(self.options.out / self.model.name / "adapter")
                self.console.print(f"adapter  {adapter}")
        except SystemExit as told:
            self.ended = str(told)
            raise
        except asyncio.CancelledError:  # the second signal
            self.ended = f"{self.stopping.signal and self.stopping.signal.name}, at once"
        finally:
            self.finish()
        return 0 if self.stopping.signal is None else 128 + self.stopping.signal

    async def begin(self, stack: AsyncExitStack) -> None:
        """Start the engine, and the judge if there is one."""
        options = self.options
        engine = EngineConfig(
            kind=options.engine,
            max_model_len=options.max_model_len,
            max_batch=max(options.concurrency, 1),
            python=options.vllm_python,
            gpu_memory_utilization=options.gpu_memory_utilization,
            chat_template=chat_template(options.tool_format, self.model.config.base_model),
        )
        with self.console.status("loading the model"):
            await self.model.aregister(LocalBackend(engine=engine, root=options.out))
        await stack.enter_async_context(self.model)
        if options.reward == "ruler":
            context = options.judge_context or options.max_model_len
            named = ruler_of(self.model, options.judge, options.judge_model, context)
            self.ruler = await stack.enter_async_context(named)
        self.console.print(
            f"{Path(self.model.config.base_model).name} is ready, {self.stopping.seconds:.0f} s"
        )

    def finish(self) -> None:
        """Figures and curve, whatever there is of them."""
        options, console = self.options, self.console
        if self.evaluations:
            first, last = self.evaluations[0], self.evaluations[-1]
            console.print(f"held-out inbox: {first.correct:.1%} right before, {last.correct:.1%} after")
        if self.ended is not None:
            console.print(f"ended    after {len(self.steps)} of {options.steps} steps: {self.ended}")
        console.print(f"figures  {self.save()}\nrecord   {options.out / PROJECT}.db")
        if self.steps:
            console.print(f"curve    {self.curve()}")

    def curve(self) -> str:
        """Draw the curve; returns where it is, or why it is not."""
        path = self.options.plot or self.options.out / self.model.name / "curve.png"
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
            "seconds": self.stopping.seconds,
            "ended": self.ended,
            "options": given,
            "judge": usage,
            "warm_start": self.warmed,
            "evaluations": [asdict(e) for e in self.evaluations],
            "steps": [asdict(s) for s in self.steps],
        }
        scratch = path.with_name(f"{path.name}.new")
        scratch.write_text(json.dumps(result, indent=1))
        scratch.replace(path)
        return path


if __name__ == "__main__":
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    sys.exit(asyncio.run(Training(parse_options(), Console(width=wide)).run()))
