"""A Langfuse trace as a trajectory, and as a scenario to replay.

Invariant: a generation becomes one step of text that is not trainable and says why; everything else becomes a
span; nothing is made up: what Langfuse does not hold is missing here, too.

Node, branch and attempt come from LangGraph's metadata, which Langfuse's callback handler keeps.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from art_core.types import (
    Failure,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    Trajectory,
    TrajectoryGroup,
)
from art_langgraph.langfuse.messages import answered, asked, parsed, plain
from art_langgraph.langfuse.scores import NODE_REWARD, REWARD, STEP_REWARD
from art_langgraph.langfuse.traces import Json, TraceRecord, seconds

_KINDS = {"TOOL": "tool", "RETRIEVER": "retriever", "GENERATION": "llm"}
SAID = ("scores", "reward")
"""What metadata keeps of scores; see `said_of`."""

_HIDDEN = "DEBUG"
"""Level of what LangGraph marks as its own plumbing."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What a trace's scores say of it.

    Attributes:
        reward: the latest score of the reward's name; None when there is none.
        comment: that came with it.
        author: who gave it.
        components: the latest of each other number, by name; true is 1 and false is 0.
        step_rewards: by step.
        node_rewards: by node.
    """

    reward: float | None
    comment: str
    author: str
    components: Mapping[str, float]
    step_rewards: Mapping[str, float]
    node_rewards: Mapping[str, float]


def trajectory_id_of(trace_id: str) -> str:
    """The id of the trajectory that a trace becomes."""
    return f"t-langfuse-{trace_id}"


def trajectory_of(record: TraceRecord, *, reward: str = REWARD) -> Trajectory:
    """A trace as a trajectory.

    Args:
        record: the trace.
        reward: name of the score that is the reward; the other numbers become its components.
    """
    trajectory = trajectory_id_of(record.id)
    where = _Places(record)
    started = [seconds(o.get("startTime")) or 0.0 for o in record.observations]
    ended = [seconds(o.get("endTime")) or 0.0 for o in record.observations]
    began = min(started, default=0.0)
    failure = _failure(record)
    worth = worth_of(record, reward=reward)
    return Trajectory(
        id=trajectory,
        scenario=scenario_of(record),
        steps=tuple(_step(o, record, where) for o in record.observations if o["type"] == "GENERATION"),
        status=RolloutStatus.FAILED if failure else RolloutStatus.FINISHED,
        failure=failure,
        reward=None if failure else worth.reward,
        components=worth.components,
        step_rewards=worth.step_rewards,
        node_rewards=worth.node_rewards,
        metadata={"langfuse": _about(record) | said_of(record, reward)},
        started_at=began,
        duration=max(0.0, max(ended, default=began) - began),
        spans=tuple(_span(o, where) for o in record.observations if o.get("level") != _HIDDEN),
    )


def scenario_of(record: TraceRecord) -> Scenario:
    """What a trace's agent was given, to be tried again: its root's input, messages in OpenAI's format.

    Traces of one name with equal inputs have scenarios of one id.
    """
    roots = record.roots
    given = record.about.get("input", roots[0].get("input") if roots else None)
    value = plain(_without_ids(parsed(given)))
    inputs: dict[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {"input": value}
    if set(inputs) == {"role", "content"}:
        inputs = {"messages": [inputs]}
    name = record.about.get("traceName") or (roots[0].get("name") if roots else None) or "trace"
    content = json.dumps([name, inputs], sort_keys=True, ensure_ascii=False).encode(errors="replace")
    about = {"trace_id": record.id, "name": name}
    return Scenario(f"langfuse-{sha256(content).hexdigest()[:16]}", inputs, {"langfuse": about})


def scenarios_from(traces: Iterable[Trajectory | TraceRecord]) -> list[Scenario]:
    """The scenarios of traces, or of trajectories that were imported; each once."""
    found: dict[str, Scenario] = {}
    for trace in traces:
        scenario = trace.scenario if isinstance(trace, Trajectory) else scenario_of(trace)
        found.setdefault(scenario.id, scenario)
    return list(found.values())


def groups_from(trajectories: Iterable[Trajectory], *, smallest: int = 2) -> list[TrajectoryGroup]:
    """Imported trajectories of one scenario, side by side, as a judge compares them.

    Args:
        trajectories: any.
        smallest: groups with fewer members are left out.
    """
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        members[trajectory.scenario.id].append(trajectory)
    return [
        TrajectoryGroup(found[0].scenario, tuple(found))
        for found in members.values()
        if len(found) >= smallest
    ]


def worth_of(record: TraceRecord, *, reward: str = REWARD) -> Worth:
    """What a trace's scores say of it; categories and texts stay in the trajectory's metadata."""
    roots = {o["id"] for o in record.roots}
    generations = {o["id"] for o in record.observations if o["type"] == "GENERATION"}
    numbers: dict[str, float] = {}
    steps: dict[str, float] = {}
    nodes: dict[str, float] = {}
    last: Json = {}
    for score in record.scores:
        value, observation = _number(score), _observation(score)
        if value is None:
            continue
        if observation is None or (observation in roots and observation not in generations):
            numbers[score["name"]] = value
            last = score if score["name"] == reward else last
        elif score["name"] == NODE_REWARD and isinstance(
            node := (score.get("metadata") or {}).get("node"), str
        ):
            nodes[node] = value
        elif score["name"] in (STEP_REWARD, reward) and observation in generations:
            steps[_step_id(record.id, observation)] = value
    about = last.get("metadata") or {}
    source = about.get("author") or last.get("authorUserId") or str(last.get("source", "")).lower()
    found = numbers.pop(reward, None)
    return Worth(
        reward=found,
        comment=last.get("comment") or "",
        author=f"langfuse:{source}" if source else "langfuse",
        components={name.removeprefix(f"{reward}/"): value for name, value in numbers.items()},
        step_rewards=steps,
        node_rewards=nodes,
    )


class _Places:
    """Where in a graph each observation is."""

    def __init__(self, record: TraceRecord) -> None:
        self.by_id = {o["id"]: o for o in record.observations}
        self._attempts: dict[str, int] = {}
        self._calls: dict[tuple[str, int], int] = defaultdict(int)
        runs: dict[str, int] = defaultdict(int)
        for o in record.observations:  # in the order in which they began
            if self._is_node(o):
                namespace = self.namespace(o)
                runs[namespace] += 1
                self._attempts[o["id"]] = runs[namespace]

    def _is_node(self, o: Json) -> bool:
        node, above = _metadata(o).get("langgraph_node"), self.by_id.get(o.get("parentObservationId") or "")
        namespace = self.namespace(o)
        entered = above is None or self.namespace(above) != namespace
        return bool(namespace) and o.get("name") == node and o["type"] not in _KINDS and entered

    @staticmethod
    def namespace(o: Json) -> str:
        return str(_metadata(o).get("langgraph_checkpoint_ns") or "")

    def _above(self, o: Json) -> Iterator[Json]:
        """Its ancestors, the nearest first; each once, should a file go in circles."""
        seen = {o["id"]}
        above = self.by_id.get(o.get("parentObservationId") or "")
        while above is not None and above["id"] not in seen:
            yield above
            seen.add(above["id"])
            above = self.by_id.get(above.get("parentObservationId") or "")

    def attempt(self, o: Json) -> int:
        for run in (o, *self._above(o)):
            if run["id"] in self._attempts and self.namespace(run) == self.namespace(o):
                return self._attempts[run["id"]]
        return 1

    def call_index(self, o: Json) -> int:
        key = self.namespace(o), self.attempt(o)
        self._calls[key] += 1
        return self._calls[key] - 1

    def parent(self, o: Json) -> str | None:
        """The nearest ancestor that is not LangGraph's plumbing."""
        return next((above["id"] for above in self._above(o) if above.get("level") != _HIDDEN), None)


def _step(o: Json, record: TraceRecord, where: _Places) -> Step:
    messages, tools = asked(o.get("input"))
    metadata = _metadata(o)
    failed = o.get("level") == "ERROR"
    started = seconds(o.get("startTime")) or 0.0
    graph_step = metadata.get("langgraph_step")
    finish = metadata.get("finish_reason")
    first_token = seconds(o.get("completionStartTime"))
    return Step(
        id=_step_id(record.id, o["id"]),
        rollout_id=trajectory_id_of(record.id),
        messages=messages,
        tools=tools,
        model=o.get("model") or o.get("name") or "unknown",
        started_at=started,
        duration=_lasted(o, started),
        time_to_first_token=None if first_token is None else max(0.0, first_token - started),
        call_id=o["id"],
        sampling=_mapping(parsed(o.get("modelParameters"))),
        response=answered(o.get("output")),
        finish_reason=finish if isinstance(finish, str) else None,
        identity=StepIdentity(
            node=metadata.get("langgraph_node"),
            namespace=where.namespace(o),
            graph_step=graph_step if isinstance(graph_step, int) else None,
            call_index=where.call_index(o),
            attempt=where.attempt(o),
            run_id=o["id"],
            parent_run_id=where.parent(o),
            tags=_tags(metadata),
        ),
        untrainable=f"no token ids: imported from Langfuse (trace {record.id}), which keeps text alone",
        error=(o.get("statusMessage") or "failed, Langfuse does not say why") if failed else None,
        usage=_usage(o),
    )


def _span(o: Json, where: _Places) -> Span:
    metadata = _metadata(o)
    started = seconds(o.get("startTime")) or 0.0
    failed = o.get("level") == "ERROR"
    return Span(
        id=o["id"],
        kind=_KINDS.get(o["type"], "chain"),
        name=o.get("name") or o["type"].lower(),
        started_at=started,
        duration=_lasted(o, started),
        status="error" if failed else "cancelled" if o.get("endTime") is None else "ok",
        parent_id=where.parent(o),
        node=metadata.get("langgraph_node"),
        namespace=where.namespace(o),
        attempt=where.attempt(o),
        inputs=plain(o.get("input")),
        outputs=plain(o.get("output")),
        error=o.get("statusMessage") if failed else None,
        tags=_tags(metadata),
    )


def _failure(record: TraceRecord) -> Failure | None:
    """Why a trace's last root failed; an earlier one was interrupted and resumed."""
    roots = record.roots
    if not roots or roots[-1].get("level") != "ERROR":
        return None
    return Failure("exception", roots[-1].get("statusMessage") or "failed, Langfuse does not say why")


def _about(record: TraceRecord) -> Json:
    shown = ("traceName", "sessionId", "userId", "tags", "environment", "release", "version", "metadata")
    about: Json = {"trace_id": record.id}
    about |= {name: record.about[name] for name in shown if record.about.get(name)}
    prompts = {
        (o["promptName"], o.get("promptVersion"))
        for o in record.observations
        if o.get("promptName") is not None
    }
    if prompts:
        about["prompts"] = [{"name": name, "version": version} for name, version in sorted(prompts)]
    return about


def said_of(record: TraceRecord, reward: str) -> Json:
    """All that a trace's scores say, and which of them is the reward; as its metadata keeps it."""
    kept = ("id", "name", "value", "dataType", "source", "comment", "timestamp", "authorUserId")
    scores = [{k: s[k] for k in kept if s.get(k) is not None} | _observed(s) for s in record.scores]
    return dict(zip(SAID, (scores, reward), strict=True))


def _observed(score: Json) -> Json:
    observation = _observation(score)
    return {"observation": observation} if observation else {}


def _observation(score: Json) -> str | None:
    subject = score.get("subject")
    if isinstance(subject, dict):
        found = cast(Json, subject)
        return found.get("id") if found.get("kind") == "observation" else None
    return score.get("observationId")


def _number(score: Json) -> float | None:
    value, kind = score.get("value"), score.get("dataType", "NUMERIC")
    if kind not in ("NUMERIC", "BOOLEAN") or not isinstance(value, bool | int | float):
        return None
    return float(value)


def _step_id(trace_id: str, observation: str) -> str:
    return f"s-langfuse-{trace_id}-{observation}"


def _metadata(o: Json) -> Mapping[str, Any]:
    return _mapping(parsed(o.get("metadata")))


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _tags(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    tags: Any = parsed(metadata.get("tags"))
    return tuple(str(tag) for tag in cast("Sequence[Any]", tags)) if isinstance(tags, list) else ()


def _lasted(o: Json, started: float) -> float:
    return max(0.0, (seconds(o.get("endTime")) or started) - started)


def _usage(o: Json) -> dict[str, int]:
    """Langfuse counts cached and reasoning tokens apart from the rest."""
    told = _mapping(o.get("usageDetails")) or _mapping(o.get("usage"))
    counts = {name: n for name, n in told.items() if isinstance(n, int) and not isinstance(n, bool)}
    if "prompt_tokens" in counts:
        return {name: n for name, n in counts.items() if name.endswith("_tokens")}
    usage: dict[str, int] = {}
    for prefix, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        parts = [n for part, n in counts.items() if part == prefix or part.startswith(f"{prefix}_")]
        if parts:
            usage[name] = sum(parts)
    if "total" in counts:
        usage["total_tokens"] = counts["total"]
    return usage


def _without_ids(value: Any) -> Any:
    """A graph's input without the ids that LangGraph gives to messages: equal inputs must be equal."""
    if isinstance(value, dict):
        given = cast(Json, value)
        is_message = "content" in given and ("type" in given or "role" in given)
        return {k: _without_ids(v) for k, v in given.items() if not (is_message and k == "id")}
    if isinstance(value, list):
        return [_without_ids(item) for item in cast("list[Any]", value)]
    return value
