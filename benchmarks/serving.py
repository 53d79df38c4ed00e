"""How fast a policy is served, what recording costs, and how long a new version takes.

    python benchmarks/serving.py --model DIR                    # starts a vLLM of its own
    python benchmarks/serving.py --model DIR --python PYTHON    # another environment's vLLM
    python benchmarks/serving.py --url http://HOST:PORT/v1 --served NAME [ADAPTER]
    python benchmarks/serving.py --model DIR --merged           # the same with publish="merged"
    python benchmarks/serving.py --join MERGED.json             # adds one result file to another
    python benchmarks/serving.py --small                        # no model: to see that it works
    python benchmarks/serving.py --table                        # results into docs/performance.md

Ways to ask take turns within one run, so that what slows a while slows all of them:

    plain      the text alone: the server as it is without recording
    spelled    exact token ids and logprobs as stock vLLM sends them
    packed     the same tokens as our clients get them from our server: what recording costs here
    gateway    a stock client through the gateway, which records

Requests come from processes of their own and run one after the other in each of so many places; answers are
of different lengths, so that they do not begin and end together; tokens are counted in a window in which all
places are busy. Rates are medians over repetitions, ratios are medians of each repetition's ratio. What is
known is written after every measurement.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from rich.console import Console

from art_core.config import EngineConfig
from benchmarks import serving_acts, serving_table
from benchmarks.children import child
from benchmarks.environment import RESULTS, environment
from benchmarks.serving_load import Job, Load
from benchmarks.serving_profile import Profiling, busy, hottest
from benchmarks.serving_server import (
    Server,
    encoding,
    gateways,
    gpus,
    own_vllm,
    serve_fake,
    serve_gateway,
)

WAYS = ("plain", "spelled", "packed", "gateway")
STREAMED = ", streamed"
"""Ends the name of a target whose answers come in chunks."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        tokens: of an answer, on average.
        plan: in the order of measuring: requests at once, seconds before the window, seconds in which
            tokens are counted, and repetitions.
        publishes: new versions while requests run.
        streamed: at this number of requests at once, answers that come in chunks are measured as well.
        sleeps: times that the server is put to sleep.
        processes: that make requests.
        seconds: after so long no repetition beyond the first is begun.
    """

    tokens: int = 128
    plan: tuple[tuple[int, float, float, int], ...] = (
        (256, 2.0, 4.0, 5),
        (64, 1.0, 2.5, 2),
        (1, 0.5, 1.5, 2),
        (1024, 2.0, 5.0, 1),
    )
    streamed: int = 64
    publishes: int = 3
    sleeps: int = 2
    processes: int = 6
    seconds: float = 200.0


SMALL = Sizes(
    tokens=16, plan=((8, 0.1, 0.3, 2), (1, 0.1, 0.2, 1)), streamed=8, publishes=0, sleeps=0, processes=2
)


@dataclass
class Record:
    """Everything that was measured, written whenever something is added.

    Attributes:
        path: the JSON file; None writes nothing.
        rates: tokens per second by concurrency, target, way; one for each repetition.
        facts: the rest.
    """

    path: Path | None
    rates: dict[int, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, concurrency: int, target: str, way: str, rate: float) -> None:
        """One measurement."""
        by_target = self.rates.setdefault(concurrency, {})
        by_target.setdefault(target, {}).setdefault(way, []).append(rate)
        self.write()

    def note(self, **facts: Any) -> None:
        """Something else that was found."""
        self.facts.update(facts)
        self.write()

    def ratios(self) -> dict[str, float]:
        """What is promised, as far as it is known."""
        return serving_table.ratios(self.rates, self.facts)

    def write(self) -> None:
        """Write all of it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        raw = {"tokens_per_second": self.rates, **self.facts}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**environment(), "ratios": self.ratios(), "raw": raw}, indent=1) + "\n")
        part.replace(self.path)


def throughput(
    server: Server, passed_on: dict[str, str], load: Load, sizes: Sizes, record: Record, console: Console
) -> None:
    """All ways to ask, for each of the server's models, at each number of requests at once."""
    until = time.monotonic() + sizes.seconds
    number = 1_000_000

    def job(target: str, way: str, concurrency: int, **how: Any) -> Job:
        nonlocal number
        number += 100_000
        model = target.removesuffix(STREAMED)
        url = passed_on[model] if way == "gateway" else server.url
        asked: Any = "plain" if way == "gateway" else way
        streamed = target.endswith(STREAMED)
        name = server.models[model]
        return Job(url, name, asked, concurrency, tokens=sizes.tokens, stream=streamed, first=number, **how)

    for concurrency, ramp, window, repetitions in sizes.plan:
        targets = [*server.models]
        if concurrency == sizes.streamed:
            targets.append(next(iter(server.models)) + STREAMED)
        turns = [(target, way) for target in targets for way in WAYS]
        for target, way in turns:  # connections, graphs, caches
            load.run(job(target, way, min(concurrency, 64), rounds=1))
        for repetition in range(repetitions):
            if repetition and time.monotonic() > until:
                break
            for target, way in turns if repetition % 2 == 0 else reversed(turns):
                if way == "spelled" and (repetition > 1 or (concurrency > 256 and target != targets[0])):
                    continue  # by far the slowest, and not what is promised
                outcome = load.run(job(target, way, concurrency, rounds=0, ramp=ramp, window=window))
                if outcome.failed:
                    problem = f"{outcome.failed} requests failed: {outcome.problems}"
                    record.note(problems=[*record.facts.get("problems", ()), f"{target} {way}: {problem}"])
                    console.print(f"[red]{concurrency:5d} {target} {way}: {problem}")
                    continue
                record.add(concurrency, target, way, outcome.rate)
                took = f"{outcome.rate:9,.0f} tokens/s  {len(outcome.requests):5d} requests"
                console.print(f"{concurrency:5d} at once  {target:14s} {way:8s} {took}")


@contextmanager
def server_of(
    chosen: argparse.Namespace, directory: Path, runner: asyncio.Runner, say: Any
) -> Iterator[Server]:
    """The server that was asked for."""
    if chosen.small:
        with child(Path(__file__), "serve-fake") as url:
            yield Server(url, {"base": "fake@0"})
    elif chosen.url:
        yield Server(chosen.url, dict(zip(("base", "adapter"), chosen.served, strict=False)))
    else:
        config = EngineConfig(
            kind="vllm",
            python=chosen.python,
            max_batch=chosen.max_batch,
            max_model_len=2048,
            gpu_memory_utilization=chosen.gpu_memory,
            publish="merged" if chosen.merged else "adapter",
            start_timeout=900,
            extra_args=tuple(chosen.engine_arg),
        )
        with own_vllm(chosen.model, config, directory, say, runner) as server:
            yield server


def measure(chosen: argparse.Namespace, sizes: Sizes, console: Console) -> Record:
    """Everything, one after the other."""
    record = Record(chosen.out)
    record.note(
        load_before=os.getloadavg()[0], gpus=gpus(), engine_arguments=chosen.engine_arg, tokens=sizes.tokens
    )
    started = time.perf_counter()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(asyncio.Runner())
        profiling = None
        if chosen.profile:
            profiling = Profiling(chosen.profile, chosen.python or Path(sys.executable))
            chosen.python = profiling.python
        load = stack.enter_context(Load(sizes.processes))
        server = stack.enter_context(server_of(chosen, directory, runner, console.print))
        if chosen.title:
            server.facts["model"] = chosen.title
        record.note(**{"merged_server" if chosen.merged else "server": server.facts})
        record.note(encoding=encoding(server.root))
        console.print(f"ready: {server.facts} {record.facts['encoding']}")
        if profiling is not None:
            profile(server, load, sizes, profiling, console)
            return record
        most = max(concurrency for concurrency, *_ in sizes.plan)
        passed_on = stack.enter_context(gateways(server, most))
        throughput(server, passed_on, load, sizes, record, console)
        if server.engine is not None and not chosen.merged:
            acts(server, load, sizes, record, directory, runner, console)
        record.note(seconds=time.perf_counter() - started)
    return record


def acts(
    server: Server,
    load: Load,
    sizes: Sizes,
    record: Record,
    directory: Path,
    runner: asyncio.Runner,
    console: Console,
) -> None:
    """New versions and sleep; one that fails is noted, and the rest is measured all the same."""
    busy = min(64, max(concurrency for concurrency, *_ in sizes.plan))
    job = Job(server.url, server.models["adapter"], "packed", busy, 6, sizes.tokens)
    todo: dict[str, Any] = {
        "publishing": lambda: serving_acts.publishing(server, load, job, sizes.publishes, directory, runner),
        "sleeping": lambda: serving_acts.sleeping(server, sizes.sleeps),
    }
    for name, act in todo.items():
        try:
            found = act()
        except Exception as failed:
            found = {"failed": f"{type(failed).__name__}: {failed}"}
        record.note(**{name: found})
        console.print(f"{name}: {found}", markup=False)


def profile(server: Server, load: Load, sizes: Sizes, profiling: Profiling, console: Console) -> None:
    """Where the server's processes spend their time, for each way to ask."""
    concurrency = sizes.plan[0][0]
    for way in ("plain", "spelled", "packed"):
        job = Job(server.url, server.models["base"], way, concurrency, 0, sizes.tokens, ramp=1.0, window=5.0)
        load.run(replace(job, window=0.0))
        with profiling.label(way):
            outcome = load.run(job)
        console.print(f"{way}: {outcome.rate:,.0f} tokens/s, {outcome.failed} failed")
    for samples in profiling.samples():
        console.print(f"\n{samples.name}: threads at work {busy(samples)}; functions: itself, with callees")
        for name, itself, below in hottest(samples):
            console.print(f"{itself:7d} {below:7d}  {name}", markup=False)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="directory of the base model")
    parser.add_argument("--title", help="the model's name in the tables; default: the directory's")
    parser.add_argument("--python", type=Path, help="interpreter of another environment that has vLLM")
    parser.add_argument("--url", help="a server that runs already, ending in /v1")
    parser.add_argument("--served", nargs="+", default=[], help="its names of the base model and an adapter")
    parser.add_argument("--merged", action="store_true", help="serve the adapter folded into the weights")
    parser.add_argument("--join", type=Path, help="add the figures of this file to those of --out")
    parser.add_argument(
        "--small", action="store_true", help="against a server without a model; writes nothing"
    )
    parser.add_argument(
        "--table", action="store_true", help="write the results' tables into docs/performance.md"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.json", help="the JSON file")
    parser.add_argument("--concurrency", type=int, nargs="+", help="requests at once; default 256 64 1 1024")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens, help="of each answer")
    parser.add_argument("--seconds", type=float, default=Sizes.seconds, help="for throughput, about")
    parser.add_argument("--max-batch", type=int, default=1024, help="EngineConfig.max_batch")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="EngineConfig.gpu_memory_utilization")
    parser.add_argument("--engine-arg", action="append", default=[], help="one more argument of vLLM; repeat")
    parser.add_argument(
        "--profile", type=Path, help="only sample where vLLM spends its time, into this folder"
    )
    chosen = parser.parse_args(arguments)
    if chosen.small:
        chosen.out = None
    elif not (chosen.table or chosen.join or chosen.url or chosen.model):
        parser.error("say what to measure: --model, --url or --small")
    if chosen.url and not chosen.served:
        parser.error("--url needs --served: the name of the base model, and of an adapter if there is one")
    return chosen


def sizes_of(chosen: argparse.Namespace) -> Sizes:
    if chosen.small:
        return SMALL
    plan = {c: (c, *rest) for c, *rest in Sizes.plan}
    asked = chosen.concurrency or list(plan)
    return Sizes(
        tokens=chosen.tokens,
        plan=tuple(plan.get(c, (c, 1.0, 3.0, 2)) for c in asked),
        seconds=chosen.seconds,
    )


def main() -> None:
    match sys.argv[1:]:  # the processes that this one starts
        case ["serve-fake"]:
            return serve_fake()
        case ["serve-gateway", url, model, connections]:
            return serve_gateway(url, model, int(connections))
        case arguments:
            chosen = parsed(arguments)
    console = Console()
    if chosen.table:
        print(serving_table.into_docs(chosen.out))
        return
    if chosen.join:
        print(serving_table.join(chosen.out, chosen.join))
        return
    record = measure(chosen, sizes_of(chosen), console)
    if record.rates:
        serving_table.show(console, record.rates, record.ratios())
    if record.path is not None:
        print(record.path)


if __name__ == "__main__":
    main()
