"""Groups on their way to trainer processes: what training reads of them, with shared tokens sent once.

Invariant: a trainer makes the same of what arrives as of what was sent.

Prompts of an agent repeat each other: the next turn's is this turn's with more behind it, and all rollouts of
a scenario begin alike. As Python's integers they would be most of a message, and of the time that it takes.
So a prompt goes as a number of ids that an earlier text of its group begins with, and the rest. Texts of
messages and what spans hold are for people and judges, and stay behind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from art_core.types import Step, StepTokens, TrajectoryGroup

Ids = tuple[int, ...]
Text = tuple[Ids, Ids]
"""A prompt and its answer."""


@dataclass(frozen=True, slots=True)
class SentTokens:
    """A step's tokens.

    Attributes:
        earlier: the step whose text, prompt and answer, the prompt begins like; counted in the group.
        shared: how many ids of that text the prompt begins with.
        rest: of the prompt.
        completion: as in `StepTokens`.
        logprobs: as in `StepTokens`.
    """

    earlier: int
    shared: int
    rest: Ids
    completion: Ids
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SentGroup:
    """A group without what training does not read, and its steps' tokens.

    Attributes:
        group: its steps have no tokens.
        tokens: of all steps in their order; None where there were none.
    """

    group: TrajectoryGroup
    tokens: tuple[SentTokens | None, ...]


def pack(groups: Iterable[TrajectoryGroup]) -> list[SentGroup]:
    """What to send."""
    return [_packed(group) for group in groups]


def unpack(sent: Iterable[SentGroup]) -> list[TrajectoryGroup]:
    """The groups that `pack` was given, without texts and spans."""
    return [_unpacked(group) for group in sent]


def _packed(group: TrajectoryGroup) -> SentGroup:
    texts: list[Text] = []
    tokens: list[SentTokens | None] = []
    first = 0  # of the rollout before: a rollout begins like that one, and goes on from its own last turn
    for trajectory in group:
        began = len(texts)
        for step in trajectory.steps:
            known = step.tokens
            if known is None:
                tokens.append(None)
                texts.append(((), ()))
                continue
            earlier = len(texts) - 1 if len(texts) > began else first
            shared = continued(texts[earlier], known.prompt) if texts else 0
            tokens.append(
                SentTokens(earlier, shared, known.prompt[shared:], known.completion, known.logprobs)
            )
            texts.append((known.prompt, known.completion))
        first = began if len(texts) > began else first
    bare = (replace(t, steps=tuple(map(_without_texts, t.steps)), spans=()) for t in group.trajectories)
    return SentGroup(group.with_trajectories(tuple(bare)), tuple(tokens))


def _without_texts(step: Step) -> Step:
    return replace(step, messages=(), tools=(), response=None, tokens=None)


def _unpacked(sent: SentGroup) -> TrajectoryGroup:
    texts: list[Text] = []
    found: list[StepTokens | None] = []
    for tokens in sent.tokens:
        if tokens is None:
            found.append(None)
            texts.append(((), ()))
            continue
        prompt = _begun(texts[tokens.earlier], tokens.shared, tokens.rest) if texts else tokens.rest
        found.append(StepTokens(prompt, tokens.completion, tokens.logprobs))
        texts.append((prompt, tokens.completion))
    each = iter(found)
    return sent.group.with_trajectories(
        [
            replace(t, steps=tuple(replace(step, tokens=next(each)) for step in t.steps))
            for t in sent.group.trajectories
        ]
    )


def _begun(text: Text, shared: int, rest: Ids) -> Ids:
    prompt, answer = text
    if shared <= len(prompt):
        return prompt[:shared] + rest
    return prompt + (answer[: shared - len(prompt)] + rest)


def continued(text: Text, prompt: Ids) -> int:
    """How many ids of a text a later prompt begins with."""
    before, answer = text
    shared = common(before, prompt)
    if shared < len(before):
        return shared
    return shared + common(answer, prompt[shared : shared + len(answer)])


def common(first: Ids, second: Ids) -> int:
    """How many ids two texts begin with alike."""
    alike, most = 0, min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    while most - alike > 1:  # alike so far, and different somewhere before `most`
        middle = (alike + most) // 2
        if first[alike:middle] == second[alike:middle]:
            alike = middle
        else:
            most = middle
    return alike
