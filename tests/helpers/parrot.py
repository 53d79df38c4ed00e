"""A small model that has learnt a few answers by heart, so that a test knows what any engine must say.

Its architecture, tokenizer and chat template are real (Qwen2.5's and Qwen3's from their packages, or the
tiny ones of `helpers.tiny`), and greedy decoding of a script's messages gives the script's reply, token by
token, in every engine that computes the model correctly. Asked to `FREE`, it draws words evenly, one after
the other, and hardly ever stops by itself.

The model is trained on the tokens that occur only, which takes seconds, and then gets the rows of the whole
vocabulary. It is kept beside the other models, under a name that changes with everything it depends on.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from helpers.tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.prepare_model import CACHE, qwen_tokenizer

Family = Literal["tiny", "qwen2.5", "qwen3"]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The next number.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOLS = (WEATHER, ADD)


def call(name: str, **arguments: Any) -> str:
    """A call as the models of these templates write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Script:
    """A conversation and the answer to it.

    Attributes:
        messages: as they go to the server.
        reply: the text that is sampled, reasoning and calls included, before its end token.
        tools: what the request offers.
        template: the request's ``chat_template_kwargs``.
    """

    messages: Sequence[Mapping[str, Any]]
    reply: str
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """What a request needs to get the reply."""
        wanted: dict[str, Any] = {"messages": [dict(m) for m in self.messages], "temperature": 0}
        if self.tools:
            wanted["tools"] = list(self.tools)
        if self.template:
            wanted["chat_template_kwargs"] = dict(self.template)
        return wanted


def user(text: str) -> tuple[dict[str, Any]]:
    """A conversation of one message."""
    return ({"role": "user", "content": text},)


_PARIS = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
HELLO = Script(user("Say hello."), "Hello, world! Caf\u00e9 \U0001f642 is open.")
CALL = Script(user("Weather in Paris?"), call("get_weather", city="Paris"), TOOLS)
CALLS = Script(
    user("Weather in Paris and Rome?"),
    f"Let me look.\n{call('get_weather', city='Paris')}\n{call('get_weather', city='Rome')}",
    TOOLS,
)
MALFORMED = Script(
    user("Break it."), '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>', TOOLS
)
NO_CALL = Script(user("Just talk."), "No tool is needed.", TOOLS)
AFTER_RESULT = Script(
    (
        *CALL.messages,
        {"role": "assistant", "content": "", "tool_calls": [_PARIS]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ),
    "It is sunny in Paris.",
    TOOLS,
)
THOUGHT = Script(
    user("Think about two and two."), "<think>\nTwo and two make four.\n</think>\n\nThe answer is 4."
)
THOUGHT_CALL = Script(
    user("Think about Rome."),
    f"<think>\nI need the weather.\n</think>\n\n{call('get_weather', city='Rome')}",
    TOOLS,
)
NO_THOUGHT = Script(THOUGHT.messages, "The answer is 4.", template={"enable_thinking": False})

PLAIN = (HELLO, CALL, CALLS, MALFORMED, NO_CALL, AFTER_RESULT)
THINKING = (THOUGHT, THOUGHT_CALL, NO_THOUGHT)
FREE = Script(user("Speak freely."), "")
"""Whose answer is any words, for ever."""


def spoken_to(family: Family | None, script: Script) -> Script:
    """A script as a family's users ask for it: a model that thinks is told where it shall not."""
    if family == "qwen3" and script not in THINKING:
        return replace(script, template={"enable_thinking": False})
    return script


def scripts(family: Family) -> tuple[Script, ...]:
    """What a family's model has learnt."""
    return tuple(spoken_to(family, s) for s in (PLAIN + THINKING if family == "qwen3" else PLAIN))


def parrot_tokenizer(family: Family) -> Any:
    """A family's tokenizer, with its chat template."""
    if family == "tiny":
        return tiny_tokenizer()
    return AutoTokenizer.from_pretrained(qwen_tokenizer(family))


def render(tokenizer: Any, script: Script) -> list[int]:
    """The prompt's ids, by transformers alone."""
    messages = json.loads(json.dumps(script.messages))
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(script.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        **script.template,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def reply_ids(tokenizer: Any, script: Script) -> list[int]:
    """The ids that are sampled, end token included."""
    return [*tokenizer(script.reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


HIDDEN, LAYERS, HEADS = 128, 2, 4
ARCH = {"tiny": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3"}
FREE_WORDS = 48
FREE_LENGTH = 64


def parrot(family: Family) -> Path:
    """The directory of a family's model; made on the first call."""
    recipe = json.dumps([family, *(asdict(s) for s in scripts(family))], default=str)
    key = hashlib.sha256((recipe + Path(__file__).read_text()).encode()).hexdigest()[:12]
    done = CACHE / f"parrot-{family}-{key}"
    if not done.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "model"
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # more only wait for each other over tensors this small
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    _make(family, made)
            finally:
                torch.set_num_threads(threads)
            try:
                os.rename(made, done)
            except OSError:
                if not done.exists():  # another process may have been quicker
                    raise
        for other in CACHE.glob(f"parrot-{family}-*"):
            if other != done:
                shutil.rmtree(other, ignore_errors=True)  # of an earlier recipe
    return done


def _make(family: Family, into: Path) -> None:
    tokenizer = parrot_tokenizer(family)
    lines = [(render(tokenizer, s), reply_ids(tokenizer, s)) for s in scripts(family)]
    free = render(tokenizer, spoken_to(family, FREE))
    used = sorted({i for prompt, reply in lines for i in (*prompt, *reply)} | set(free))
    words = [i for i in used if tokenizer.decode([i]).strip().isalpha()][:FREE_WORDS]
    model = _learn(family, lines, free, words, used, len(tokenizer))
    _write(family, model, tokenizer, used, into)


def _shape(family: Family, vocabulary: int) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        shape["head_dim"] = HIDDEN // HEADS
    return AutoConfig.for_model(ARCH[family], **shape)


@dataclass
class _Trie:
    """Lines as a tree of tokens, so that the prompts' common beginnings are computed once."""

    tokens: list[int] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    said: list[int] = field(default_factory=list)

    def add(self, prompt: Sequence[int], reply: Sequence[int], *, alone: bool = False) -> None:
        at, path = -1, []
        for place, token in enumerate((*prompt, *reply)):
            node = None if alone else self.children.get((at, token))
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.above.append([*path, node])
                if not alone:
                    self.children[at, token] = node
            path.append(node)
            at = node
            if place >= len(prompt) and node not in self.said:
                self.said.append(node)


def _learn(
    family: Family,
    lines: Sequence[tuple[list[int], list[int]]],
    free: Sequence[int],
    words: Sequence[int],
    used: Sequence[int],
    vocabulary: int,
) -> Any:
    """Train on the tokens that occur until every reply is certain, also against those that do not.

    Args:
        family: whose architecture.
        lines: prompts and replies.
        free: the prompt that is answered with any words.
        words: what those are.
        used: the tokens that occur, in the order of the model's rows.
        vocabulary: how many there are; each of the others will have a logit of about 0.
    """
    compact = {token: place for place, token in enumerate(used)}
    trie = _Trie()
    for prompt, reply in lines:
        trie.add(prompt, reply)
    certain = len(trie.said)
    trie.add(free, [words[0]] * FREE_LENGTH, alone=True)
    ids = torch.tensor([[compact[t] for t in trie.tokens]])
    mask = torch.zeros(1, 1, len(trie.tokens), len(trie.tokens), dtype=torch.bool)
    for node, above in enumerate(trie.above):
        mask[0, 0, node, above] = True
    positions = torch.tensor([[len(above) - 1 for above in trie.above]])
    said = torch.tensor(trie.said)
    before = torch.tensor([trie.above[node][-2] for node in trie.said])
    drawn = said[certain:]
    choices = torch.tensor([compact[t] for t in words])
    others = torch.full((len(said), 1), math.log(max(vocabulary - len(used), 1)))

    model = AutoModelForCausalLM.from_config(_shape(family, len(used)), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(1000):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        ids[0, drawn] = choices[torch.randint(len(choices), (FREE_LENGTH,))]
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions)
        logits = model.get_output_embeddings()(hidden.last_hidden_state[0, before])
        losses = torch.nn.functional.cross_entropy(
            torch.cat([logits, others], dim=1), ids[0, said], reduction="none"
        )
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        worst = losses[:certain].max().item()
        spread = losses[certain:].mean().item() - math.log(len(words))
        if worst < 0.1 and spread < 0.15:
            return model
    raise RuntimeError(f"the {family} parrot did not learn its lines: worst loss {worst:.3f}, {spread:.3f}")


def _write(family: Family, small: Any, tokenizer: Any, used: Sequence[int], into: Path) -> None:
    """Give the model the rows of the whole vocabulary, and save it."""
    vocabulary = -(-len(tokenizer) // 128) * 128
    config = _shape(family, vocabulary)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rows = torch.tensor(used)
    trained = small.state_dict()
    whole = model.state_dict()
    for name, weight in trained.items():
        if weight.shape == whole[name].shape:
            whole[name] = weight
        else:
            # Tokens that were never seen are unlikely, and not all alike.
            whole[name] = torch.randn(whole[name].shape) * 0.002
            whole[name][rows] = weight
    model.load_state_dict(whole)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
