"""Base of all settings: what any of them refuses, and how it says so.

Invariant: an unknown or out-of-range setting is a `ConfigError` with its name, before any work starts.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from art_core.errors import ConfigError


class Settings(BaseModel):
    """Base of all settings: frozen, nothing unknown, every number finite; mistakes are `ConfigError`."""

    # An infinite learning rate passes gt=0 and ruins the weights.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as invalid:
            raise ConfigError(_explain(type(self), invalid)) from None

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, validated again."""
        return type(self)(**{**{k: getattr(self, k) for k in type(self).model_fields}, **changes})


def _explain(settings: type[BaseModel], invalid: ValidationError) -> str:
    lines: list[str] = []
    for error in invalid.errors():
        if error["type"] == "default_factory_not_called":  # for want of another setting, which is named
            continue
        name = ".".join(str(part) for part in error["loc"]) or settings.__name__
        if error["type"] == "extra_forbidden":
            known = ", ".join(sorted(settings.model_fields))
            lines.append(f"{name}: no such setting; known: {known}")
        elif not error["loc"]:  # settings that contradict each other; their message says which
            lines.append(error["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{name}={error['input']!r}: {error['msg']}")
    return f"{settings.__name__}: " + "; ".join(lines)
