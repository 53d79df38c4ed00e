"""A completion, read exactly: from an OpenAI-compatible body (or its stream) to steps.

Invariant: a step has tokens only when the server itself gave every id of the prompt and of the completion,
and one logprob for each sampled id; otherwise it has none, and says why. Nothing is ever tokenised here.

Data passes through like this: `request_extras` says what to add to a request; the answer is a body, or
chunks that a `StreamAssembler` turns into the same body; `read_completion` reads the body into choices;
`steps_from` makes them steps; `strip` gives the client back only what it asked for. ChatART, the gateway
and the plain OpenAI client all use these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast

from art_core.errors import CaptureError
from art_core.packed import FIELD as PACKED_FIELD
from art_core.packed import read_packed
from art_core.recording import new_id
from art_core.streaming import Body, shown
from art_core.streaming import StreamAssembler as StreamAssembler
from art_core.types import Message, PolicyVersion, Step, StepIdentity, StepTokens, ToolSpec

_ENVELOPE = frozenset({"id", "object", "created", "model", "choices"})
"""What every chunk of a stream has."""

_NOT_SAMPLING = frozenset(
    {"messages", "tools", "model", "prompt", "stream", "stream_options", "return_token_ids"}
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for by itself, of the things that capture asks for.

    Attributes:
        logprobs: the request has ``logprobs``.
        token_ids: the request has ``return_token_ids``.
        stream: the answer is to come in chunks.
        usage: a stream is to end with token counts.
        packed: the client is one of ours and reads packed tokens (`art_core.packed`).
    """

    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    usage: bool = False
    packed: bool = False

    @property
    def may_be_packed(self) -> bool:
        """Whether the server may pack the tokens: who asked for them unpacked gets them so."""
        return self.packed or not (self.logprobs or self.token_ids)

    @classmethod
    def of(cls, request: Body, *, packed: bool = False) -> "Asked":
        """Read it from the request as the client sent it; ``packed`` is said by a header."""
        options = request.get("stream_options")
        logprobs = request.get("logprobs")
        return cls(
            # Chat has a bool; plain completions have a number, where 0 still means the sampled token's.
            logprobs=logprobs is not None and logprobs is not False,
            token_ids=bool(request.get("return_token_ids")),
            stream=bool(request.get("stream")),
            usage=isinstance(options, Mapping) and bool(cast(Body, options).get("include_usage")),
            packed=packed,
        )


def request_extras(request: Body) -> dict[str, Any]:
    """What to add to a request so that its answer holds exact tokens; what it has already is left alone."""
    asked = Asked.of(request)
    extras: dict[str, Any] = {} if asked.token_ids else {"return_token_ids": True}
    if not asked.logprobs:
        extras["logprobs"] = 1 if "prompt" in request else True
    return extras


@dataclass(frozen=True, slots=True)
class CapturedChoice:
    """One choice of a completion.

    Attributes:
        message: the assistant message, without the fields that the server left empty.
        tokens: exact ids and logprobs, or None.
        untrainable: why ``tokens`` cannot be trained on; None when they can.
    """

    index: int
    message: Message
    finish_reason: str | None
    tokens: StepTokens | None
    untrainable: str | None


def read_completion(body: Any) -> tuple[CapturedChoice, ...]:
    """Read the choices of a chat completion or a plain completion.

    Raises:
        CaptureError: it is neither; the message says what was found.
    """
    if not isinstance(body, Mapping):
        raise CaptureError(f"expected a completion as a JSON object, found {shown(body)}")
    body = cast(Body, body)
    if body.get("error"):
        raise CaptureError(f"expected a completion, found an error: {shown(body['error'])}")
    choices: Any = body.get("choices")
    if not isinstance(choices, list):
        raise CaptureError(
            f"expected a completion with a list of choices, found keys {sorted(body)} "
            f"and choices {shown(choices)}"
        )
    return tuple(
        _read_choice(choice, position, body) for position, choice in enumerate(cast(list[Any], choices))
    )


def usage_of(body: Body, choices: Sequence[CapturedChoice] = ()) -> dict[str, int]:
    """The server's token counts, or counts of the ids where it sent none; empty without either."""
    usage = body.get("usage")
    if isinstance(usage, Mapping):
        return {k: v for k, v in cast(Body, usage).items() if type(v) is int}
    known = [c.tokens for c in choices if c.tokens is not None]
    if not known or len(known) < len(choices):
        return {}
    prompt, sampled = len(known[0].prompt), sum(len(t.completion) for t in known)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def strip(body: Body, asked: Asked) -> dict[str, Any]:
    """A copy of an answer, or of a chunk of one, without what the client did not ask for."""
    stripped = dict(body)
    if not asked.packed:
        stripped.pop(PACKED_FIELD, None)
    if not asked.token_ids:
        stripped.pop("prompt_token_ids", None)
    choices: Any = body.get("choices")
    if isinstance(choices, list) and not (asked.token_ids and asked.logprobs):
        stripped["choices"] = [
            _strip_choice(cast(Body, c), asked) if isinstance(c, Mapping) else c
            for c in cast(list[Any], choices)
        ]
    return stripped


def says_nothing(chunk: Body) -> bool:
    """Whether a stripped chunk holds nothing for the client: it was sent for its token ids alone."""
    choices: Any = chunk.get("choices")
    if chunk.get("usage") or chunk.get("error") or not isinstance(choices, list):
        return False
    if not choices:
        return chunk.keys() <= _ENVELOPE
    for choice in cast(list[Any], choices):
        if not isinstance(choice, Mapping):
            return False
        choice = cast(Body, choice)
        if choice.get("finish_reason") or choice.get("logprobs") or choice.get("token_ids"):
            return False
        delta = choice.get("delta")
        if choice.get("text") or not isinstance(delta, Mapping | None):
            return False
        if any(value is not None for value in cast(Body, delta or {}).values()):
            return False
    return True


# -- steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request that was made, and where it was made from; what its steps have in common.

    Attributes:
        request: the JSON body as the client meant it, without what capture added.
        policy: the version that was asked; None for a model that is no policy of ours.
        started_at: Unix time, seconds.
        duration: seconds until the last token.
        time_to_first_token: seconds until the first token of a stream; None where the answer came whole.
        raw_logprobs: whether the server's log-probabilities are those of the model and not of what was
            sampled; see `Step`.
    """

    request: Body
    rollout_id: str
    policy: PolicyVersion | None
    started_at: float
    duration: float
    time_to_first_token: float | None = None
    raw_logprobs: bool = False
    identity: StepIdentity = field(default_factory=StepIdentity)
    call_id: str = field(default_factory=lambda: new_id("c"))


def steps_from(call: Call, body: Any, *, untrainable: str | None = None) -> tuple[Step, ...]:
    """The steps of a call that was answered, one for each choice.

    Args:
        call: what was asked.
        body: the whole answer, as the server sent it or a `StreamAssembler` put it together.
        untrainable: a reason that holds for all of them, whatever their tokens.

    Raises:
        CaptureError: the body is no completion, or has no choices.
    """
    choices = read_completion(body)
    if not choices:
        raise CaptureError("expected a completion, found one without choices")
    usage = usage_of(body, choices)
    per_prompt = max(1, len(choices) // len(_prompts(call.request)))
    return tuple(
        Step(
            id=new_id("s"),
            choice=choice.index,
            messages=_messages(call.request, choice.index // per_prompt),
            response=choice.message,
            finish_reason=choice.finish_reason,
            tokens=choice.tokens,
            untrainable=untrainable or choice.untrainable or _not_ours(call),
            usage=usage if len(choices) == 1 else usage_of({}, (choice,)) or usage,
            **_common(call),
        )
        for choice in choices
    )


def failed_step(call: Call, error: str) -> Step:
    """The step of a call that was not answered: an HTTP error, a timeout, a cancelled call."""
    return Step(
        id=new_id("s"),
        messages=_messages(call.request, 0),
        untrainable="the call failed",
        error=error,
        **_common(call),
    )


def superseded(steps: Iterable[Step]) -> frozenset[str]:
    """Ids of the steps that did not lead to what the graph went on with, because their node ran again.

    LangGraph runs a node again under the same namespace, by a retry or by a resume after an interrupt. A
    retry also replaces what the subgraphs of the node did before it; a resume does not, because
    a subgraph that is resumed goes on from where it was. Steps outside of graphs are never superseded.
    """
    steps = tuple(steps)
    latest: dict[str, int] = {}
    retried: dict[str, int] = {}
    for step in steps:
        where = step.identity
        latest[where.namespace] = max(where.attempt, latest.get(where.namespace, 0))
        if where.retries:
            for node, number in zip(where.enclosing, where.retries, strict=False):
                retried[node] = max(number, retried.get(node, 0))

    def replaced(where: StepIdentity) -> bool:
        if not where.namespace:
            return False
        if where.attempt < latest[where.namespace]:
            return True
        counts = where.retries or repeat(0)
        return bool(retried) and any(
            number < retried.get(node, 0) for node, number in zip(where.enclosing, counts, strict=False)
        )

    return frozenset(step.id for step in steps if replaced(step.identity))


# -- reading -----------------------------------------------------------------------------------------


def _read_choice(choice: Any, position: int, body: Body) -> CapturedChoice:
    if not isinstance(choice, Mapping):
        raise CaptureError(f"expected choice {position} as a JSON object, found {shown(choice)}")
    choice = cast(Body, choice)
    message: Any = choice.get("message")
    if isinstance(choice.get("text"), str):
        message = {"role": "assistant", "content": choice["text"]}
    if not isinstance(message, Mapping):
        raise CaptureError(
            f"expected choice {position} with a message or a text, found keys {sorted(choice)} "
            f"and message {shown(message)}"
        )
    tokens, reason = _read_tokens(choice, body)
    finish = choice.get("finish_reason")
    if reason is None and finish in (None, "abort", "error"):
        reason = f"the completion did not come to its end (finish reason {finish})"
    index = choice.get("index")
    return CapturedChoice(
        index=index if type(index) is int else position,
        message=_tidy(cast(Body, message)),
        finish_reason=finish,
        tokens=tokens,
        untrainable=reason,
    )


def _read_tokens(choice: Body, body: Body) -> tuple[StepTokens | None, str | None]:
    """The tokens, and why they cannot be trained on; tokens are None where they are not exact."""
    if body.get(PACKED_FIELD) is not None:
        return _read_packed_tokens(body[PACKED_FIELD], choice.get("index") or 0)
    ids: Any = choice.get("token_ids")
    prompt: Any = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not isinstance(ids, list):
        return None, "no token ids: the server does not know return_token_ids"
    if not isinstance(prompt, list) or not prompt:
        return None, "no token ids of the prompt"
    if not ids:
        return None, "the completion is empty"
    if {*map(type, cast(list[Any], ids)), *map(type, cast(list[Any], prompt))} != {int}:
        return None, "token ids that are no integers"
    logprobs = _read_logprobs(choice.get("logprobs"))
    if logprobs is None:
        return None, "no logprobs"
    if not {*map(type, cast(list[Any], logprobs))} <= {float, int, type(None)}:
        return None, "logprobs that are no numbers"
    if len(logprobs) != len(cast(list[Any], ids)):
        return None, f"{len(cast(list[Any], ids))} token ids but {len(logprobs)} logprobs"
    return StepTokens(tuple(cast(list[int], prompt)), tuple(cast(list[int], ids)), tuple(logprobs)), None


def _read_packed_tokens(field: Any, index: int) -> tuple[StepTokens | None, str | None]:
    packed = read_packed(field, index)
    if packed is None:
        return None, f"no token ids of choice {index} among the packed tokens"
    if not packed.prompt:
        return None, "no token ids of the prompt"
    if not packed.ids:
        return None, "the completion is empty"
    if len(packed.logprobs) != len(packed.ids):
        return None, f"{len(packed.ids)} token ids but {len(packed.logprobs)} logprobs"
    return StepTokens(*packed), None


def _read_logprobs(logprobs: Any) -> list[float | None] | None:
    if not isinstance(logprobs, Mapping):
        return None
    logprobs = cast(Body, logprobs)
    content: Any = logprobs.get("content")
    if isinstance(content, list):  # chat completions
        entries = cast(list[Any], content)
        return [cast(Body, e).get("logprob") if type(e) is dict else e for e in entries]
    values: Any = logprobs.get("token_logprobs")  # plain completions
    return cast(list[float | None], values) if isinstance(values, list) else None


def _tidy(message: Body) -> dict[str, Any]:
    """The message without the fields that servers send empty; content stays, also when it is None."""
    empty = (None, [], {})
    kept = {k: v for k, v in message.items() if k in ("role", "content") or v not in empty}
    return {"role": "assistant", "content": None, **kept}


def _strip_choice(choice: Body, asked: Asked) -> dict[str, Any]:
    kept = dict(choice)
    if not asked.token_ids:
        kept.pop("token_ids", None)
        kept.pop("prompt_token_ids", None)
    if not asked.logprobs and kept.get("logprobs") is not None:
        kept["logprobs"] = None
    return kept


def _not_ours(call: Call) -> str | None:
    return None if call.policy is not None else f"{call.request.get('model')} is no policy of ours"


def _prompts(request: Body) -> Sequence[Any]:
    """The prompts of a plain completion: a text, ids, or a list of either."""
    prompt: Any = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return cast(list[Any], prompt)
    return (prompt,)


def _messages(request: Body, prompt: int) -> tuple[Message, ...]:
    if "messages" in request:
        return tuple(cast(Sequence[Message], request["messages"]))
    prompts = _prompts(request)
    text = prompts[min(prompt, len(prompts) - 1)]
    # A plain prompt has no roles; a prompt given as ids has no text, and its ids are in the tokens.
    return ({"role": "user", "content": text},) if isinstance(text, str) else ()


def _common(call: Call) -> dict[str, Any]:
    request = call.request
    return {
        "rollout_id": call.rollout_id,
        "call_id": call.call_id,
        "model": str(request.get("model")),
        "policy": call.policy,
        "identity": call.identity,
        "tools": tuple(cast(Sequence[ToolSpec], request.get("tools") or ())),
        "sampling": {k: v for k, v in request.items() if k not in _NOT_SAMPLING},
        "started_at": call.started_at,
        "duration": call.duration,
        "time_to_first_token": call.time_to_first_token,
        "raw_logprobs": call.raw_logprobs,
    }
