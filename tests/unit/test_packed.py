"""Tokens in the packed form, read by `art_core.packed` and written by the plugin inside vLLM."""

import asyncio
import gc
import json
import math
import subprocess
import sys
from array import array
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from art_core import packed
from art_core.capture import Asked, read_completion, says_nothing, strip
from art_core.errors import CaptureError
from art_core.inference.vllm_plugin import (
    ARGUMENTS,
    DIRECTORY,
    STATUS_PATH,
    art_vllm,
    finds_plugin,
    plugged_in,
    with_plugin,
)

PROMPT, IDS, LOGPROBS = [7, 151_000, 2], [5, 6], [-0.5, -1.25]


def sampled(*choices: tuple[int, list[int], list[float]], prompt: list[int] | None = PROMPT) -> Any:
    """What the plugin has seen of one request."""
    seen = art_vllm._Sampled()
    outputs = []
    for index, ids, logprobs in choices:
        kept = art_vllm._Logprobs()
        kept.values.extend(logprobs)
        outputs.append(SimpleNamespace(index=index, token_ids=ids, logprobs=kept))
    seen.take(SimpleNamespace(prompt_token_ids=prompt, outputs=outputs), deltas=False)
    return seen.packed()


def answer(field: Any, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    return {"choices": [{**choice, **more}], "art_tokens": field}


def test_the_two_sides_agree_on_names():
    assert (art_vllm.HEADER, art_vllm.PACKED, art_vllm.FIELD) == (packed.HEADER, packed.PACKED, packed.FIELD)
    assert art_vllm.STATUS_PATH == STATUS_PATH
    assert ARGUMENTS[1] == f"art_vllm.{art_vllm.PackedTokens.__name__}"


def test_what_one_side_packs_the_other_reads():
    found = packed.read_packed(sampled((0, IDS, LOGPROBS), (1, [9], [-2.0])), 1)
    assert found == (tuple(PROMPT), (9,), (-2.0,))


def test_packed_tokens_are_read_like_those_in_the_standard_form():
    plain = answer(
        None,
        token_ids=IDS,
        logprobs={"content": [{"token": "x", "logprob": p} for p in LOGPROBS]},
    ) | {"prompt_token_ids": PROMPT}
    (standard,) = read_completion(plain)
    (short,) = read_completion(answer(sampled((0, IDS, LOGPROBS))))
    assert short.tokens == standard.tokens
    assert short.untrainable is standard.untrainable is None


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (sampled((0, IDS, LOGPROBS[:1])), "2 token ids but 1 logprobs"),
        (sampled((0, IDS, [])), "2 token ids but 0 logprobs"),
        (sampled((0, [], [])), "the completion is empty"),
        (sampled((1, IDS, LOGPROBS)), "no token ids of choice 0 among the packed tokens"),
        (sampled((0, IDS, LOGPROBS), prompt=None), "no token ids of the prompt"),
    ],
)
def test_packed_tokens_that_are_not_all_there_are_none_and_say_why(field: Any, why: str):
    (choice,) = read_completion(answer(field))
    assert choice.tokens is None
    assert choice.untrainable == why


@pytest.mark.parametrize(
    "field", [{}, "tokens", {"prompt": "!", "choices": []} | {"choices": [{"index": 0}]}, {"choices": [3]}]
)
def test_a_field_of_another_form_is_an_error_that_shows_it(field: Any):
    with pytest.raises(CaptureError, match="expected packed tokens, found"):
        read_completion(answer(field))


def test_bytes_that_are_no_whole_numbers_are_an_error():
    field = sampled((0, IDS, LOGPROBS))
    field["choices"][0]["ids"] = "AAAA"
    with pytest.raises(CaptureError, match="expected packed tokens"):
        read_completion(answer(field))


def test_minus_infinity_is_packed_as_vllm_writes_it_and_nan_becomes_unknown():
    """C2."""
    (choice,) = read_completion(answer(sampled((0, [1, 2], [-math.inf, math.nan]))))
    assert choice.tokens is not None
    assert choice.tokens.logprobs == (-9999.0, None)


def test_clients_never_see_packed_tokens_unless_they_asked():
    body = answer(sampled((0, IDS, LOGPROBS)))
    assert "art_tokens" not in strip(body, Asked())
    assert strip(body, Asked(packed=True))["art_tokens"] == body["art_tokens"]
    assert says_nothing(strip({"object": "chat.completion.chunk", "choices": [], "art_tokens": {}}, Asked()))


# -- inside vLLM ------------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """vLLM's LogprobsLists, as far as a scheduler knows it."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, index: int, positions: int) -> "Lists":
        start = index if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[index]
        rows = slice(start, start + positions)
        return Lists(self.logprob_token_ids[rows], self.logprobs[rows], self.sampled_token_ranks[rows])


def lists(values: list[float], starts: list[int] | None = None) -> Lists:
    column = np.array(values, dtype=np.float32)[:, None]
    return Lists(np.zeros_like(column, dtype=np.int32), column, np.ones(len(values)), starts)


def request(mark: str | None) -> SimpleNamespace:
    extra = {"art_tokens": mark} if mark else None
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


class Scheduler:
    """Cuts a step's logprobs up by request as vLLM's does, and forgets requests that end."""

    def __init__(self, **requests: SimpleNamespace) -> None:
        self.requests = requests

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        logprobs = model_runner_output.logprobs
        outputs = []
        for index, (name, positions, finish) in enumerate(scheduler_output):
            new_logprobs = None
            if logprobs:
                new_logprobs = logprobs.slice_request(index, positions)
            outputs.append(SimpleNamespace(request_id=name, finish_reason=finish, new_logprobs=new_logprobs))
            if finish:
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


@pytest.fixture
def scheduler() -> type[Scheduler]:
    class Own(Scheduler):
        update_from_output = Scheduler.update_from_output

    art_vllm.keep_logprobs_until_the_end(Own)
    return Own


def test_a_marked_request_gets_its_logprobs_with_its_last_token(scheduler: type[Scheduler]):
    running = scheduler(a=request("at end"), b=request(None), c=request("at each token"))

    def step(values: list[float], finish: str | None = None, starts: list[int] | None = None) -> list[Any]:
        wide = 2 if starts else 1
        asked = [("a", wide, finish), ("b", 1, None), ("c", 1, None)]
        output = SimpleNamespace(logprobs=lists(values, starts))
        found = running.update_from_output(asked, output)[0].outputs
        assert type(output.logprobs) is Lists  # as it was
        return [None if o.new_logprobs is None else o.new_logprobs.logprobs[:, 0].tolist() for o in found]

    assert step([-1, -2, -3]) == [None, [-2], [-3]]
    assert step([-4, -5, -6, -7], starts=[0, 2, 3]) == [None, [-6], [-7]]
    assert step([-8, -2, -3], "stop") == [[-1, -4, -5, -8], [-2], [-3]]


def test_steps_without_logprobs_pass_as_they_are(scheduler: type[Scheduler]):
    running = scheduler(a=request(None))
    found = running.update_from_output([("a", 1, None)], SimpleNamespace(logprobs=None))
    assert found[0].outputs[0].new_logprobs is None


def test_a_scheduler_of_another_make_is_left_alone():
    class Other:
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            return model_runner_output.logprobs.cut(0)

    before = Other.update_from_output
    with pytest.raises(art_vllm.UnknownVLLMError, match="uses logprobs in another way"):
        art_vllm.keep_logprobs_until_the_end(Other)
    assert Other.update_from_output is before


def test_a_server_of_another_make_answers_in_the_standard_form_and_says_why():
    class Handler:
        async def create_chat_completion(self, body: Any) -> Any: ...

    engine = SimpleNamespace(generate=None)
    with pytest.raises(art_vllm.UnknownVLLMError, match="create_chat_completion has other parameters"):
        art_vllm.pack_answers(Handler(), engine)
    state = art_vllm._install(SimpleNamespace(openai_serving_chat=None, engine_client=None))
    assert state["encoding"] == "standard"
    assert state["detail"]


def test_streamed_pieces_are_the_whole_so_the_last_has_all():
    kept = art_vllm._Logprobs()
    kept.values.extend([-1.0])
    piece = kept[-1:]
    kept.values.extend([-2.0])
    piece.extend(kept[:0])
    assert list(piece.values) == [-1.0, -2.0]
    assert isinstance(kept.values, array)


class Engine:
    """Samples two tokens; says afterwards what it was asked and whether it was left early."""

    def __init__(self) -> None:
        self.params: Any = None
        self.left = False

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        self.params = sampling_params
        kept = art_vllm._Logprobs()
        try:
            for number in (1, 2):
                kept.values.append(-float(number))
                completion = SimpleNamespace(index=0, token_ids=[number], logprobs=kept)
                yield SimpleNamespace(prompt_token_ids=[9], outputs=[completion])
        finally:
            self.left = True


class Handler:
    """Answers as vLLM's chat handler does: with an object, with events, or with an error."""

    def __init__(self, engine: Any, kind: str = "events") -> None:
        self.engine = engine
        self.kind = kind

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        if self.kind == "error":
            return SimpleNamespace(error="no such model")
        params = SimpleNamespace(
            logprobs=0 if request.logprobs else None,
            extra_args=None,
            stop=request.stop,
            output_kind=SimpleNamespace(name="DELTA" if self.kind == "events" else "FINAL_ONLY"),
        )
        outputs = self.engine.generate("prompt", params, "id")
        if self.kind == "events":
            return self.events(outputs)
        return SimpleNamespace(choices=[[o async for o in outputs][-1].outputs])

    async def events(self, outputs: Any) -> Any:
        async for output in outputs:
            yield f"data: {output.outputs[0].token_ids}\n\n"
        yield "data: [DONE]\n\n"


def packing(kind: str = "events") -> tuple[Handler, Engine]:
    engine = Engine()
    handler = Handler(engine, kind)
    art_vllm.pack_answers(handler, engine)
    return handler, engine


def wish(header: str | None = "packed", **more: Any) -> tuple[Any, Any]:
    asked = {"logprobs": True, "return_token_ids": True, "stop": [], "include_reasoning": True, **more}
    headers = {} if header is None else {"x-art-tokens": header}
    return SimpleNamespace(**asked), SimpleNamespace(headers=headers)


async def test_a_streams_tokens_come_in_an_event_before_its_end():
    handler, engine = packing()
    events = [event async for event in await handler.create_chat_completion(*wish())]
    assert events[0] == "data: [1]\n\n"
    assert events[-1] == "data: [DONE]\n\n"
    chunk = json.loads(events[-2].removeprefix("data: "))
    assert packed.read_packed(chunk["art_tokens"], 0) == ((9,), (1, 2), (-1.0, -2.0))
    assert engine.params.extra_args == {"art_tokens": "at end"}


async def test_a_whole_answer_has_its_tokens_as_one_more_field():
    handler, engine = packing("whole")
    request, raw = wish(stop=["x"])
    answer = await handler.create_chat_completion(request, raw)
    assert packed.read_packed(answer.art_tokens, 0) == ((9,), (2,), (-1.0, -2.0))
    assert (request.logprobs, request.return_token_ids) == (False, None)
    # A stop string is found out in the API process, which then needs what has come so far.
    assert engine.params.extra_args == {"art_tokens": "at each token"}


async def test_an_error_stays_as_it_is():
    handler, _ = packing("error")
    assert not hasattr(await handler.create_chat_completion(*wish()), "art_tokens")


@pytest.mark.parametrize(
    "asked",
    [
        wish(header=None),
        wish(header="zipped"),
        wish(logprobs=False),
        wish(return_token_ids=None),
        wish(top_logprobs=2),
        wish(prompt_logprobs=1),
        wish(include_reasoning=False),
    ],
)
async def test_other_wishes_are_left_to_vllm(asked: tuple[Any, Any]):
    handler, engine = packing()
    before = dict(vars(asked[0]))
    events = [event async for event in await handler.create_chat_completion(*asked)]
    assert len(events) == 3
    assert vars(asked[0]) == before
    assert engine.params.extra_args is None


async def test_a_client_that_leaves_ends_the_sampling():
    handler, engine = packing()
    events = await handler.create_chat_completion(*wish())
    await anext(events)
    await events.aclose()
    # The handler's own generator lets go of the engine's when the event loop next looks.
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert engine.left


async def test_requests_at_once_do_not_see_each_others_tokens():
    handler, _ = packing()

    async def one(packs: bool) -> int:
        request = wish() if packs else wish(header=None)
        return len([event async for event in await handler.create_chat_completion(*request)])

    assert await asyncio.gather(*(one(n % 2 == 0) for n in range(20))) == [4, 3] * 10


# -- how it gets there ------------------------------------------------------------------------------------


def test_an_interpreter_finds_the_plugin_by_its_path_alone(tmp_path: Path):
    env = with_plugin({"PATH": "/usr/bin:/bin"})
    assert finds_plugin(sys.executable, env)
    wrapper = tmp_path / "python"
    wrapper.write_text(f"#!/bin/sh\nexport PYTHONPATH=/nowhere\nexec '{sys.executable}' \"$@\"\n")
    wrapper.chmod(0o755)
    assert not finds_plugin(str(wrapper), env)
    assert plugged_in([str(wrapper), "--port", "1"], {"A": "b"}) == (
        [str(wrapper), "--port", "1"],
        {"A": "b"},
    )
    arguments, env = plugged_in([sys.executable, "--port", "1"], {"A": "b"})
    assert arguments == [sys.executable, "--port", "1", *ARGUMENTS]
    assert env == with_plugin({"A": "b"})


def test_the_plugin_imports_nothing_of_ours_and_no_vllm():
    script = "import sys, art_vllm; print({m.partition('.')[0] for m in sys.modules} & {'art_core', 'vllm'})"
    ran = subprocess.run(
        [sys.executable, "-c", script], env=with_plugin({}), capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "set()"


def test_the_plugin_is_an_entry_point_that_vllm_looks_for():
    (found,) = distributions(name="art-vllm", path=[str(DIRECTORY)])
    (point,) = found.entry_points.select(group="vllm.general_plugins")
    assert point.value == "art_vllm:register"


def test_paths_and_plugins_of_the_users_are_kept():
    assert with_plugin({"PYTHONPATH": "/a"})["PYTHONPATH"] == f"{DIRECTORY}:/a"
    assert with_plugin({"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,art_vllm"
    assert "VLLM_PLUGINS" not in with_plugin({})
