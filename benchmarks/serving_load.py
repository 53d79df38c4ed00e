"""Load on a server, from processes of its own: so many requests at once, each after the one before it.

One process reads jobs as lines of JSON and answers each with a line; `Load` spreads a job over several, so
that the generator is not what is measured. Requests go over `art_core.plain_http`; answers that were recorded
are read as capture reads them, and each must hold its exact tokens.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]

Way = Literal["plain", "spelled", "packed"]
"""What is asked for: the text alone; tokens as stock vLLM spells them out; tokens as our clients ask."""

SUBJECTS = ("tides", "bees", "glass", "rivers", "bread", "maps", "clocks", "salt")


@dataclass(frozen=True)
class Job:
    """What to ask of a server.

    Attributes:
        url: ending in ``/v1``.
        model: the name to ask for.
        way: see `Way`.
        concurrency: requests at once.
        rounds: requests of each of them, one after the other; 0: until the window ends.
        tokens: of each answer, exactly; in a window the mean: answers then have from half to one and a half
            times as many, so that they do not all begin and end together.
        stream: whether answers come in chunks.
        first: number of the first request; the number is in its prompt.
        ramp: seconds before the window.
        window: seconds in which tokens are counted.
        begins: `time.time` when the first request is made.
    """

    url: str
    model: str
    way: Way
    concurrency: int
    rounds: int
    tokens: int
    stream: bool = False
    first: int = 0
    ramp: float = 0.0
    window: float = 0.0
    begins: float = 0.0

    @property
    def counted(self) -> tuple[float, float]:
        """The window, in `time.time`."""
        return self.begins + self.ramp, self.begins + self.ramp + self.window

    def length(self, number: int) -> int:
        """Tokens of the answer to the request of this number."""
        if self.rounds:
            return self.tokens
        return max(1, self.tokens // 2 + number * 7919 % (self.tokens + 1))


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        tokens: sampled: in all answers, or in the window (of an answer that was under way at its ends, the
            part of its tokens that is the part of its time).
        seconds: from the first request to the last answer, or the window's length.
        requests: when each started (`time.time`), how many seconds it took, and its tokens.
        problems: what went wrong, a few of them.
        failed: requests without a right answer.
    """

    tokens: float
    seconds: float
    requests: list[tuple[float, float, int]]
    failed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Load:
    """Processes that make requests; a context manager. They have started and imported before they are used.

    Args:
        processes: how many.
    """

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.serving_load"],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for child in self._children:
            _line(child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            child.wait(30)

    def start(self, job: Job) -> "Running":
        """Begin a job; `Running.outcome` waits for its end."""
        shares = [job.concurrency // self._count] * self._count
        for number in range(job.concurrency % self._count):
            shares[number] += 1
        used: list[subprocess.Popen[str]] = []
        first = job.first
        job = replace(job, begins=time.time())
        for child, share in zip(self._children, shares, strict=True):
            if share:
                assert child.stdin is not None
                part = {**asdict(job), "concurrency": share, "first": first}
                child.stdin.write(json.dumps(part) + "\n")
                child.stdin.flush()
                used.append(child)
                first += share * (job.rounds or 1_000)
        return Running(used, job)

    def run(self, job: Job) -> Outcome:
        """Do a job."""
        return self.start(job).outcome()


class Running:
    """A job under way."""

    def __init__(self, children: Sequence["subprocess.Popen[str]"], job: Job) -> None:
        self._children = children
        self._job = job

    def outcome(self) -> Outcome:
        """Wait for its end."""
        parts = [json.loads(_line(child)) for child in self._children]
        requests = [(at, took, tokens) for part in parts for at, took, tokens in part["requests"]]
        if self._job.window:
            seconds = self._job.window
            sampled = sum(_within(self._job.counted, *request) for request in requests)
        else:
            seconds = max((at + took for at, took, _ in requests), default=time.time()) - self._job.begins
            sampled = sum(tokens for _, _, tokens in requests)
        return Outcome(
            tokens=sampled,
            seconds=seconds,
            requests=requests,
            failed=sum(part["failed"] for part in parts),
            problems=[problem for part in parts for problem in part["problems"]][:3],
        )


def _within(window: tuple[float, float], at: float, took: float, tokens: int) -> float:
    """The part of an answer's tokens that came in a window."""
    both = min(at + took, window[1]) - max(at, window[0])
    return tokens * max(0.0, both) / took


def _line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a load generator ended with status {child.wait()}")
    return line


# -- in the process that makes the requests ---------------------------------------------------------------


def request_body(job: Job, number: int) -> dict[str, Any]:
    """The request of this number."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    said = f"Request {number}. Tell me about {subject}, at length, in plain words, without a list."
    body: dict[str, Any] = {
        "model": job.model,
        "messages": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": said}],
        "max_tokens": job.length(number),
        "ignore_eos": True,
        "temperature": 1.0,
    }
    if job.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if job.way != "plain":
        body |= {"logprobs": True, "return_token_ids": True}
    return body


class _Client:
    def __init__(self, job: Job) -> None:
        from art_core.plain_http import HttpPool

        self._job = job
        parts = urlsplit(job.url)
        self._place = (parts.hostname or "", parts.port or 80)
        self._path = f"{parts.path}/chat/completions".encode()
        self._pool = HttpPool()
        self._headers = [(b"host", parts.netloc.encode()), (b"content-type", b"application/json")]
        if job.way == "packed":
            self._headers.append((b"x-art-tokens", b"packed"))
        self.failed = 0
        self.requests: list[tuple[float, float, int]] = []
        self.problems: list[str] = []

    async def work(self, slot: int) -> None:
        """One of the places that requests are made from."""
        job = self._job
        if job.rounds:
            numbers: Iterable[int] = range(job.first + slot * job.rounds, job.first + (slot + 1) * job.rounds)
        else:
            numbers = count(job.first + slot, job.concurrency)
        for number in numbers:
            at, clock = time.time(), time.perf_counter()
            if not job.rounds and at > job.counted[1]:
                return
            try:
                tokens = await self._ask(number)
                self.requests.append((at, time.perf_counter() - clock, tokens))
            except Exception as failed:
                self.failed += 1
                self.problems.append(f"{type(failed).__name__}: {failed}"[:300])

    async def _ask(self, number: int) -> int:
        from art_core.plain_http import request_bytes

        content = json.dumps(request_body(self._job, number), separators=(",", ":")).encode()
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        answer = await self._pool.send(self._place, request_bytes("POST", self._path, headers, content))
        return self._read(answer.status, await answer.read(), self._job.length(number))

    def _read(self, status: int, raw: bytes, wanted: int) -> int:
        from art_core.capture import read_completion
        from art_core.fast_json import read_json

        if status != 200:
            raise RuntimeError(f"HTTP {status}: {raw[:200]!r}")
        answer = _assembled(raw) if self._job.stream else read_json(raw)
        if self._job.way == "plain":
            return answer["usage"]["completion_tokens"]
        (choice,) = read_completion(answer)
        if choice.tokens is None or len(choice.tokens.completion) != wanted:
            raise RuntimeError(f"not recorded: {choice.untrainable}, usage {answer.get('usage')}")
        return len(choice.tokens.completion)


def _assembled(raw: bytes) -> dict[str, Any]:
    from art_core.fast_json import read_json
    from art_core.streaming import DONE, EventDecoder, StreamAssembler

    events, assembler = EventDecoder(), StreamAssembler()
    for event in (*events.feed(raw), *events.close()):
        if event != DONE:
            assembler.feed(read_json(event))
    return assembler.body()


async def _do(job: Job) -> dict[str, Any]:
    client = _Client(job)
    await asyncio.gather(*(client.work(slot) for slot in range(job.concurrency)))
    return {"requests": client.requests, "failed": client.failed, "problems": client.problems[:3]}


def main() -> None:
    import art_core.capture

    assert art_core.capture
    with asyncio.Runner() as runner:
        print("ready", flush=True)
        for line in sys.stdin:
            outcome = runner.run(_do(Job(**json.loads(line))))
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
