"""Filters of lists, from the address of a page.

Invariant: an empty field narrows nothing down, and one that cannot be read is an error that names it.
"""

from collections.abc import Mapping

from art_core.errors import ConfigError
from art_core.store import Run, Store
from art_core.store.browse import TrajectoryFilter

_TEXTS = ("run_id", "scenario_id", "node", "status", "cause", "group_id")
_NUMBERS = ("reward_min", "reward_max")


def filter_from(asked: Mapping[str, str]) -> TrajectoryFilter:
    """The filter that an address asks for.

    Raises:
        ConfigError: a field is none that there is, or no number where one is needed.
    """
    values: dict[str, str | int | float] = {name: asked[name] for name in _TEXTS if asked.get(name)}
    for name in _NUMBERS:
        if asked.get(name):
            values[name] = _number(name, asked[name])
    number = policy_number(asked)
    if number is not None:
        values["policy_number"] = number
    if asked.get("order"):
        values["order"] = asked["order"]
    return TrajectoryFilter(**values)  # pyright: ignore[reportArgumentType] - it checks what it is given


def policy_number(asked: Mapping[str, str]) -> int | None:
    """The policy version that an address asks for; None if it asks for none.

    Raises:
        ConfigError: it is no whole number.
    """
    text = asked.get("policy_number")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"policy_number={text!r}: expected a whole number")
    return int(text)


def flatness(asked: Mapping[str, str]) -> bool | None:
    """Whether an address asks for groups whose rewards are all equal, or for others; None for both.

    Raises:
        ConfigError: it asks for something else.
    """
    text = asked.get("spread") or None
    if text not in (None, "none", "some"):
        raise ConfigError(f"spread={text!r}: expected none or some")
    return None if text is None else text == "none"


def run_choices(store: Store) -> list[Run]:
    """The runs that a list can be narrowed down to, newest first."""
    return store.runs()[::-1]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number") from None
