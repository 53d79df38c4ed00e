"""Supervised samples: assistant turns of conversations, and what trajectories sampled.

Invariant: a sample's prompt is exactly what the server would feed for that turn, and its completion
exactly what the policy would have to sample: the answer and its end token, not the template's newline
after it.

Each assistant turn is a sample of its own. Templates that drop earlier thinking, or render the last
turn differently, then need no special case; the token tree shares what turns have in common.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from art_core.errors import ChatTemplateError, ConfigError, NothingToTrainError
from art_core.training.samples import Sample, trajectory_samples
from art_core.types import Message, ToolSpec, Trajectory


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to imitate: every assistant message is trained.

    Attributes:
        messages: in OpenAI's wire format.
        tools: what the model may call, in OpenAI's wire format.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


Supervised: TypeAlias = "Sample | Conversation | Trajectory | Sequence[Message] | Mapping[str, Any]"
"""What can be imitated; a bare sequence is messages, a mapping has ``messages`` and maybe ``tools``."""


def check_options(batch_size: int, steps: int | None, epochs: int, learning_rate: float) -> None:
    """Whether one can imitate so.

    Raises:
        ConfigError: a number is out of range.
    """
    for name, value in (("batch_size", batch_size), ("steps", steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise ConfigError(f"sft({name}={value}): at least 1")
    if not 0 < learning_rate <= 1:
        raise ConfigError(f"sft(learning_rate={learning_rate}): above 0, and at most 1")


def supervised_samples(tokenizer: PreTrainedTokenizerBase, data: Sequence[Supervised]) -> list[Sample]:
    """Everything that is to be imitated, as samples.

    Args:
        tokenizer: with a chat template.
        data: samples stay as they are; conversations are rendered; of trajectories the trainable steps
            are taken, with the tokens that were sampled.

    Raises:
        ChatTemplateError: the template refuses a conversation, or cannot be cut into turns.
        NothingToTrainError: there is no assistant turn in all of it.
    """
    samples: list[Sample] = []
    for i, item in enumerate(data):
        if isinstance(item, Sample):
            samples.append(item)
        elif isinstance(item, Trajectory):
            samples += trajectory_samples(item)[0]
        else:
            samples += conversation_samples(tokenizer, _conversation(item), name=f"conversation {i}")
    if not samples:
        raise NothingToTrainError(
            f"{len(data)} items hold no assistant message and no sampled token to imitate"
        )
    return samples


def _conversation(item: "Conversation | Sequence[Message] | Mapping[str, Any]") -> Conversation:
    if isinstance(item, Conversation):
        return item
    if isinstance(item, Mapping):
        return Conversation(tuple(item["messages"]), tuple(item.get("tools") or ()))
    return Conversation(tuple(item))


def conversation_samples(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, name: str = "conversation"
) -> list[Sample]:
    """The assistant turns of a conversation, each with the prompt that it answers.

    Args:
        tokenizer: with a chat template.
        conversation: what to render.
        name: says which one it is, in ids and errors.

    Raises:
        ChatTemplateError: the template refuses the messages, renders an answer so that it does not
            begin with the prompt that a server would feed, or leaves its tool calls out.
    """
    samples: list[Sample] = []
    for turn, message in enumerate(conversation.messages):
        if message.get("role") != "assistant":
            continue
        before, tools = conversation.messages[:turn], conversation.tools
        prompt = render(tokenizer, before, tools, name=name, add_generation_prompt=True)
        whole = render(tokenizer, (*before, message), tools, name=name, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ChatTemplateError(
                f"{name}, message {turn}: the chat template renders the answered prompt differently from the "
                f"prompt itself, so the answer cannot be told apart; the prompt ends {prompt[-40:]!r}, the "
                f"whole has {whole[max(0, len(prompt) - 40) : len(prompt)]!r} there"
            )
        answer = whole[len(prompt) :]
        called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if unsaid := [function for function in called if function not in answer]:
            raise ChatTemplateError(
                f"{name}, message {turn}: the chat template leaves out the call of {', '.join(unsaid)}, so "
                "what would be imitated is an answer without it; use a model whose template knows tools, or "
                "name one that does with EngineConfig.chat_template"
            )
        completion = _answer_ids(tokenizer, answer)
        samples.append(
            Sample(
                prompt=_encode(tokenizer, prompt),
                completion=completion,
                logprobs=(None,) * len(completion),
                advantage=1.0,
                step=f"{name}, message {turn}",
                rollout=name,
            )
        )
    return samples


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    name: str,
    add_generation_prompt: bool,
) -> str:
    """Messages as the chat template's text.

    Raises:
        ChatTemplateError: the tokenizer has no template, or it refuses; with its own words.
    """
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            f"{name}: the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an instruct "
            "model, or name a template with EngineConfig.chat_template"
        )
    plain = [_plain(m, name) for m in messages]
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=[dict(t) for t in tools] or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as refused:  # templates raise whatever they like; all of it is the template's refusal
        raise ChatTemplateError(f"{name}: the chat template refuses the messages: {refused}") from refused
    return cast(str, text)


def _plain(message: Message, name: str) -> dict[str, Any]:
    """A message of OpenAI's wire format as templates want it, and as the embedded engine renders it.

    Text parts become text, tool arguments become the object that their JSON stands for.
    """
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        parts = cast(Sequence[Mapping[str, Any]], content)
        if any(part.get("type") != "text" for part in parts):
            raise ChatTemplateError(f"{name}: only text can be trained on, a message has other content")
        content = "\n".join(part["text"] for part in parts)
    plain["content"] = content or ""
    # Servers and their clients have two names for it; templates know this one.
    if isinstance(thoughts := plain.pop("reasoning", None), str):
        plain.setdefault("reasoning_content", thoughts)
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in calls]
    return plain


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object; text that is not JSON of an object stays as it was written."""
    with suppress(json.JSONDecodeError, TypeError):
        arguments = json.loads(function["arguments"])
        if isinstance(arguments, dict):
            return {**function, "arguments": arguments}
    return dict(function)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids of an answer up to and with its end token, which is the last special token in it."""
    ids = _encode(tokenizer, text)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = max((at for at, i in enumerate(ids) if i in special), default=None)
    if last is not None:
        return ids[: last + 1]
    end = tokenizer.eos_token_id
    return ids if end is None else (*ids, cast(int, end))
