"""What a server does besides answering, timed: a new version while others talk to it, and its sleep."""

import asyncio
import json
import statistics
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from art_core.capture import read_completion
from art_core.types import PolicyVersion
from benchmarks.serving_load import Job, Load
from benchmarks.serving_server import NAME, Server, random_adapter, used_mib

PROBE = "Say one word."


@cache
def client() -> httpx.Client:
    """Made before anything is timed."""
    return httpx.Client(timeout=120, trust_env=False)


def first_token(url: str, model: str) -> list[float | None]:
    """Ask for one token, with its logprob; returns the logprobs."""
    return list(_answer(url, model, 1).logprobs)


def _answer(url: str, model: str, tokens: int) -> Any:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROBE}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = client().post(f"{url}/chat/completions", json=body)
    answer.raise_for_status()
    (choice,) = read_completion(answer.json())
    assert choice.tokens is not None, choice.untrainable
    return choice.tokens


def publishing(
    server: Server, load: Load, job: Job, repetitions: int, directory: Path, runner: asyncio.Runner
) -> dict[str, Any]:
    """A version is published while requests run, again and again.

    Returns:
        for each: seconds from the adapter's lying on disk to the first token of its version, seconds of the
        loading alone, and by how much the slowest request that ran meanwhile was slower than the median of
        those that did not.
    """
    assert server.engine is not None
    first_token(server.url, server.models["adapter"])
    seconds: list[float] = []
    loading: list[float] = []
    delays: list[float] = []
    problems: list[str] = []
    for number in range(repetitions):
        version = PolicyVersion(NAME, 2 + number)
        adapter = random_adapter(_model_of(server), directory / f"adapter-{version.number}", version.number)
        running = load.start(replace(job, first=job.first + 100_000 * (number + 1)))
        time.sleep(1.5)  # so long that requests are in every state
        began = time.time()
        clock = time.perf_counter()
        runner.run(server.engine.publish(version, adapter))
        loading.append(time.perf_counter() - clock)
        first_token(server.url, version.name)
        seconds.append(time.perf_counter() - clock)
        ended = time.time()
        outcome = running.outcome()
        problems += outcome.problems
        meanwhile = [took for at, took, _ in outcome.requests if at < ended and at + took > began]
        others = [took for at, took, _ in outcome.requests if at > ended or at + took < began]
        if meanwhile and others:
            delays.append(max(meanwhile) - statistics.median(others))
        runner.run(server.engine.retire(version))
    return {
        "seconds": seconds,
        "loading_seconds": loading,
        "slowest_other_request_later_by": delays,
        "problems": problems,
    }


def _model_of(server: Server) -> Path:
    assert server.adapter is not None
    settings = json.loads((server.adapter / "adapter_config.json").read_text())
    return Path(settings["base_model_name_or_path"])


def sleeping(server: Server, repetitions: int) -> dict[str, Any]:
    """Sleep level 1 and waking, timed, with memory, and whether logprobs are what they were."""
    found: dict[str, Any] = {"sleep_seconds": [], "wake_seconds": [], "mib": [], "logprobs_changed_by": []}
    for _ in range(repetitions):
        before = {m: _answer(server.url, m, 16).logprobs for m in server.models.values()}
        awake = used_mib()
        clock = time.perf_counter()
        answer = client().post(f"{server.root}/sleep?level=1")
        if answer.status_code != 200:
            return {"unavailable": f"HTTP {answer.status_code} {answer.text[:200]}"}
        found["sleep_seconds"].append(time.perf_counter() - clock)
        asleep = used_mib()
        clock = time.perf_counter()
        client().post(f"{server.root}/wake_up").raise_for_status()
        found["wake_seconds"].append(time.perf_counter() - clock)
        found["mib"].append([awake, asleep, used_mib()])
        found["logprobs_changed_by"].append(
            {
                model: _largest_change(values, _answer(server.url, model, 16).logprobs)
                for model, values in before.items()
            }
        )
    return found


def _largest_change(before: tuple[float | None, ...], after: tuple[float | None, ...]) -> float:
    pairs = zip(before, after, strict=True)
    return max(abs(a - b) for a, b in pairs if a is not None and b is not None)
