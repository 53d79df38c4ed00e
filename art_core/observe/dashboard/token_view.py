"""Tokens of one step, as a page shows them: text, numbers, and how strong a colour each has.

Invariant: every token is shown, in order, whether or not a tokenizer can spell it; a value that is not known
has no colour, which is not the same as a small one.

A step's tokens are shown page by page. Text comes from the base model's own ``tokenizer.json``, if it lies on
this machine; nothing is downloaded for it. Colours are a few levels, so that they can be told apart, and each
level also has its own line under (or over) the token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from art_core.observe.dashboard.texts import Piece, pieces
from art_core.store.records import TrainedStep
from art_core.types import Step

PAGE = 1500
"""Tokens of one page."""

_BEFORE = 8  # tokens that are spelled along, so that a page's first character is whole

Part = Literal["completion", "prompt"]
Colour = Literal["logprob", "advantage", "ratio"]

LOGPROB_LEVELS = (-0.05, -0.5, -1.5, -3.0, -6.0)
"""Below which a logprob (natural) is of the next level: 95 %, 61 %, 22 %, 5 %, 0.2 % likely."""

RATIO_LEVELS = (1.02, 1.1, 1.2, 1.5)
"""From which a ratio, or its inverse, is of the next level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token.

    Attributes:
        place: counted from the first of its part.
        id: in the model's vocabulary.
        text: what it adds to the text; None without a tokenizer, empty where a later token completes the
            character.
        logprob: natural, under the policy that sampled it.
        advantage: of its step in training; None if it was not trained.
        ratio: new to old probability in training, neither clipped nor truncated.
        trained: whether it gave a gradient; None where nothing was trained.
        clipped: whether the loss clipped its ratio.
    """

    place: int
    id: int
    text: str | None
    logprob: float | None = None
    advantage: float | None = None
    ratio: float | None = None
    trained: bool | None = None
    clipped: bool = False

    @property
    def logprob_level(self) -> int | None:
        """0 for what the policy was sure of, up to 5 for what it hardly ever says."""
        if self.logprob is None:
            return None
        return sum(self.logprob < bound for bound in LOGPROB_LEVELS)

    @property
    def ratio_level(self) -> int | None:
        """0 for unchanged, to 4 for much likelier now, to -4 for much less likely."""
        if self.ratio is None or not self.ratio > 0:
            return None
        size = sum(max(self.ratio, 1 / self.ratio) >= bound for bound in RATIO_LEVELS)
        return size if self.ratio > 1 else -size

    @property
    def shown(self) -> list[Piece]:
        """Its text, with signs for what cannot be seen; a line's end has one, too."""
        return list(pieces((self.text or "").replace("\n", "\u21b5\n")))

    @property
    def said(self) -> str:
        """All that is known of it, in words."""
        parts = [f"token {self.place}: id {self.id}"]
        if self.logprob is not None:
            parts.append(f"logprob {self.logprob:.3f} ({_percent(self.logprob)})")
        if self.advantage is not None:
            parts.append(f"advantage {self.advantage:+.3f}")
        if self.ratio is not None:
            parts.append(f"ratio {self.ratio:.3f}{', clipped' if self.clipped else ''}")
        if self.trained is not None:
            parts.append("trained" if self.trained else "not trained")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPage:
    """Some tokens of a step.

    Attributes:
        part: which ones: what the model was given, or what it sampled.
        tokens: of this page.
        number: of this page, from 0.
        pages: how many there are.
        total: tokens of this part.
        spelled: whether a tokenizer was there.
        advantage_scale: the size of an advantage that has the strongest colour.
    """

    part: Part
    tokens: tuple[Token, ...]
    number: int
    pages: int
    total: int
    spelled: bool
    advantage_scale: float

    def advantage_level(self, token: Token) -> int | None:
        """0 for none, to 4 for the best of the trajectory, to -4 for the worst."""
        if token.advantage is None:
            return None
        if not self.advantage_scale:
            return 0
        return round(max(-1.0, min(1.0, token.advantage / self.advantage_scale)) * 4)

    def classes(self, token: Token) -> str:
        """The CSS classes of a token: a level for each colour, and what was not trained."""
        levels = {"l": token.logprob_level, "a": self.advantage_level(token), "r": token.ratio_level}
        found = [f"{name}{level}" for name, level in levels.items() if level is not None]
        if token.trained is False:
            found.append("untrained")
        return " ".join(["tok", *found])


def token_page(
    step: Step,
    part: Part = "completion",
    number: int = 0,
    *,
    trained: TrainedStep | None = None,
    advantage_scale: float = 1.0,
    tokenizer: "Any | None" = None,
) -> TokenPage:
    """A page of a step's tokens.

    Args:
        step: one with tokens.
        part: what the model was given (``prompt``), or what it sampled.
        number: of the page, from 0; numbers beyond the last are the last.
        trained: what a training step did with it.
        advantage_scale: see `TokenPage`.
        tokenizer: a ``tokenizers.Tokenizer``; None: tokens have no text.
    """
    tokens = step.tokens
    assert tokens is not None
    ids = tokens.completion if part == "completion" else tokens.prompt
    pages = max(1, math.ceil(len(ids) / PAGE))
    number = max(0, min(number, pages - 1))
    start, end = number * PAGE, min(len(ids), (number + 1) * PAGE)
    first = max(0, start - _BEFORE)
    texts = spell(ids[first:end], tokenizer)[start - first :]
    sampled = part == "completion"
    shown = tuple(
        Token(
            place=place,
            id=ids[place],
            text=text,
            logprob=tokens.logprobs[place] if sampled else None,
            advantage=trained.advantage if sampled and trained else None,
            ratio=_at(trained.ratio, place) if sampled and trained else None,
            trained=bool(_at(trained.trained, place)) if sampled and trained else None,
            clipped=bool(sampled and trained and _at(trained.clipped, place)),
        )
        for place, text in zip(range(start, end), texts, strict=True)
    )
    return TokenPage(
        part=part,
        tokens=shown,
        number=number,
        pages=pages,
        total=len(ids),
        spelled=tokenizer is not None,
        advantage_scale=advantage_scale,
    )


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(min(0.0, logprob))
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


# -- text --------------------------------------------------------------------------------------------


def spell(ids: Sequence[int], tokenizer: Any | None) -> list[str | None]:
    """What each token adds to the text; empty where a character is not whole yet."""
    if tokenizer is None:
        return [None] * len(ids)
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    found: list[str | None] = []
    for token in ids:
        try:
            known = tokenizer.id_to_token(token) is not None
            found.append((stream.step(tokenizer, token) or "") if known else None)
        except Exception:  # the library's own base class: an id that it does not know, or bytes of no text
            stream = DecodeStream(skip_special_tokens=False)
            found.append(None)
    return found


def tokenizer_of(base_model: str | None) -> Any | None:
    """The tokenizer of a base model, from this machine alone; None where there is none.

    Args:
        base_model: a model's directory, or its hub name, whose files lie in the hub's cache.
    """
    path = None if base_model is None else _tokenizer_file(base_model)
    return None if path is None else _loaded(str(path), path.stat().st_mtime_ns)


def _tokenizer_file(base_model: str) -> Path | None:
    try:
        local = Path(base_model).expanduser() / "tokenizer.json"
        if local.is_file():
            return local
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base_model, "tokenizer.json")
    except (ImportError, OSError, ValueError, RuntimeError):
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=4)
def _loaded(path: str, changed: int) -> Any | None:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path)
    except Exception:  # the library's own base class: the file is damaged, or of a newer kind
        return None
