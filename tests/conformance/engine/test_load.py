"""Many requests at once: batching, waiting, leaving."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from helpers.answers import EXACT, chunks_of, joined, say
from helpers.engines import EngineUnderTest
from helpers.parrot import CALL, FREE, HELLO


@contextmanager
def open_stream(engine: EngineUnderTest, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """A stream's lines while it goes on; leaving the block closes the connection."""
    with (
        httpx.Client(timeout=300) as client,
        client.stream("POST", f"{engine.base_url}/chat/completions", json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        yield answer.iter_lines()


def test_64_streams_at_once_are_each_complete(engine: EngineUnderTest) -> None:
    def ask(number: int) -> tuple[list[int], int]:
        body = engine.request(FREE, **EXACT, seed=number, max_tokens=24 + number % 5)
        chunks = chunks_of(engine, {**body, "stream_options": {"include_usage": True}}, timeout=300)
        said = joined(chunks)
        assert said.finish == "length"
        assert len(said.logprobs) == len(said.ids)
        return said.ids, chunks[-1]["usage"]["completion_tokens"]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert [len(ids) for ids, _ in answers] == [24 + number % 5 for number in range(64)]
    assert all(len(ids) == count for ids, count in answers)
    if "sampling" not in engine.lacks:
        assert len({tuple(ids) for ids, _ in answers}) == 64


def test_answers_in_company_are_the_answers_alone(engine: EngineUnderTest) -> None:
    scripts = [HELLO, CALL] * 8
    alone = [say(engine, engine.request(s, **EXACT), stream=False).ids for s in (HELLO, CALL)]
    with ThreadPoolExecutor(len(scripts)) as pool:
        together = list(
            pool.map(lambda s: say(engine, engine.request(s, **EXACT), stream=False).ids, scripts)
        )
    assert together == alone * 8


def test_a_request_that_comes_later_does_not_wait_for_the_ones_before(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    # Many times as long as the later one, which is to end first even where a client is slow to ask.
    with open_stream(engine, engine.request(FREE, max_tokens=engine.context - 200)) as lines:
        next(lines)
        ended = threading.Event()

        def read_on() -> None:
            for _ in lines:
                pass
            ended.set()

        reader = threading.Thread(target=read_on)
        reader.start()
        assert engine.ask(HELLO)["choices"][0]["message"]["content"] == HELLO.reply
        assert not ended.is_set(), "the long request had to end first"
        reader.join(timeout=120)
        assert ended.is_set()


def test_closing_the_connection_frees_the_slot(engine: EngineUnderTest) -> None:
    engine.need("slots")
    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as streams:
            for number in range(engine.slots):
                body = engine.request(FREE, seed=number, max_tokens=engine.context - 200)
                next(streams.enter_context(open_stream(engine, body)))
            waiting: Future[dict[str, Any]] = pool.submit(engine.ask, FREE, max_tokens=4, **EXACT)
        answer = waiting.result(timeout=60)
    assert len(answer["choices"][0]["token_ids"]) == 4
    # All slots are free again: as many long requests as there are slots run side by side at once.
    with ExitStack() as streams:
        for number in range(engine.slots):
            next(
                streams.enter_context(open_stream(engine, engine.request(FREE, seed=number, max_tokens=200)))
            )


def test_a_client_that_leaves_before_an_answer_frees_its_place(engine: EngineUnderTest) -> None:
    engine.need("slots")
    body = engine.request(FREE, n=engine.slots, max_tokens=engine.context - 200)
    try:
        engine.post(body, timeout=0.5)
    except httpx.ReadTimeout:
        pass
    else:
        raise AssertionError("the request was too quick to be left")
    said = say(engine, engine.request(FREE, max_tokens=4, **EXACT), stream=False)
    assert len(said.ids) == 4


def test_a_request_of_many_choices_does_not_keep_others_out(engine: EngineUnderTest) -> None:
    engine.need("slots", "turns")
    ended = 0

    def count(lines: Iterator[str]) -> None:
        nonlocal ended
        ended += sum('"finish_reason":"length"' in line for line in lines)

    crowd = engine.request(FREE, n=4 * engine.slots, max_tokens=24)
    with open_stream(engine, crowd) as lines:
        next(lines)
        reader = threading.Thread(target=count, args=(lines,))
        reader.start()
        said = say(engine, engine.request(FREE, max_tokens=2, **EXACT), stream=False)
        ended_before = ended
        reader.join(timeout=120)
    assert len(said.ids) == 2
    assert ended == 4 * engine.slots
    assert ended_before <= 2 * engine.slots, "one choice after another of the large request went first"
