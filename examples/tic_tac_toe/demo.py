"""Watch a small language model learn tic-tac-toe inside a LangGraph graph, on a CPU.

    python examples/tic_tac_toe/demo.py --seed 0

Held-out games before; a warm start on a scripted random player's games, so that the model knows what
a move looks like; then GRPO on its own games against a random opponent; the same held-out games after.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from art_core import (
    EngineConfig,
    LocalBackend,
    LoRAConfig,
    ParallelConfig,
    TrainableModel,
    TrainConfig,
    alearn,
)
from art_core.learning import LearningStep
from art_core.types import Scenario, TrajectoryGroup
from art_langgraph import Workers, agather
from examples.options import knobs
from examples.tic_tac_toe.agent import greedy_agent, sampling_agent
from examples.tic_tac_toe.display import (
    Evaluation,
    TrainingStep,
    as_json,
    evaluations_table,
    replay,
    save_curves,
    steps_table,
)
from examples.tic_tac_toe.game import SYSTEM, random_player_moves, show

HELD_OUT = 1_000_000
"""The first opponent that is never trained against."""

AGENTS = {
    "sampled": "examples.tic_tac_toe.agent:sampling_agent",
    "greedy": "examples.tic_tac_toe.agent:greedy_agent",
}
"""How answers are chosen; as import paths, for worker processes."""


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="hub name or directory; default: SmolLM2-135M-Instruct from PyPI")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of another environment that has vLLM")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.3, help="share of a GPU that vLLM takes"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes scenarios, opponents and sampling seeds")
    parser.add_argument("--deterministic", action="store_true", help="the same curve twice, slower")
    parser.add_argument("--steps", type=int, default=16, help="GRPO steps")
    parser.add_argument("--warm-steps", type=int, default=20, help="supervised steps before them; 0 for none")
    parser.add_argument("--warm-learning-rate", type=float, default=5e-4)
    parser.add_argument("--opponents", type=int, default=8, help="groups in a step")
    parser.add_argument("--group-size", type=int, default=16, help="games against each opponent")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall to a tenth")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="any knob of TrainConfig, such as entropy_coef=0.02 or loss=dapo; repeat for several",
    )
    parser.add_argument(
        "--mixed-opponents",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compare games against different opponents, rather than games against the same one",
    )
    parser.add_argument(
        "--illegal-reward",
        type=float,
        default=0.0,
        help="of a game that ends by an illegal move, in training; held-out games score 0",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        metavar="STALENESS",
        help="play on while a process of its own trains, with games at most so many versions old",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that play")
    parser.add_argument(
        "--evaluate", choices=tuple(AGENTS), default="sampled", help="how held-out games are played"
    )
    parser.add_argument("--token-budget", type=int, default=1024, help="most tree nodes in one forward pass")
    parser.add_argument("--held-out", type=int, default=200, help="games to evaluate on")
    parser.add_argument("--out", type=Path, default=Path(".art"), help="where record and adapter go")
    return parser.parse_args()


def random_player_conversations(seed: int, moves: int) -> list[list[dict[str, str]]]:
    """What a player that takes any free square would have said."""
    return [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": show(board)},
            {"role": "assistant", "content": str(square)},
        ]
        for board, square in islice(random_player_moves(seed), moves)
    ]


def mixed(groups: Sequence[TrajectoryGroup], size: int) -> list[TrajectoryGroup]:
    """Games of different opponents as groups: all begin alike, and the opponent is a part of chance."""
    games = [game for group in groups for game in group]
    return [
        TrajectoryGroup(Scenario("any opponent"), tuple(games[i : i + size]))
        for i in range(0, len(games), size)
    ]


def outcomes(groups: Sequence[TrajectoryGroup]) -> list[str]:
    """How the games of some groups ended."""
    return [t.metadata["output"]["outcome"] for group in groups for t in group.scored]


class Demo:
    """One run of the demo."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.model = TrainableModel(
            base_model=options.model or str(default_model()),
            project="tic-tac-toe",
            name=f"player-{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed}",
            lora=LoRAConfig(rank=options.lora_rank, alpha=2 * options.lora_rank),
            train=self.train_config(),
            seed=options.seed,
        )
        self.agents = {"sampled": sampling_agent(self.model), "greedy": greedy_agent(self.model)}
        self.workers: Workers | int = 1
        self.steps: list[TrainingStep] = []
        self.evaluations: list[Evaluation] = []

    def train_config(self) -> TrainConfig:
        """What the options say about training."""
        options = self.options
        config = TrainConfig(
            **{
                "learning_rate": options.learning_rate,
                "advantage": "std",
                "token_budget": options.token_budget,
                **knobs(options.set),
            }
        )
        if not options.decay:
            return config
        updates = -(-options.opponents // (config.groups_per_update or options.opponents)) * config.epochs
        return config.replace(total_updates=updates * options.steps)

    async def play(
        self, opponents: Sequence[int], group_size: int, how: str = "sampled", illegal_reward: float = 0.0
    ) -> list[TrajectoryGroup]:
        """Play games against each opponent."""
        scenarios = [
            Scenario(f"opponent-{o}", inputs={"opponent": o, "illegal_reward": illegal_reward})
            for o in opponents
        ]
        return await agather(
            self.agents[how] if self.workers == 1 else AGENTS[how],
            scenarios,
            group_size=group_size,
            concurrency=256,
            reward="examples.tic_tac_toe.agent:reward",
            model=self.model,
            workers=self.workers,
            seed=self.options.seed,
            progress=False,
        )

    async def evaluate(self, name: str) -> list[TrajectoryGroup]:
        """Play the held-out games once."""
        start = time.perf_counter()
        with self.console.status(f"{self.options.held_out} held-out games, {name}"):
            opponents = range(HELD_OUT, HELD_OUT + self.options.held_out)
            groups = await self.play(opponents, 1, self.options.evaluate)
        rewards = [reward for group in groups for reward in group.rewards]
        self.evaluations.append(Evaluation.of(name, outcomes(groups), rewards, time.perf_counter() - start))
        self.console.print(evaluations_table(self.evaluations))
        return groups

    async def step(self, number: int) -> None:
        """Play a batch of games, learn from it."""
        options = self.options
        size = options.group_size
        count, games_each = (
            (options.opponents * size, 1) if options.mixed_opponents else (options.opponents, size)
        )
        first = 100_000 * options.seed + number * count
        start = time.perf_counter()
        groups = await self.play(
            range(first, first + count), games_each, illegal_reward=options.illegal_reward
        )
        if options.mixed_opponents:
            groups = mixed(groups, size)
        played = time.perf_counter()
        report = await self.model.atrain(groups)
        self.keep(groups, report.metrics, played - start, time.perf_counter() - played)

    async def learn_meanwhile(self, on_step: Callable[[], None]) -> None:
        """All steps, with games going on during training."""
        options = self.options
        first = 100_000 * options.seed

        async def group(scenario: Scenario) -> list[TrajectoryGroup]:
            opponent = scenario.inputs["opponent"]
            if options.mixed_opponents:
                games = range(opponent * options.group_size, (opponent + 1) * options.group_size)
                played = await self.play(games, 1, illegal_reward=options.illegal_reward)
                return mixed(played, options.group_size)
            return await self.play([opponent], options.group_size, illegal_reward=options.illegal_reward)

        def keep(step: LearningStep) -> None:
            self.keep(step.groups, step.report.metrics, step.wait_seconds, step.train_seconds)
            on_step()

        await alearn(
            self.model,
            group,
            (Scenario(f"opponent-{first + i}", inputs={"opponent": first + i}) for i in itertools.count()),
            groups_per_step=options.opponents,
            steps=options.steps,
            staleness=options.overlap,
            on_step=keep,
        )

    def keep(
        self,
        groups: Sequence[TrajectoryGroup],
        metrics: Mapping[str, float],
        play_seconds: float,
        train_seconds: float,
    ) -> None:
        """Note a step."""
        ended = outcomes(groups)
        self.steps.append(
            TrainingStep(
                step=len(self.steps) + 1,
                reward=metrics["reward_mean"],
                illegal_rate=ended.count("illegal") / len(ended),
                # Absent when no group had a spread of rewards, so that nothing was trained.
                kl=metrics.get("kl_old_new"),
                entropy=metrics.get("entropy"),
                clip_fraction=metrics.get("clip_fraction"),
                tokens=int(metrics["entries"]),
                play_seconds=play_seconds,
                train_seconds=train_seconds,
            )
        )

    async def run(self) -> None:
        """The whole story."""
        options, console, start = self.options, self.console, time.perf_counter()
        engine = EngineConfig(
            kind=options.engine,
            deterministic=options.deterministic,
            max_model_len=512,
            python=options.vllm_python,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_loras=max(4, (options.overlap or 0) + 2),
        )
        parallel = None if options.overlap is None else ParallelConfig()
        with console.status("loading the model"):
            await self.model.aregister(LocalBackend(engine=engine, root=options.out, parallel=parallel))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.model)
            if options.workers > 1:
                self.workers = await stack.enter_async_context(Workers(options.workers))
            program = os.path.relpath(Path(sys.executable).with_name("art-langgraph"))
            look_on = f"look on with  {program} dashboard --root {options.out} --project tic-tac-toe"
            console.print(look_on, soft_wrap=True)  # to be copied whole
            before = await self.evaluate("as it comes")
            if options.warm_steps:
                await self.warm_start()
                before = await self.evaluate("warm start")
            with Live(steps_table([], options.steps), console=console, refresh_per_second=4) as live:

                def shown() -> None:
                    self.save(time.perf_counter() - start)
                    live.update(steps_table(self.steps, options.steps))

                if options.overlap is not None:
                    await self.learn_meanwhile(shown)
                else:
                    for number in range(options.steps):
                        await self.step(number)
                        shown()
            console.print()
            after = await self.evaluate("trained")
            self.finish(before, after, time.perf_counter() - start)
            adapter = await self.model.asave_lora_adapter(options.out / self.model.name / "adapter")
            console.print(f"adapter  {adapter}\nrecord   {options.out / 'tic-tac-toe.db'}")

    async def warm_start(self) -> None:
        """Imitate a random player, so that the model knows what a move looks like."""
        options = self.options
        with Progress(console=self.console, transient=True) as bar:
            task = bar.add_task("warm start on a random player's moves", total=options.warm_steps)
            await self.model.asft(
                random_player_conversations(options.seed, 64 * options.warm_steps),
                batch_size=64,
                steps=options.warm_steps,
                learning_rate=options.warm_learning_rate,
                progress=lambda done, total: bar.update(task, completed=done),
            )

    def save(self, seconds: float) -> Path:
        """Write the figures so far, so that a run that is cut off leaves them; returns the directory."""
        out = self.options.out / self.model.name
        out.mkdir(parents=True, exist_ok=True)
        result = {
            "seed": self.options.seed,
            "seconds": seconds,
            # What a run elsewhere would be started with: no places of this machine.
            "model": Path(self.model.config.base_model).name,
            "options": {
                n: v for n, v in vars(self.options).items() if not isinstance(v, Path) and n != "model"
            },
            **as_json(self.steps, self.evaluations),
        }
        (out / "result.json").write_text(json.dumps(result, indent=1))
        return out

    def finish(
        self, before: Sequence[TrajectoryGroup], after: Sequence[TrajectoryGroup], seconds: float
    ) -> None:
        """Curves, and two games replayed."""
        out = self.save(seconds)
        label = f"seed {self.options.seed}"
        png, html = save_curves({label: (self.steps, self.evaluations)}, out, f"{seconds / 60:.1f} minutes")
        for title, groups, wanted in (
            ("before", before, ("illegal", "loss")),
            ("after", after, ("win",)),
        ):
            games = [t.metadata["output"] for g in groups for t in g.scored]
            game = next((g for o in wanted for g in games if g["outcome"] == o), games[0])
            replay(self.console, title, game["answers"], game["opponent"], game["outcome"])
        first, last = self.evaluations[-2:]
        self.console.print(
            f"mean score {last.score - first.score:+.3f} since '{first.name}', in {seconds / 60:.1f} minutes"
        )
        self.console.print(f"curves   {png}\n         {html}")


def default_model() -> Path:
    """The small model from the package registry, prepared on first use."""
    from examples.prepare_model import smollm2

    return smollm2()


if __name__ == "__main__":
    asyncio.run(Demo(parse_options(), Console()).run())
