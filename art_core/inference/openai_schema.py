"""OpenAI's chat completions on the wire: what we accept, and the shapes that we answer in.

Invariant: a parameter that is not honoured is refused with its name; nothing is ignored except what
cannot change the answer.

Requests are pydantic models with ``extra="forbid"``. Answers are typed dictionaries, because they are
built by us and only ever serialised. Fields that OpenAI does not have are vLLM's, in vLLM's shape:
``top_k``, ``min_p``, ``min_tokens``, ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``,
``chat_template_kwargs``, ``return_token_ids`` in, and
``prompt_token_ids``, ``token_ids``, ``stop_reason``, ``reasoning`` out.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from art_core.errors import UnsupportedParameterError


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Loose(BaseModel):
    """Parts that the chat template reads: kept whole, whatever a client puts in."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class FunctionCall(_Loose):
    """A call in an earlier assistant message; ``arguments`` is JSON in a string."""

    name: str
    arguments: str = "{}"


class ToolCall(_Loose):
    """One of an assistant message's calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Loose):
    """One message. ``content`` is text, or parts of which only text is accepted."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class FunctionSpec(_Loose):
    """A function's name, description and JSON schema."""

    name: str


class Tool(_Loose):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(_Wire):
    """The function that a named ``tool_choice`` asks for."""

    name: str


class NamedToolChoice(_Wire):
    """Asks for one function."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(_Wire):
    """What a stream carries besides deltas."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(_Wire):
    """The only response format there is without constrained decoding."""

    type: Literal["text"]


def _as_tuple(stop: Any) -> Any:
    return () if stop is None else (stop,) if isinstance(stop, str) else stop


class ChatRequest(_Wire):
    """``POST /v1/chat/completions``. Null means that a field was not given."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=256)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0)

    # Accepted where they ask for what happens anyway; any other value is refused.
    response_format: TextFormat | None = None
    modalities: tuple[Literal["text"]] | None = None
    store: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    # These say something about the caller, not about the answer.
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def completion_limit(self) -> int | None:
        """The most tokens to sample, by whichever name it was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        UnsupportedParameterError: a parameter is unknown, or a value is not honoured; ``parameter``
            holds the first one's name.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False, include_context=False)
    names = dict.fromkeys(_name(e["loc"]) for e in errors)
    lines = [_explain(e) for e in {_name(e["loc"]): e for e in reversed(errors)}.values()]
    raise InvalidParameterError("; ".join(reversed(lines)), next(iter(names), None))


class InvalidParameterError(UnsupportedParameterError):
    """A request's parameter that cannot be honoured.

    Attributes:
        parameter: its name; None when the body is no JSON object.
    """

    def __init__(self, message: str, parameter: str | None) -> None:
        super().__init__(message)
        self.parameter = parameter


def _name(loc: tuple[int | str, ...]) -> str | None:
    # Below the field, pydantic names union members, which mean nothing to a client.
    names = [str(part) for part in loc]
    return names[0] if names else None


def _explain(error: Any) -> str:
    name = _name(error["loc"])
    if name is None:
        return f"the body is not a JSON object of chat completions: {error['msg']}"
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return f"{name}: this server has no such parameter"
    if error["type"] == "missing":
        return f"{'.'.join(map(str, error['loc']))}: required"
    where = ".".join(map(str, error["loc"]))
    return f"{where}={error['input']!r} is not supported: {error['msg']}"


# -- answers -------------------------------------------------------------------------------------------


class TopLogprob(TypedDict):
    """An alternative for one token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TypedDict):
    """One sampled token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """One entry per sampled token, end token included."""

    content: list[TokenLogprob]


class FunctionCallOut(TypedDict):
    """``arguments`` is JSON in a string."""

    name: str
    arguments: str


class ToolCallOut(TypedDict):
    """A parsed call; ``index`` in streams only."""

    id: str
    type: Literal["function"]
    function: FunctionCallOut
    index: NotRequired[int]


class MessageOut(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallOut]]


class Delta(TypedDict, total=False):
    """A piece of the assistant's message."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    tool_calls: list[ToolCallOut]


class Choice(TypedDict):
    """One completion."""

    index: int
    message: MessageOut
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChunkChoice(TypedDict):
    """A piece of one completion."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class Usage(TypedDict):
    """Token counts; the prompt once, completions summed over choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatResponse(TypedDict):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class ErrorBody(TypedDict):
    """What went wrong, and which parameter it was."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """OpenAI's error envelope."""

    error: ErrorBody


def error_response(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> ErrorResponse:
    """OpenAI's error envelope.

    Args:
        message: for a person.
        kind: ``invalid_request_error``, ``not_found_error``, ``server_error``, ...
        param: the request's parameter that is to blame.
        code: for a program.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
