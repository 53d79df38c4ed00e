"""The vocabulary as rows, and rows as the vocabulary.

Invariant: ``*_from_row(*_row(x)) == x`` for everything made of JSON values (a tuple inside a message or
a scenario comes back as a list). Other objects, which a scenario's inputs may hold, are kept one-way:
in pydantic's JSON form where it has one, else as ``{"type": ..., "repr": ...}``.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from pydantic_core import to_jsonable_python

from art_core.errors import StoreError
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)

Row = dict[str, Any]

_RAW, _ZLIB = b"\x00", b"\x01"
_WORTH_COMPRESSING = 256  # bytes; setting zlib up costs more than it saves below


def pack(data: bytes) -> bytes:
    """Bytes, compressed where that makes them smaller; the first byte says whether."""
    if len(data) >= _WORTH_COMPRESSING:
        small = zlib.compress(data, 1)
        if len(small) < len(data):
            return _ZLIB + small
    return _RAW + data


def unpack(data: bytes) -> bytes:
    """The inverse of `pack`."""
    body = data[1:]
    return zlib.decompress(body) if data[:1] == _ZLIB else body


def _foreign(value: Any) -> Any:
    return to_jsonable_python(
        value, fallback=lambda v: {"type": f"{type(v).__module__}.{type(v).__qualname__}", "repr": repr(v)}
    )


def to_json(value: Any) -> str:
    """Compact JSON, always encodable as UTF-8. Infinities and NaN are written as Python writes them."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_foreign)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a model may well sample: escape instead
        return json.dumps(value, separators=(",", ":"), default=_foreign)
    return text


def _pack_json(value: Any) -> bytes:
    return pack(to_json(value).encode())


def _unpack_json(data: bytes) -> Any:
    return json.loads(unpack(data))


def clean_text(text: str | None) -> str | None:
    """Free text that no database refuses; half surrogates are written as escapes."""
    return text if text is None else text.encode("utf-8", "backslashreplace").decode()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as packed little-endian int32."""
    return pack(struct.pack(f"<{len(ids)}i", *ids))


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    raw = unpack(data)
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def pack_logprobs(logprobs: Sequence[float | None]) -> bytes:
    """Logprobs as packed little-endian float64; NaN stands for None (no step holds a NaN of its own)."""
    return pack(struct.pack(f"<{len(logprobs)}d", *(math.nan if p is None else p for p in logprobs)))


def unpack_logprobs(data: bytes) -> tuple[float | None, ...]:
    """The inverse of `pack_logprobs`."""
    raw = unpack(data)
    return tuple(None if math.isnan(p) else p for p in struct.unpack(f"<{len(raw) // 8}d", raw))


# -- scenarios ---------------------------------------------------------------------------------------


def scenario_row(scenario: Scenario) -> Row:
    """A scenario under the digest of its content.

    Raises:
        StoreError: it holds something that cannot be written as JSON.
    """
    try:
        body = to_json([scenario.id, dict(scenario.inputs), dict(scenario.metadata)]).encode()
    except (TypeError, ValueError, RecursionError) as unwritable:
        raise StoreError(
            f"scenario {scenario.id!r} cannot be recorded: {unwritable}; give inputs and metadata that JSON "
            "can hold"
        ) from unwritable
    digest = blake2b(body, digest_size=16).digest()
    return {"digest": digest, "scenario_id": scenario.id, "body": pack(body)}


def scenario_from_body(body: bytes) -> Scenario:
    """The inverse of `scenario_row`."""
    return Scenario(*_unpack_json(body))


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


def trajectory_from_row(row: Any, scenario: Scenario, steps: Iterable[Step]) -> Trajectory:
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
    )


# -- steps -------------------------------------------------------------------------------------------


def step_row(step: Step) -> Row:
    """A step.

    Raises:
        StoreError: it holds something that cannot be written.
    """
    try:
        return _step_row(step)
    except (TypeError, ValueError, RecursionError, struct.error) as unwritable:
        raise StoreError(
            f"step {step.id} of rollout {step.rollout_id} cannot be recorded: {unwritable}"
        ) from unwritable


def _step_row(step: Step) -> Row:
    identity, tokens, policy = step.identity, step.tokens, step.policy
    return {
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
            ]
        ),
        "started_at": step.started_at,
        "duration": step.duration,
        "messages": _pack_json([_plain(m) for m in step.messages]),
        "tools": _pack_json([_plain(t) for t in step.tools]),
        "sampling": to_json(_plain(step.sampling)),
        "response": None if step.response is None else _pack_json(_plain(step.response)),
        "finish_reason": step.finish_reason,
        "usage": to_json(_plain(step.usage)),
        "untrainable": clean_text(step.untrainable),
        "error": clean_text(step.error),
        "prompt_tokens": tokens and pack_ids(tokens.prompt),
        "completion_tokens": tokens and pack_ids(tokens.completion),
        "logprobs": tokens and pack_logprobs(tokens.logprobs),
    }


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return mapping if isinstance(mapping, dict) else dict(mapping)


def step_from_row(row: Any) -> Step:
    """The inverse of `step_row`."""
    namespace, graph_step, call_index, attempt, run_id, parent_run_id, tags = json.loads(row.identity)
    return Step(
        id=row.id,
        rollout_id=row.rollout_id,
        messages=tuple(_unpack_json(row.messages)),
        model=row.model,
        started_at=row.started_at,
        duration=row.duration,
        call_id=row.call_id,
        choice=row.choice,
        tools=tuple(_unpack_json(row.tools)),
        sampling=json.loads(row.sampling),
        response=None if row.response is None else _unpack_json(row.response),
        finish_reason=row.finish_reason,
        tokens=None
        if row.prompt_tokens is None
        else StepTokens(
            unpack_ids(row.prompt_tokens),
            unpack_ids(row.completion_tokens),
            unpack_logprobs(row.logprobs),
        ),
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
        ),
        untrainable=row.untrainable,
        error=row.error,
        usage=json.loads(row.usage),
    )
