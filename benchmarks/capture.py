"""What capture costs, and whether it loses anything.

    python benchmarks/capture.py            # about four minutes on two cores; keep the machine quiet
    python benchmarks/capture.py --quick    # the same parts, small: to see that they work

One LangGraph agent calls a server without a model (its answers cost next to nothing, so what is measured is
the client), which runs in a process of its own. Ways in take turns within one run:

    stock      ChatOpenAI, nothing captured
    handler    ChatOpenAI with TrajectoryCallbackHandler, steps without tokens into the store
    chatart    ChatART, steps with tokens into the store
    gateway    ChatOpenAI through the gateway (in a process of its own too), the handler joins the tokens

Then 2,000 rollouts at once, in one process and in two; every step of theirs is read back and checked.
Times are medians over repetitions, ratios are medians of each repetition's ratio. They go to
``benchmarks/results/capture.json``.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))  # the fake server is a test's

from fakes.vllm_server import FakeVLLM
from rich.console import Console
from rich.table import Table

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.store import Store
from benchmarks import capture_agent
from benchmarks.capture_crowd import Crowd, crowd
from benchmarks.capture_ways import QUICK, Run, Sizes, compare, first_bytes, ways_in
from benchmarks.children import child
from benchmarks.environment import write_result

HERE = Path(__file__)

# -- processes -----------------------------------------------------------------------------------------


def serve_model() -> None:
    def answer(request: dict[str, Any]) -> str:
        return capture_agent.answer(request["messages"][-1]["content"])

    with FakeVLLM(answer) as server:
        print(server.base_url, flush=True)
        sys.stdin.read()


def serve_gateway(upstream: str) -> None:
    with Gateway(StaticEndpoint(upstream, capture_agent.MODEL)) as gateway:
        print(gateway.base_url, flush=True)
        sys.stdin.read()


# -- report --------------------------------------------------------------------------------------------


def ratios(
    seconds: dict[int, dict[str, list[float]]], bytes_: dict[str, list[float]], crowds: list[Crowd]
) -> dict[str, float]:
    one, two = crowds
    return {
        "chatart_vs_stock_time_c1": turn_by_turn(seconds[1], "chatart", "stock"),
        "chatart_vs_stock_calls_c32": turn_by_turn(seconds[32], "stock", "chatart"),
        "gateway_first_byte_ms": 1e3 * (_median(bytes_, "gateway") - _median(bytes_, "direct")),
        "workers2_vs_1": one.seconds / two.seconds,
        "lost_steps_2000": one.lost + two.lost,
        "misattributed_steps_2000": one.misattributed + two.misattributed,
        "memory_growth_gib_2000": (one.growth or 0) / 2**30,
    }


def turn_by_turn(seconds: dict[str, list[float]], way: str, other: str) -> float:
    """The median over repetitions of one way's time to another's: what slows a while slows both."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[other], strict=True))


BARS = {
    "chatart_vs_stock_time_c1": ("at most", 1.10),
    "chatart_vs_stock_calls_c32": ("at least", 0.90),
    "gateway_first_byte_ms": ("at most", 1.5),
    "workers2_vs_1": ("at least", 1.7),
    "lost_steps_2000": ("at most", 0),
    "misattributed_steps_2000": ("at most", 0),
    "memory_growth_gib_2000": ("at most", 1.0),
}
"""What is promised."""


def _median(samples: dict[str, list[float]], name: str) -> float:
    return statistics.median(samples[name])


def show(console: Console, seconds: dict[int, dict[str, list[float]]], found: dict[str, float]) -> None:
    calls = Table(title="Time per call (calls per second)", title_justify="left")
    calls.add_column("rollouts at once", justify="right")
    for way in seconds[1]:
        calls.add_column(way, justify="right")
    for concurrency, by_way in seconds.items():
        cells = [statistics.median(s) for s in by_way.values()]
        calls.add_row(str(concurrency), *(f"{1e3 * s:.2f} ms ({1 / s:.0f})" for s in cells))
    console.print(calls)
    bars = Table(title="Bars", title_justify="left")
    for column in ("", "measured", "bar", ""):
        bars.add_column(column)
    for name, value in found.items():
        kind, bar = BARS[name]
        held = value <= bar if kind == "at most" else value >= bar
        bars.add_row(name, f"{value:.3f}", f"{kind} {bar:g}", "[green]held" if held else "[red]missed")
    console.print(bars)


def measure(sizes: Sizes, console: Console) -> tuple[dict[str, Any], dict[str, float]]:
    """Raw figures and ratios."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, child(HERE, "model") as server:
        directory = Path(temporary)
        with child(HERE, "gateway", server) as gateway, Store.open("ways", directory) as store:
            seconds = asyncio.run(compare_all(ways_in(server, gateway, store), sizes, console))
            console.print("first bytes")
            first = asyncio.run(first_bytes({"direct": server, "gateway": gateway}, sizes.first_bytes))
        crowds: list[Crowd] = []
        for workers in (1, 2):
            console.print(f"{sizes.crowd} rollouts at once, {workers} process(es)")
            with child(HERE, "crowd", server, str(sizes.crowd), str(workers), str(directory)) as result:
                crowds.append(Crowd(**json.loads(result)))
    found = ratios(seconds, first, crowds)
    show(console, seconds, found)
    return {
        "seconds": time.perf_counter() - started,
        "load_before": load,
        "sizes": asdict(sizes),
        "seconds_per_call": seconds,
        "first_byte_seconds": first,
        "crowds": [asdict(crowd) for crowd in crowds],
    }, found


async def compare_all(
    ways: dict[str, Run], sizes: Sizes, console: Console
) -> dict[int, dict[str, list[float]]]:
    seconds: dict[int, dict[str, list[float]]] = {}
    for concurrency in sizes.repetitions:
        console.print(f"{concurrency} rollouts at once, each way")
        seconds[concurrency] = await compare(ways, concurrency, sizes)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: to see that it works; nothing is written"
    )
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)  # the processes that this one starts
    chosen = parser.parse_args()
    match chosen.part:
        case ["model"]:
            serve_model()
        case ["gateway", upstream]:
            serve_gateway(upstream)
        case ["crowd", server, rollouts, workers, directory]:
            result = asyncio.run(crowd(server, int(rollouts), int(workers), Path(directory)))
            print(json.dumps(asdict(result)), flush=True)
        case _:
            raw, found = measure(QUICK if chosen.quick else Sizes(), Console())
            if not chosen.quick:
                print(write_result("capture", raw, found))


if __name__ == "__main__":
    main()
