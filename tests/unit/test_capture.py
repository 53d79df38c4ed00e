import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from art_core.capture import (
    Asked,
    Call,
    failed_step,
    read_completion,
    request_extras,
    says_nothing,
    steps_from,
    strip,
    superseded,
    usage_of,
)
from art_core.errors import CaptureError
from art_core.streaming import DONE, EventDecoder, StreamAssembler
from art_core.types import PolicyVersion, Step, StepIdentity

POLICY = PolicyVersion("m", 3)


def entries(*values: Any) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": v, "bytes": [], "top_logprobs": []} for v in values]}


def body(**choice: Any) -> dict[str, Any]:
    first = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab", "tool_calls": [], "refusal": None},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": entries(-0.5, -0.25),
        **choice,
    }
    return {"model": "m@3", "prompt_token_ids": [9, 8, 7], "choices": [first]}


def call(**request: Any) -> Call:
    return Call(
        request={"model": "m@3", "messages": [{"role": "user", "content": "hi"}], **request},
        rollout_id="t-1",
        policy=POLICY,
        started_at=1.0,
        duration=0.5,
    )


class TestReading:
    def test_a_completion_gives_its_message_and_exact_tokens(self):
        (choice,) = read_completion(body())
        assert choice.tokens is not None
        assert choice.tokens.prompt == (9, 8, 7)
        assert choice.tokens.completion == (1, 2)
        assert choice.tokens.logprobs == (-0.5, -0.25)
        assert choice.message == {"role": "assistant", "content": "ab"}
        assert choice.untrainable is None

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"token_ids": None}, "no token ids"),
            ({"token_ids": []}, "the completion is empty"),
            ({"logprobs": None}, "no logprobs"),
            ({"logprobs": entries(-0.5)}, "2 token ids but 1 logprobs"),
            ({"token_ids": ["a", "b"]}, "token ids that are no integers"),
            ({"logprobs": entries("x", "y")}, "logprobs that are no numbers"),
        ],
    )
    def test_what_is_missing_for_exact_tokens_is_named(self, changes: dict[str, Any], reason: str):
        (choice,) = read_completion(body(**changes))
        assert choice.tokens is None
        assert choice.untrainable is not None
        assert reason in choice.untrainable

    def test_a_completion_without_ids_of_its_prompt_is_not_trainable(self):
        (choice,) = read_completion({**body(), "prompt_token_ids": None})
        assert choice.tokens is None
        assert choice.untrainable == "no token ids of the prompt"

    @pytest.mark.parametrize("reason", [None, "abort", "error"])
    def test_a_completion_that_was_cut_by_the_server_is_not_trainable(self, reason: str | None):
        (choice,) = read_completion(body(finish_reason=reason))
        assert choice.untrainable is not None
        assert "did not come to its end" in choice.untrainable

    def test_null_and_nan_logprobs_are_kept_as_none(self):
        """C23."""
        (choice,) = read_completion(body(logprobs=entries(None, math.nan)))
        assert choice.tokens is not None
        assert choice.tokens.logprobs == (None, None)
        assert choice.untrainable is None

    def test_a_plain_completion_is_read_too(self):
        (choice,) = read_completion(
            {
                "choices": [
                    {
                        "text": "ab",
                        "finish_reason": "length",
                        "prompt_token_ids": [9],
                        "token_ids": [1, 2],
                        "logprobs": {"token_logprobs": [-0.5, None]},
                    }
                ]
            }
        )
        assert choice.message == {"role": "assistant", "content": "ab"}
        assert choice.tokens is not None
        assert choice.tokens.logprobs == (-0.5, None)

    @pytest.mark.parametrize(
        ("garbage", "found"),
        [
            ("<html>", "'<html>'"),
            (None, "None"),
            ([], "[]"),
            ({}, "keys []"),
            ({"choices": None}, "choices None"),
            ({"error": {"message": "no room"}}, "no room"),
            ({"choices": ["x"]}, "choice 0"),
            ({"choices": [{"index": 0}]}, "keys ['index']"),
        ],
    )
    def test_garbage_is_an_error_that_says_what_was_found(self, garbage: Any, found: str):
        with pytest.raises(CaptureError) as error:
            read_completion(garbage)
        assert found in str(error.value)

    @settings(max_examples=60, deadline=None)
    @given(
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda x: (
                st.lists(x)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "choices",
                            "message",
                            "token_ids",
                            "logprobs",
                            "content",
                            "index",
                            "usage",
                            "delta",
                            "tool_calls",
                            "function",
                            "arguments",
                        ]
                    ),
                    x,
                )
            ),
        )
    )
    @example({"choices": [{"index": [None]}]})
    @example({"choices": [{"delta": {"tool_calls": [{"index": {}}]}}]})
    @example({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": [None]}}]}}]})
    def test_any_json_is_read_or_refused_and_never_crashes(self, garbage: Any):
        try:
            for choice in read_completion(garbage):
                assert choice.tokens is None or choice.tokens.completion
        except CaptureError:
            pass
        try:
            assembler = StreamAssembler()
            assembler.feed(garbage)
            assembler.body()
        except CaptureError:
            pass


class TestUsage:
    def test_the_servers_counts_are_kept(self):
        assert usage_of({"usage": {"prompt_tokens": 3, "details": None}}) == {"prompt_tokens": 3}

    def test_counts_come_from_the_ids_where_the_server_sends_none(self):
        assert usage_of({}, read_completion(body())) == {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
        }

    def test_there_are_none_without_either(self):
        assert usage_of({}, read_completion(body(token_ids=None))) == {}


class TestExtras:
    def test_what_capture_needs_is_added_to_a_chat(self):
        assert request_extras({"messages": []}) == {"logprobs": True, "return_token_ids": True}

    def test_what_the_client_asked_for_is_left_alone(self):
        assert request_extras({"messages": [], "logprobs": True, "top_logprobs": 5}) == {
            "return_token_ids": True
        }
        assert request_extras({"prompt": "x", "logprobs": 0}) == {"return_token_ids": True}

    def test_a_plain_completion_gets_a_number_of_logprobs(self):
        assert request_extras({"prompt": "x"}) == {"logprobs": 1, "return_token_ids": True}

    def test_an_answer_is_stripped_of_what_was_not_asked_for(self):
        whole = body()
        seen = strip(whole, Asked())
        assert "prompt_token_ids" not in seen
        assert "token_ids" not in seen["choices"][0]
        assert seen["choices"][0]["logprobs"] is None
        assert whole == body(), "the answer itself is not changed"

    @pytest.mark.parametrize("asked", [Asked(logprobs=True), Asked(token_ids=True)])
    def test_what_was_asked_for_stays(self, asked: Asked):
        seen = strip(body(), asked)
        assert (seen["choices"][0]["logprobs"] is not None) == asked.logprobs
        assert ("token_ids" in seen["choices"][0]) == asked.token_ids
        assert ("prompt_token_ids" in seen) == asked.token_ids

    def test_a_chunk_that_came_for_its_ids_alone_says_nothing(self):
        chunk = {"choices": [{"index": 0, "delta": {}, "token_ids": [1], "logprobs": entries(-1)}]}
        assert says_nothing(strip(chunk, Asked()))
        assert not says_nothing(strip(chunk, Asked(token_ids=True)))

    @pytest.mark.parametrize(
        "chunk",
        [
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 1}},
            {"error": {"message": "x"}},
            {"choices": [{"text": "a"}]},
        ],
    )
    def test_other_chunks_say_something(self, chunk: dict[str, Any]):
        assert not says_nothing(chunk)


class TestSteps:
    def test_a_step_holds_what_was_asked_and_what_came(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        (step,) = steps_from(call(tools=tools, temperature=0.5, stop=["x"], stream=True), body())
        assert step.messages == ({"role": "user", "content": "hi"},)
        assert step.tools == tuple(tools)
        assert step.sampling == {"temperature": 0.5, "stop": ["x"]}
        assert step.response == {"role": "assistant", "content": "ab"}
        assert (step.model, step.policy, step.finish_reason) == ("m@3", POLICY, "stop")
        assert step.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert step.trainable

    def test_choices_of_one_call_are_steps_that_share_its_id(self):
        whole = body()
        second = {**whole["choices"][0], "index": 1, "token_ids": [5], "logprobs": entries(-1)}
        steps = steps_from(call(n=2), {**whole, "choices": [whole["choices"][0], second]})
        assert len({s.call_id for s in steps}) == 1
        assert len({s.id for s in steps}) == 2
        assert [s.choice for s in steps] == [0, 1]
        assert [s.usage["completion_tokens"] for s in steps] == [2, 1]

    def test_each_prompt_of_a_plain_completion_is_the_message_of_its_choices(self):
        request = {"model": "m@3", "prompt": ["p", "q"], "n": 2}
        choices = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in range(4)]
        steps = steps_from(
            Call(request=request, rollout_id="t", policy=POLICY, started_at=0, duration=0),
            {"choices": choices},
        )
        assert [s.messages[0]["content"] for s in steps] == ["p", "p", "q", "q"]

    def test_an_answer_of_another_model_is_not_trainable(self):
        other = Call(request={"model": "gpt"}, rollout_id="t", policy=None, started_at=0, duration=0)
        (step,) = steps_from(other, body())
        assert step.untrainable == "gpt is no policy of ours"
        assert not step.trainable

    def test_a_failed_call_is_a_step_with_its_error_and_no_tokens(self):
        step = failed_step(call(), "HTTP 500: broken")
        assert (step.error, step.tokens, step.response) == ("HTTP 500: broken", None, None)
        assert not step.trainable

    def test_a_completion_without_choices_is_an_error(self):
        with pytest.raises(CaptureError, match="without choices"):
            steps_from(call(), {"choices": []})


def step(id: str, namespace: str, attempt: int) -> Step:
    return Step(
        id=id,
        rollout_id="t",
        messages=(),
        model="m",
        started_at=0,
        duration=0,
        identity=StepIdentity(namespace=namespace, attempt=attempt),
    )


class TestSuperseded:
    def test_earlier_attempts_of_a_branch_are_superseded_by_its_latest(self):
        """C11."""
        steps = [step("a", "n:1", 1), step("b", "n:1", 2), step("c", "n:1", 3), step("d", "n:2", 1)]
        assert superseded(steps) == {"a", "b"}

    def test_steps_outside_of_graphs_never_are(self):
        assert superseded([step("a", "", 1), step("b", "", 2)]) == frozenset()


class TestStreams:
    CHUNKS = (
        {"id": "x", "object": "chat.completion.chunk", "model": "m@3", "prompt_token_ids": [9, 8],
         "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "h"}, "token_ids": [1],
                      "logprobs": entries(-1)}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "m"}, "token_ids": [2],
                      "logprobs": entries(-2)}]},
        {"choices": [{"index": 0, "delta": {}, "token_ids": [3], "logprobs": entries(-3)}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [
            {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
                      "token_ids": [4], "logprobs": entries(-4)}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
                      "token_ids": [5], "logprobs": entries(-5)}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "token_ids": [6],
                      "logprobs": entries(-6)}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}},
    )  # fmt: skip

    def test_a_stream_becomes_the_body_that_it_would_have_been(self):
        """C03: every id of reasoning and of tool calls is there, as many as usage says."""
        assembler = StreamAssembler()
        for chunk in self.CHUNKS:
            assembler.feed(chunk)
        assert assembler.complete
        whole = assembler.body()
        assert whole["object"] == "chat.completion"
        (choice,) = read_completion(whole)
        assert choice.message == {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        }
        assert choice.tokens is not None
        assert choice.tokens.completion == (1, 2, 3, 4, 5, 6)
        assert choice.tokens.logprobs == (-1, -2, -3, -4, -5, -6)
        assert len(choice.tokens.completion) == usage_of(whole)["completion_tokens"]

    def test_a_stream_that_stops_early_is_not_complete(self):
        assembler = StreamAssembler()
        for chunk in self.CHUNKS[:-2]:
            assembler.feed(chunk)
        assert not assembler.complete
        (choice,) = read_completion(assembler.body())
        assert choice.untrainable is not None

    def test_interleaved_choices_are_kept_apart(self):
        assembler = StreamAssembler()
        for index, text in [(1, "x"), (0, "a"), (1, "y"), (0, "b")]:
            assembler.feed({"choices": [{"index": index, "delta": {"content": text}}]})
        assert [c["message"]["content"] for c in assembler.body()["choices"]] == ["ab", "xy"]

    def test_a_plain_completion_is_put_together_too(self):
        assembler = StreamAssembler()
        assembler.feed({"choices": [{"index": 0, "text": "a", "prompt_token_ids": [9], "token_ids": [1],
                                     "logprobs": {"token_logprobs": [-1]}}]})  # fmt: skip
        assembler.feed({"choices": [{"index": 0, "text": "b", "token_ids": [2], "finish_reason": "stop",
                                     "logprobs": {"token_logprobs": [-2]}}]})  # fmt: skip
        (choice,) = read_completion(assembler.body())
        assert choice.message["content"] == "ab"
        assert choice.tokens is not None
        assert choice.tokens.completion == (1, 2)

    def test_an_error_in_the_stream_is_said(self):
        with pytest.raises(CaptureError, match="no room"):
            StreamAssembler().feed({"error": {"message": "no room"}})

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 30), min_size=1), st.sampled_from(["\n", "\r\n"]))
    def test_events_are_the_same_wherever_the_bytes_are_cut(self, sizes: list[int], end: str):
        events = [json.dumps({"text": "é\u2028x"}), "[DONE]", "a"]
        raw = "".join(f": ping{end}data: {event}{end}{end}" for event in events).encode()
        decoder, found, at, turn = EventDecoder(), [], 0, 0
        while at < len(raw):
            size = sizes[turn % len(sizes)]
            found += decoder.feed(raw[at : at + size])
            at, turn = at + size, turn + 1
        found += decoder.close()
        assert found == [event.encode() for event in events]
        assert found[1] == DONE
