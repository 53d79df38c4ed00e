"""Rewards of valid JSON: answers against a schema, tool calls against their tools' own.

Invariant: a schema is checked when the reward is made, so that a bad answer is a 0.0 and a bad schema an
error.
"""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel
from referencing import Registry
from referencing.exceptions import Unresolvable

from art_core.errors import ConfigError, RewardError
from art_core.rewards.compose import Measure
from art_core.rewards.reading import answer_text, tool_calls, unfenced
from art_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class ValidJSON(Measure):
    """1.0 when the answer is JSON that a schema allows, 0.0 otherwise.

    Attributes:
        schema: a JSON Schema (the draft that it names, else 2020-12), or a pydantic model; None: any JSON.
        fenced: the JSON may be inside of a code fence.
        key: of the agent's output, where the answer is parsed already (``structured_response`` of
            LangChain's agents); None: the answer is text.
        node: whose last message is the answer; None: the agent's output, or its last message.

    Raises:
        ConfigError: the schema is none.
    """

    schema: Mapping[str, Any] | type[BaseModel] | None = None
    fenced: bool = True
    key: str | None = None
    node: str | None = None
    _: KW_ONLY
    name: str = "valid_json"

    def __post_init__(self) -> None:
        _validator(self.schema, f"reward {self.name!r}", ConfigError)

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """Whether it is valid."""
        if self.key is not None:
            found = self._parsed(trajectory, output, self.key)
        else:
            text = answer_text(trajectory, output, self.node, self.name)
            try:
                found = json.loads(unfenced(text) if self.fenced else text, parse_constant=_no_json)
            except (ValueError, RecursionError):
                return 0.0
        what = f"reward {self.name!r}"
        return float(_is_valid(_validator(self.schema, what, ConfigError), found, what))

    def _parsed(self, trajectory: Trajectory, output: object, key: str) -> Any:
        state = cast("Mapping[str, Any]", output) if isinstance(output, Mapping) else {}
        if key not in state:
            raise RewardError(
                f"reward {self.name!r}: the output of trajectory {trajectory.id} has no {key!r} "
                f"(it has: {', '.join(map(repr, state)) or type(output).__name__})"
            )
        found = state[key]
        return found.model_dump(mode="json") if isinstance(found, BaseModel) else found


@dataclass(frozen=True, slots=True)
class ValidToolCalls(Measure):
    """Share of the tool calls whose arguments the tool's own schema allows; 1.0 when none were made.

    A call of a tool that the request did not offer is not valid.

    Attributes:
        node: whose calls; None: everybody's.
    """

    node: str | None = None
    _: KW_ONLY
    name: str = "valid_tool_calls"

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The share."""
        made = tool_calls(trajectory, self.node)
        valid = 0
        for call in made:
            if call.arguments is None or call.spec is None:
                continue
            parameters = cast("Mapping[str, Any]", call.spec.get("parameters") or {})
            what = f"reward {self.name!r}: parameters of tool {call.name!r}"
            valid += _is_valid(_validator(parameters, what, RewardError), dict(call.arguments), what)
        return valid / len(made) if made else 1.0


def _validator(
    schema: Mapping[str, Any] | type[BaseModel] | None, what: str, error: type[ConfigError | RewardError]
) -> Validator:
    if isinstance(schema, type):
        schema = schema.model_json_schema()
    if schema is not None and not isinstance(cast(object, schema), Mapping):
        raise error(f"{what}: schema={schema!r}: expected a JSON Schema as a mapping, or a pydantic model")
    plain = dict(schema or {})
    kind = validator_for(plain)
    try:
        kind.check_schema(plain)
    except SchemaError as bad:
        raise error(f"{what}: no JSON Schema: {bad.message} (at {bad.json_path})") from None
    # Without a registry of its own, a schema that refers to an address would have it fetched.
    return kind(plain, registry=Registry())


def _is_valid(validator: Validator, found: Any, what: str) -> bool:
    try:
        return validator.is_valid(found)
    except Unresolvable as elsewhere:
        raise RewardError(
            f"{what}: the schema refers to {elsewhere.ref!r}, which is not in it, and nothing is fetched; "
            "put it into the schema's own $defs"
        ) from None


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
