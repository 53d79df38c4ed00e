"""The pages of a call's tokens and of the token trees of groups."""

import html
import re
from dataclasses import replace

from helpers.page_texts import PART, page, rows, visible
from helpers.trajectories import a_step, a_trajectory

from art_core.store import Store
from art_core.types import TrajectoryGroup


def tokens_of(text: str) -> list[tuple[str, str, str]]:
    """Classes, title and text of each token on a page."""
    part = text[text.index('aria-label="Sampled tokens') if "Sampled tokens" in text else 0 :]
    found = re.findall(
        r'<span class="(tok[^"]*)" title="([^"]*)">(.*?)</span>(?=<span class="tok|</div>)', part, re.S
    )
    return [(classes, title, html.unescape(re.sub(r"<[^>]+>", "", shown))) for classes, title, shown in found]


def test_tokens_are_spelled_by_the_runs_own_tokenizer_with_what_training_did(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    step = recorded.trajectory(row.id).steps[0]
    trained = next(t for t in recorded.trained(row.id) if t.step_id == step.id)
    found = tokens_of(page(recorded, f"/trajectories/{row.id}/tokens?step={step.id}", **PART))
    assert step.tokens is not None
    assert "".join(shown for _, _, shown in found) == step.message() + "<|end|>"
    assert len(found) == len(step.tokens.completion)
    for i, (classes, title, _) in enumerate(found):
        assert f"id {step.tokens.completion[i]}," in title
        assert f"logprob {step.tokens.logprobs[i]:.3f}" in title
        assert f"advantage {trained.advantage:+.3f}" in title
        assert ("untrained" in classes) == (not trained.trained[i])


def test_without_a_tokenizer_tokens_are_shown_by_their_ids(recorded: Store) -> None:
    row = rows(recorded, 1)[0]
    step = recorded.trajectory(row.id).steps[0]
    text = page(recorded, f"/trajectories/{row.id}/tokens?step={step.id}&part=prompt", **PART)
    assert "tokenizer is not on this machine" in text
    assert step.tokens is not None
    assert f"#{step.tokens.prompt[0]}<" in text


def test_a_long_steps_tokens_come_page_by_page_and_each_once(hostile: Store) -> None:
    step = next(s for s in hostile.trajectory("long-rollout").steps if s.tokens)
    long = replace(step, id="longer", rollout_id="longer", tokens=None)
    assert step.tokens is not None
    tokens = replace(step.tokens, completion=tuple(range(4000)), logprobs=(-0.5,) * 4000)
    hostile.save_trajectory(
        replace(hostile.trajectory("long-rollout"), id="longer", steps=(replace(long, tokens=tokens),))
    )
    shown = [
        re.findall(r"token (\d+): id", page(hostile, f"/trajectories/longer/tokens?step=longer&page={n}"))
        for n in range(3)
    ]
    assert [int(n) for numbers in shown for n in numbers] == list(range(4000))


def test_the_token_tree_of_a_group_counts_what_is_shared_as_training_does(recorded: Store) -> None:
    from art_core.training.samples import trajectory_samples
    from art_core.training.token_tree import build_tree

    row = rows(recorded, 0)[0]
    assert row.group_id is not None
    group = recorded.group(row.group_id)
    samples = [s for t in group for s in trajectory_samples(t, include_superseded=True)[0]]
    tree = build_tree(samples)
    text = visible(page(recorded, f"/groups/{row.group_id}/tree"))
    assert f"{len(tree):,} tokens stand for {tree.tokens_total:,}" in text
    stretch = visible(page(recorded, f"/groups/{row.group_id}/stretch?number=0", **PART))
    assert "All 3 rollouts" in stretch or "all 3 rollouts" in stretch


def test_a_group_without_tokens_has_no_tree_and_says_so(empty: Store) -> None:
    made = replace(a_trajectory("texts"), steps=(a_step("texts", tokens=None, policy=None),))
    group = empty.save_group(TrajectoryGroup(made.scenario, (made,)))
    assert "No call of this group has tokens" in page(empty, f"/groups/{group}/tree")
