"""Graphs by import path, and policies by address: what can be told to another process."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.runnables import Runnable

from art_core.errors import ConfigError
from art_core.import_paths import load_object
from art_core.inference.availability import ALWAYS, availability_of
from art_core.inference.endpoint import (
    PolicyEndpoint,
    StaticEndpoint,
    raw_logprobs_of,
    served_name,
    temperature_of,
)
from art_core.rollouts import Agent
from art_core.types import PolicyVersion

RESTART_SECONDS = 900.0
"""How long a call of another process waits for a server that is being restarted."""

FACTORY_ARGUMENTS = ("model", "endpoint", "policy")
"""Names by which a function says that it makes a graph from a policy."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a policy version answers, and how long to wait for it when it does not."""

    base_url: str
    served_name: str
    api_key: str
    patience: float = 0.0
    temperature: float | None = None
    raw_logprobs: bool = False

    @classmethod
    def of(cls, model: PolicyEndpoint, version: PolicyVersion | None = None) -> Self:
        """The address of a policy's version; None: of the current one."""
        name = served_name(model, version or model.current_version())
        patience = 0.0 if availability_of(model) is ALWAYS else RESTART_SECONDS
        return cls(
            model.base_url, name, model.api_key, patience, temperature_of(model), raw_logprobs_of(model)
        )

    def endpoint(self) -> StaticEndpoint:
        """The policy at this address."""
        return StaticEndpoint(
            self.base_url,
            self.served_name,
            api_key=self.api_key,
            patience=self.patience,
            temperature=self.temperature,
            raw_logprobs=self.raw_logprobs,
        )


def load_graph(path: str, model: PolicyEndpoint | None = None) -> Runnable[Any, Any] | Agent:
    """The graph or agent at an import path.

    A function without parameters makes the graph. So does one whose only parameter is called ``model``,
    ``endpoint`` or ``policy``; it gets the policy, to be given to `ChatART`. Any other function is the agent
    itself, ``scenario -> output``.

    Raises:
        ConfigError: there is no such thing, or it wants a policy and none was given.
    """
    found = load_object(path)
    if isinstance(found, Runnable) or not callable(found):
        return found  # what is neither is refused by who runs it
    make: Callable[..., Any] = found
    parameters = inspect.signature(make).parameters
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not needed:
        return make()
    if len(needed) == 1 and needed[0] in FACTORY_ARGUMENTS:
        if model is None:
            raise ConfigError(f"{path!r} makes its graph from a policy; pass model=... along")
        return make(model)
    return make
