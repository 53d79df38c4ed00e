"""The vocabulary: steps, trajectories, groups, scenarios, policy versions.

Invariant: everything here is immutable, and a rollout that failed has no reward.

A *step* is one LLM call. Steps form a *trajectory* (one rollout of an agent); trajectories of one
*scenario* form a *group*. Messages and tools are kept in OpenAI's wire format, as they were sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, cast

from art_core.errors import RewardError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from art_core.views import TreeNode

Message = Mapping[str, Any]
"""One chat message in OpenAI's wire format (``role``, ``content``, ``tool_calls``, ...)."""

ToolSpec = Mapping[str, Any]
"""One tool in OpenAI's wire format (``{"type": "function", "function": {...}}``)."""


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """A policy's name on the server: ``<model>@<number>``. Version 0 is the policy before training."""

    model: str
    number: int

    @property
    def name(self) -> str:
        """The name to send as ``model`` in a request."""
        return f"{self.model}@{self.number}"

    @classmethod
    def parse(cls, name: str) -> "PolicyVersion | None":
        """Read ``<model>@<number>``; None when the name has another form."""
        model, at, number = name.rpartition("@")
        return cls(model, int(number)) if at and model and number.isdecimal() else None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Scenario:
    """One situation to put the agent in; its rollouts form a group."""

    id: str
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The exact tokens of one call.

    Attributes:
        prompt: ids that the server fed to the model  [prompt_tokens].
        completion: ids that it sampled, end token included  [completion_tokens].
        logprobs: natural-log probability of each sampled id under the policy that sampled it
            [completion_tokens]; None where the server gave null or NaN.

    Raises:
        ValueError: the lengths differ or the prompt is empty.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a step's prompt has no token ids")
        if len(self.completion) != len(self.logprobs):
            raise ValueError(f"{len(self.completion)} sampled ids but {len(self.logprobs)} logprobs")
        if any(p is not None and math.isnan(p) for p in self.logprobs):
            clean = tuple(None if p is None or math.isnan(p) else p for p in self.logprobs)
            object.__setattr__(self, "logprobs", clean)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIdentity:
    """Where in the agent a call was made. Empty for calls that no graph made.

    Attributes:
        node: LangGraph node name; ambiguous across subgraphs.
        namespace: full ``langgraph_checkpoint_ns`` (``work:<uuid>|inner:<uuid>``): the branch.
        graph_step: LangGraph's superstep.
        call_index: 0 for the first call in this namespace and attempt, then 1, 2, ...
        attempt: 1 for the first execution of this namespace; node retries and interrupt + resume count on.
        run_id: LangChain run id of the call.
        parent_run_id: LangChain run id of what made the call.
        tags: LangChain tags in force.
        retries: how often each node that encloses the call had been retried by then, outermost first and
            its own node last; empty when none had. A retried node runs its subgraphs under new namespaces.
    """

    node: str | None = None
    namespace: str = ""
    graph_step: int | None = None
    call_index: int = 0
    attempt: int = 1
    run_id: str | None = None
    parent_run_id: str | None = None
    tags: tuple[str, ...] = ()
    retries: tuple[int, ...] = ()

    @property
    def enclosing(self) -> list[str]:
        """The namespaces of the nodes that enclose the call, outermost first and its own node last."""
        return enclosing_nodes(self.namespace)


def enclosing_nodes(namespace: str) -> list[str]:
    """The namespaces of the nodes on a namespace's path.

    ``work:<uuid>|1|inner:<uuid>`` has ``work:<uuid>`` and itself: the number counts runs of subgraphs.
    """
    parts = namespace.split("|")
    return ["|".join(parts[: i + 1]) for i, part in enumerate(parts) if ":" in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One LLM call, as the server saw it.

    Attributes:
        id: unique; choices of one call (``n > 1``) are steps that share ``call_id``.
        rollout_id: the trajectory that it belongs to.
        messages: the request's messages.
        tools: the request's tools.
        sampling: the request's other parameters (``temperature``, ``tool_choice``, ``stop``, ...).
        response: the assistant message; None when the call failed.
        finish_reason: OpenAI's (``stop``, ``length``, ``tool_calls``, ``content_filter``).
        tokens: exact ids and logprobs; None when the server gave none.
        model: the name that was asked for.
        policy: the version that answered; None for models that are not policies of ours.
        identity: node, branch, attempt.
        started_at: Unix time, seconds.
        duration: seconds until the last token.
        time_to_first_token: seconds until the first token of a streamed answer; None for answers that came
            whole, which do not tell.
        raw_logprobs: whether the server's log-probabilities are the model's own (vLLM's ``raw_logprobs``),
            and not those of what was sampled from: they differ at other temperatures than 1.
        untrainable: why this step must not be trained; None when it can be.
        error: the call's error; None when it answered.
        usage: the server's token counts.
    """

    id: str
    rollout_id: str
    messages: tuple[Message, ...]
    model: str
    started_at: float
    duration: float
    call_id: str = ""
    choice: int = 0
    tools: tuple[ToolSpec, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    response: Message | None = None
    finish_reason: str | None = None
    tokens: StepTokens | None = None
    policy: PolicyVersion | None = None
    identity: StepIdentity = field(default_factory=StepIdentity)
    time_to_first_token: float | None = None
    raw_logprobs: bool = False
    untrainable: str | None = None
    error: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def trainable(self) -> bool:
        """Whether exact tokens of a policy of ours are here to be trained."""
        return self.untrainable is None and self.tokens is not None and self.policy is not None

    def message(self) -> str:
        """The assistant's text; empty when it answered with tool calls alone, or failed."""
        content = self.response.get("content") if self.response else None
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that the agent did: a node, a tool, a retriever, an LLM call; as a tracer sees it.

    Attributes:
        id: LangChain's run id.
        kind: ``chain`` (graphs, nodes, runnables), ``llm``, ``tool`` or ``retriever``.
        name: of the node, tool, model or runnable.
        started_at: Unix time, seconds.
        duration: seconds.
        status: ``ok``, ``error``, ``interrupted`` (waits for a person) or ``cancelled`` (never ended).
        parent_id: the span that it was part of.
        node: LangGraph node name.
        namespace: full ``langgraph_checkpoint_ns``.
        attempt: of the node, as in `StepIdentity`.
        inputs: what went in, as JSON can hold it.
        outputs: what came out; the interrupts' values when it was interrupted.
        error: the exception.
        tags: LangChain tags in force.
    """

    id: str
    kind: str
    name: str
    started_at: float
    duration: float
    status: str = "ok"
    parent_id: str | None = None
    node: str | None = None
    namespace: str = ""
    attempt: int = 1
    inputs: Any = None
    outputs: Any = None
    error: str | None = None
    tags: tuple[str, ...] = ()


class RolloutStatus(StrEnum):
    """What became of a rollout."""

    RUNNING = "running"
    """Still going, paused, or its process died before it ended."""
    FINISHED = "finished"
    """The agent returned."""
    FAILED = "failed"
    """It raised, timed out, was cancelled, or its judge broke; ``failure`` says which. Never has a reward."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout has no reward.

    Attributes:
        cause: ``exception``, ``timeout``, ``cancelled``, ``no_policy_calls``, ``reward``, ``judge``, or
            ``worker`` (the process that ran it died).
        message: what a person needs to read.
        error_type: qualified name of the exception's class, where there was one.
    """

    cause: str
    message: str
    error_type: str | None = None


def check_reward(reward: float, what: str) -> float:
    """Return the reward as a float.

    Raises:
        RewardError: it is not a finite number; the message names ``what``.
    """
    # Rewards come from users' functions, whatever those are annotated with.
    if isinstance(reward, bool) or not isinstance(cast(object, reward), int | float):
        raise RewardError(f"{what}: a reward is a number, got {type(reward).__name__} {reward!r}")
    if not math.isfinite(reward):
        raise RewardError(
            f"{what}: the reward is {reward!r}; give a finite number, or end the rollout as failed"
        )
    return float(reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout: its steps in the order in which they started, and what it was worth.

    Attributes:
        reward: None until scored, and always None when the rollout failed.
        components: named parts of the reward.
        step_rewards: reward by step id, where a reward was given per step.
        node_rewards: reward by node name, where a reward was given per node.
        metrics: numbers about the rollout that are not rewards.
        faults: what capture could not do, by kind, with its count (``unattributed_calls``, ...).
        started_at: Unix time, seconds.
        duration: seconds.
        spans: what else was traced (nodes, tools, retrievers), in the order in which it started.
    """

    id: str
    scenario: Scenario
    steps: tuple[Step, ...] = ()
    group_id: str | None = None
    status: RolloutStatus = RolloutStatus.RUNNING
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    step_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    node_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    faults: Mapping[str, int] = field(default_factory=dict[str, int])
    failure: Failure | None = None
    started_at: float = 0.0
    duration: float | None = None
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if self.reward is not None:
            check_reward(self.reward, f"trajectory {self.id}")
            if self.status is RolloutStatus.FAILED:
                cause = self.failure.cause if self.failure else "unknown cause"
                raise RewardError(
                    f"trajectory {self.id} failed ({cause}) and cannot have a reward; a failure is no score"
                )

    def with_reward(self, reward: float, *, components: Mapping[str, float] | None = None) -> Self:
        """The same trajectory, scored.

        Raises:
            RewardError: the reward is not finite, or the rollout failed.
        """
        return replace(
            self,
            reward=check_reward(reward, f"trajectory {self.id}"),
            components=self.components if components is None else components,
        )

    @property
    def failed(self) -> bool:
        """Whether the rollout ended without being scorable."""
        return self.status is RolloutStatus.FAILED

    # Views are imported when somebody looks: recording needs no console.

    def messages(self, node: str | None = None) -> tuple[Message, ...]:
        """What the models were given and said, each message once; of one node if it is named."""
        from art_core.views import conversation

        return conversation(self, node)

    def tree(self) -> "TreeNode":
        """Who called whom: the nodes, subgraphs and attempts, with the calls that each made."""
        from art_core.views import call_tree

        return call_tree(self)

    def render(self, node: str | None = None, *, width: int = 80, color: bool = False) -> str:
        """The rollout step by step as text for a terminal; of one node if it is named."""
        from art_core.views import rendered, trajectory_view

        return rendered(trajectory_view(self, node), width=width, color=color)

    def __rich__(self) -> "RenderableType":
        from art_core.views import trajectory_view

        return trajectory_view(self)

    def _repr_html_(self) -> str:
        from art_core.views import trajectory_html

        return trajectory_html(self)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Rollouts of one scenario, to be compared with each other."""

    scenario: Scenario
    trajectories: tuple[Trajectory, ...]
    id: str = ""

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Members that have a reward."""
        return tuple(t for t in self.trajectories if t.reward is not None)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the scored members, in order."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    def with_trajectories(self, trajectories: Sequence[Trajectory]) -> "TrajectoryGroup":
        """The same group with other members."""
        return replace(self, trajectories=tuple(trajectories))

    def render(self, *, width: int = 80, color: bool = False) -> str:
        """The members as a table, as text for a terminal."""
        from art_core.views import group_view, rendered

        return rendered(group_view(self), width=width, color=color)

    def __rich__(self) -> "RenderableType":
        from art_core.views import group_view

        return group_view(self)

    def _repr_html_(self) -> str:
        from art_core.views import group_html

        return group_html(self)
