"""The vocabulary as rows, and rows as the vocabulary.

Invariant: what is encoded and decoded again equals what it was, for everything made of JSON values (a
tuple inside a message or a scenario comes back as a list). Other objects, which a scenario's inputs may
hold, are kept one-way: in pydantic's JSON form where it has one, else as ``{"type": ..., "repr": ...}``.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from art_core.errors import StoreError
from art_core.store.contents import digest, split
from art_core.store.packing import (
    clean_text,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_from_bytes,
    logprobs_to_bytes,
    pack,
    to_json,
    to_json_bytes,
    unpack,
)
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)

Row = dict[str, Any]

_BLOCK = 256  # prompt tokens in one shared piece: prompts that begin alike share all blocks but the last

# -- scenarios ---------------------------------------------------------------------------------------


def scenario_row(scenario: Scenario) -> Row:
    """A scenario under the digest of its content.

    Raises:
        StoreError: it holds something that cannot be written as JSON.
    """
    try:
        body = to_json_bytes([scenario.id, dict(scenario.inputs), dict(scenario.metadata)])
    except (TypeError, ValueError, RecursionError) as unwritable:
        raise StoreError(
            f"scenario {scenario.id!r} cannot be recorded: {unwritable}; give inputs and metadata that JSON "
            "can hold"
        ) from unwritable
    return {"digest": digest(body), "scenario_id": scenario.id, "body": pack(body)}


def scenario_from_body(body: bytes) -> Scenario:
    """The inverse of `scenario_row`."""
    return Scenario(*json.loads(unpack(body)))


# -- trajectories ------------------------------------------------------------------------------------


def outcome_row(trajectory: Trajectory) -> Row:
    """What may change while a rollout runs and when it ends.

    Raises:
        StoreError: it holds something that cannot be written as JSON.
    """
    failure = trajectory.failure
    try:
        return {
            "status": trajectory.status.value,
            "reward": trajectory.reward,
            "components": to_json(dict(trajectory.components)),
            "step_rewards": to_json(dict(trajectory.step_rewards)),
            "node_rewards": to_json(dict(trajectory.node_rewards)),
            "metrics": to_json(dict(trajectory.metrics)),
            "metadata": to_json(dict(trajectory.metadata)),
            "faults": to_json(dict(trajectory.faults)),
            "failure": None if failure is None else to_json(asdict(failure)),
            "duration": trajectory.duration,
        }
    except (TypeError, ValueError, RecursionError) as unwritable:
        raise StoreError(
            f"trajectory {trajectory.id} cannot be recorded: {unwritable}; give metadata and metrics that "
            "JSON can hold"
        ) from unwritable


def trajectory_row(trajectory: Trajectory, scenario: bytes, run_id: str | None) -> Row:
    """A trajectory without its steps."""
    return outcome_row(trajectory) | {
        "id": trajectory.id,
        "run_id": run_id,
        "group_id": trajectory.group_id or None,
        "scenario": scenario,
        "started_at": trajectory.started_at,
    }


def trajectory_from_row(
    row: Any, scenario: Scenario, steps: Iterable[Step], spans: Iterable[Span] = ()
) -> Trajectory:
    """The inverse of `trajectory_row`."""
    return Trajectory(
        id=row.id,
        scenario=scenario,
        steps=tuple(steps),
        group_id=row.group_id,
        status=RolloutStatus(row.status),
        reward=row.reward,
        components=json.loads(row.components),
        step_rewards=json.loads(row.step_rewards),
        node_rewards=json.loads(row.node_rewards),
        metrics=json.loads(row.metrics),
        metadata=json.loads(row.metadata),
        faults=json.loads(row.faults),
        failure=None if row.failure is None else Failure(**json.loads(row.failure)),
        started_at=row.started_at,
        duration=row.duration,
        spans=tuple(sorted(spans, key=lambda span: span.started_at)),
    )


# -- spans -------------------------------------------------------------------------------------------


def encode_spans(spans: Iterable[Span]) -> bytes:
    """Spans, ready to be written.

    A span whose inputs or outputs JSON cannot hold is kept with their ``repr``: what a tracer saw must not
    keep a rollout from ending.
    """
    return pack(b"[" + b",".join(map(_span_json, spans)) + b"]")


def spans_from_body(body: bytes) -> list[Span]:
    """The inverse of `encode_spans`."""
    return [Span(**values | {"tags": tuple(values.get("tags", ()))}) for values in json.loads(unpack(body))]


def _span_json(span: Span) -> bytes:
    values: Row = {}
    for field in fields(span):
        value = getattr(span, field.name)
        if field.default is MISSING or value is not field.default:  # an array's `!=` would be an array
            values[field.name] = value
    try:
        return to_json_bytes(values)
    except (TypeError, ValueError, RecursionError):
        return to_json_bytes(values | {"inputs": repr(span.inputs), "outputs": repr(span.outputs)})


# -- steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A step as it is written: its row, and the pieces that the row refers to by their digests."""

    row: Row
    pieces: Mapping[bytes, bytes]


def encode_step(step: Step) -> EncodedStep:
    """A step, ready to be written.

    Raises:
        StoreError: it holds something that cannot be written.
    """
    try:
        return _encode_step(step)
    except (TypeError, ValueError, RecursionError, struct.error) as unwritable:
        raise StoreError(
            f"step {step.id} of rollout {step.rollout_id} cannot be recorded: {unwritable}"
        ) from unwritable


def _encode_step(step: Step) -> EncodedStep:
    identity, tokens, policy = step.identity, step.tokens, step.policy
    pieces: dict[bytes, bytes] = {}

    def keep(piece: bytes) -> bytes:
        key = digest(piece)
        pieces[key] = piece
        return key

    prompt = tokens.prompt if tokens else ()
    shared = len(prompt) - len(prompt) % _BLOCK
    blocks = [keep(ids_to_bytes(prompt[i : i + _BLOCK])) for i in range(0, shared, _BLOCK)]
    row: Row = {
        "id": step.id,
        "rollout_id": step.rollout_id,
        "call_id": step.call_id,
        "choice": step.choice,
        "model": step.model,
        "policy_model": policy and policy.model,
        "policy_number": policy and policy.number,
        "node": identity.node,
        "identity": to_json(
            [
                identity.namespace,
                identity.graph_step,
                identity.call_index,
                identity.attempt,
                identity.run_id,
                identity.parent_run_id,
                identity.tags,
                *([identity.retries] if identity.retries else []),  # seldom there; older rows have none
            ]
        ),
        "started_at": step.started_at,
        "duration": step.duration,
        "messages": b"".join(keep(to_json_bytes(_plain(message))) for message in step.messages),
        "tools": keep(to_json_bytes([_plain(tool) for tool in step.tools])) if step.tools else b"",
        "sampling": to_json(_plain(step.sampling)),
        "response": None if step.response is None else pack(to_json_bytes(_plain(step.response))),
        "finish_reason": step.finish_reason,
        "usage": to_json(_plain(step.usage)),
        "untrainable": clean_text(step.untrainable),
        "error": clean_text(step.error),
        "prompt_blocks": b"".join(blocks) if tokens else None,
        "prompt_tokens": pack(ids_to_bytes(prompt[shared:])) if tokens else None,
        "completion_tokens": pack(ids_to_bytes(tokens.completion)) if tokens else None,
        "logprobs": pack(logprobs_to_bytes(tokens.logprobs)) if tokens else None,
        "time_to_first_token": step.time_to_first_token,
        "raw_logprobs": step.raw_logprobs,
    }
    return EncodedStep(row, pieces)


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return mapping if isinstance(mapping, dict) else dict(mapping)


class StepReader:
    """Turns rows of steps back into steps.

    Args:
        pieces: those that the rows refer to, by digest (see `digests`). Each message is decoded once, so
            steps that share it share the object too.
    """

    def __init__(self, pieces: Mapping[bytes, bytes]) -> None:
        self._pieces = pieces
        self._decoded: dict[bytes, Any] = {}

    @staticmethod
    def digests(row: Any) -> list[bytes]:
        """The pieces that a row refers to."""
        return split(row.messages) + split(row.tools) + split(row.prompt_blocks or b"")

    def _json(self, key: bytes) -> Any:
        if key not in self._decoded:
            self._decoded[key] = json.loads(self._pieces[key])
        return self._decoded[key]

    def _tokens(self, row: Any) -> StepTokens | None:
        if row.prompt_tokens is None:
            return None
        blocks = b"".join(self._pieces[key] for key in split(row.prompt_blocks or b""))
        return StepTokens(
            prompt=ids_from_bytes(blocks + unpack(row.prompt_tokens)),
            completion=ids_from_bytes(unpack(row.completion_tokens)),
            logprobs=logprobs_from_bytes(unpack(row.logprobs)),
        )

    def step(self, row: Any) -> Step:
        """The inverse of `encode_step`."""
        namespace, graph_step, call_index, attempt, run_id, parent_run_id, tags, *more = json.loads(
            row.identity
        )
        return Step(
            id=row.id,
            rollout_id=row.rollout_id,
            messages=tuple(self._json(key) for key in split(row.messages)),
            model=row.model,
            started_at=row.started_at,
            duration=row.duration,
            call_id=row.call_id,
            choice=row.choice,
            tools=tuple(self._json(row.tools)) if row.tools else (),
            sampling=json.loads(row.sampling),
            response=None if row.response is None else json.loads(unpack(row.response)),
            finish_reason=row.finish_reason,
            tokens=self._tokens(row),
            policy=None if row.policy_model is None else PolicyVersion(row.policy_model, row.policy_number),
            identity=StepIdentity(
                node=row.node,
                namespace=namespace,
                graph_step=graph_step,
                call_index=call_index,
                attempt=attempt,
                run_id=run_id,
                parent_run_id=parent_run_id,
                tags=tuple(tags),
                retries=tuple(more[0]) if more else (),
            ),
            time_to_first_token=row.time_to_first_token,
            raw_logprobs=bool(row.raw_logprobs),
            untrainable=row.untrainable,
            error=row.error,
            usage=json.loads(row.usage),
        )
