"""Prompts of Langfuse's prompt management, named in scenarios.

Invariant: a scenario that was resolved holds the prompt's text, and in its metadata which version it is of;
so what an agent was given is on record, and its traces link to the prompt.

A reference stands in place of an input's value: ``{"langfuse_prompt": "name", "label": "production"}``, or
with ``version`` in place of ``label``, and with ``variables`` for what the prompt leaves open.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from art_core.errors import ConfigError
from art_core.types import Scenario
from art_langgraph.langfuse.client import LangfuseClient

REFERENCE = "langfuse_prompt"
"""The key by which a reference is known."""

METADATA = "langfuse_prompts"
"""Where a scenario's metadata says which prompts it was given."""

_KNOWN = frozenset({REFERENCE, "label", "version", "variables"})


def langfuse_prompt(
    name: str, *, label: str | None = None, version: int | None = None, **variables: Any
) -> dict[str, Any]:
    """A reference to a prompt, for a scenario's inputs.

    Args:
        name: of the prompt.
        label: which version, by its label; ``production`` unless a version is given.
        version: which version, by its number.
        variables: values for what the prompt leaves open.

    Raises:
        ConfigError: both a label and a version are given.
    """
    given = {"label": label, "version": version, "variables": variables or None}
    return _checked({REFERENCE: name} | {k: v for k, v in given.items() if v is not None}, "the reference")


def resolve_prompts(scenarios: Iterable[Scenario], client: LangfuseClient | None = None) -> list[Scenario]:
    """Scenarios with the prompts that they name; each prompt is fetched once.

    A text prompt becomes its text, a chat prompt a list of messages in OpenAI's format.

    Args:
        scenarios: those without references come back as they are.
        client: of the project; None: the one that the environment names.

    Raises:
        ConfigError: a reference is wrong, or leaves a variable open.
        LangfuseRefusedError: there is no such prompt, or no such version.
        LangfuseUnavailableError: the server does not answer.
    """
    scenarios = list(scenarios)
    if not any(_is_reference(value) for scenario in scenarios for value in scenario.inputs.values()):
        return scenarios
    if client is None:
        with LangfuseClient() as own:
            return resolve_prompts(scenarios, own)
    fetched: dict[tuple[Any, ...], Any] = {}
    return [_resolved(scenario, client, fetched) for scenario in scenarios]


def _resolved(scenario: Scenario, client: LangfuseClient, fetched: dict[tuple[Any, ...], Any]) -> Scenario:
    inputs = dict(scenario.inputs)
    before: list[dict[str, Any]] = list(scenario.metadata.get(METADATA) or ())
    used = list(before)
    for key, value in scenario.inputs.items():
        if not _is_reference(value):
            continue
        what = f"scenario {scenario.id!r}, input {key!r}"
        wanted = _checked(cast("Mapping[str, Any]", value), what)
        name, label, version = wanted[REFERENCE], wanted.get("label"), wanted.get("version")
        which = (name, label, version)
        if which not in fetched:
            fetched[which] = client.prompt(name, label=label, version=version)
        prompt = fetched[which]
        inputs[key] = _compiled(prompt, wanted.get("variables") or {}, what)
        used.append({"name": prompt.name, "version": prompt.version, "input": key})
    if used == before:
        return scenario
    return replace(scenario, inputs=inputs, metadata={**scenario.metadata, METADATA: used})


def _compiled(prompt: Any, variables: Mapping[str, Any], what: str) -> Any:
    from langfuse.model import ChatPromptClient, TextPromptClient

    template = TextPromptClient(prompt) if isinstance(prompt.prompt, str) else ChatPromptClient(prompt)
    open_ = sorted(set(template.variables) - variables.keys())
    if open_:
        raise ConfigError(
            f"{what}: prompt {prompt.name!r} version {prompt.version} leaves {', '.join(open_)} open; give "
            '"variables" with the reference'
        )
    compiled: Any = template.compile(**variables)
    if isinstance(compiled, str):
        return compiled
    messages = [dict(message) for message in compiled]
    for message in messages:
        if "role" not in message:
            raise ConfigError(
                f"{what}: prompt {prompt.name!r} version {prompt.version} has the placeholder "
                f'{message.get("name")!r}; give its messages in the reference\'s "variables"'
            )
    return messages


def _is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and REFERENCE in value


def _checked(reference: Mapping[str, Any], what: str) -> dict[str, Any]:
    unknown = sorted(set(reference) - _KNOWN)
    if unknown:
        raise ConfigError(f"{what}: {', '.join(unknown)}: no part of a reference to a prompt")
    if "label" in reference and "version" in reference:
        raise ConfigError(f"{what}: a prompt is named by its label or its version, not by both")
    if not isinstance(reference[REFERENCE], str) or not reference[REFERENCE]:
        raise ConfigError(f"{what}: {REFERENCE} is the prompt's name, got {reference[REFERENCE]!r}")
    return dict(reference)
