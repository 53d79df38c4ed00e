"""The page of a group's token tree: what its rollouts share, and where they part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from art_core.errors import UnknownTrajectoryError
from art_core.observe.dashboard.drawing_tree import ROW, describe, draw_tree
from art_core.observe.dashboard.page import render, site_of
from art_core.observe.dashboard.pages_trajectories import base_model_of
from art_core.observe.dashboard.texts import cut
from art_core.observe.dashboard.token_trie import Stretch, TokenTrie, trie_of
from art_core.observe.dashboard.token_view import spell, tokenizer_of
from art_core.store import Store
from art_core.store.browse import MOST, TrajectoryFilter, TrajectoryRow, list_trajectories
from art_core.store.parts import group_size, group_tokens, member_ids

router = APIRouter()

FORKS = 40
"""Forks that are listed: those whose branches differ most in reward."""

_GIST = 14  # tokens of a branch that are spelled
_SHOWN = 4000  # tokens of a stretch that are spelled at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One way on from a fork.

    Attributes:
        number: of its stretch.
        gist: how it begins, as text; ids without a tokenizer.
        rollouts: how many went this way.
        reward: their mean reward; None if none has one.
    """

    number: int
    gist: str
    rollouts: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A place where rollouts part.

    Attributes:
        depth: tokens before it.
        branches: the ways on, in the tree's order.
        difference: between the best and the worst branch's mean reward; None where fewer than two have one.
    """

    depth: int
    branches: tuple[Branch, ...]
    difference: float | None


@router.get("/groups/{group_id:path}/tree")
def tree(request: Request, group_id: str) -> HTMLResponse:
    """A group's token tree, drawn."""
    store = site_of(request).store
    trie, members = _tree_of(store, group_id)
    tokenizer = tokenizer_of(base_model_of(store, members[0].run_id)) if members else None
    forks = [_fork(stretch, members, tokenizer) for stretch in trie.forks]
    forks.sort(key=lambda fork: (-(fork.difference or -1.0), fork.depth))
    return render(
        request,
        "tree.html",
        group_id=group_id,
        trie=trie,
        drawing=draw_tree(trie, len(members)),
        row_height=ROW,
        forks=forks[:FORKS],
        forks_total=len(forks),
        spelled=tokenizer is not None,
        tokens=trie.tokens,
        members=members,
    )


@router.get("/groups/{group_id:path}/stretch")
def stretch(request: Request, group_id: str, number: int) -> HTMLResponse:
    """The text of one stretch of a group's token tree."""
    store = site_of(request).store
    trie, members = _tree_of(store, group_id)
    found = next((s for s in trie.walk() if s.number == number), None)
    if found is None:
        raise UnknownTrajectoryError(f"the token tree of group {group_id} has no stretch {number}")
    tokenizer = tokenizer_of(base_model_of(store, members[0].run_id))
    half = _SHOWN // 2
    ids = found.tokens if len(found) <= _SHOWN else (*found.tokens[:half], *found.tokens[-half:])
    bare = "x-art-part" in request.headers
    return render(
        request,
        "_stretch.html" if bare else "stretch.html",
        group_id=group_id,
        described=describe(found, len(members)),
        runs=[(sampled, cut(_text(part, tokenizer), 8000)) for sampled, part in _runs(found, ids)],
        left_out=len(found) - len(ids),
        passing=[members[i] for i in sorted(found.rollouts)],
        spelled=tokenizer is not None,
    )


def _tree_of(store: Store, group_id: str) -> tuple[TokenTrie, list[TrajectoryRow]]:
    """A group's tree and its members, in the same order."""
    count, last = group_size(store, group_id)
    trie = _grown(store, group_id, count, last)
    listed = list_trajectories(store, TrajectoryFilter(group_id=group_id, order="oldest"), MOST).items
    rows = {row.id: row for row in listed}
    return trie, [rows[name] for name in member_ids(store, group_id) if name in rows]


@lru_cache(maxsize=8)
def _grown(store: Store, group_id: str, _count: int, _last: int) -> TokenTrie:
    """A group's tree; steps never change once they are recorded, so their number says whether it did."""
    return trie_of(group_tokens(store, group_id))


def _fork(stretch: Stretch, members: Sequence[TrajectoryRow], tokenizer: object) -> Fork:
    branches: list[Branch] = []
    for child in stretch.children:
        rewards = [r for i in child.rollouts if (r := members[i].reward) is not None]
        branches.append(
            Branch(
                number=child.number,
                gist=_text(child.tokens[:_GIST], tokenizer),
                rollouts=len(child.rollouts),
                reward=sum(rewards) / len(rewards) if rewards else None,
            )
        )
    known = [b.reward for b in branches if b.reward is not None]
    difference = max(known) - min(known) if len(known) > 1 else None
    return Fork(depth=stretch.end, branches=tuple(branches), difference=difference)


def _text(ids: Sequence[int], tokenizer: object) -> str:
    if tokenizer is None:
        return " ".join(f"#{token}" for token in ids)
    return "".join(
        f"#{token}" if text is None else text for token, text in zip(ids, spell(ids, tokenizer), strict=True)
    )


def _runs(found: Stretch, ids: Sequence[int]) -> list[tuple[bool, Sequence[int]]]:
    """The shown tokens of a stretch, in parts that were sampled and parts that were not."""
    if len(ids) < len(found):
        half = len(ids) // 2
        return [(False, ids[:half]), (False, ids[half:])]
    runs: list[tuple[bool, Sequence[int]]] = []
    at = found.start
    for begin, end in [*found.sampled, (found.end, found.end)]:
        if begin > at:
            runs.append((False, ids[at - found.start : begin - found.start]))
        if end > begin:
            runs.append((True, ids[begin - found.start : end - found.start]))
        at = end
    return runs
