"""Import paths: what is named as ``package.module:name`` where it cannot be handed over itself."""

import importlib
from typing import Any

from art_core.errors import ConfigError


def load_object(path: str) -> Any:
    """What lies at ``package.module:name``.

    Raises:
        ConfigError: the path has another form, the module can't be imported, or lacks the name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{path!r} is no import path; expected 'package.module:name'")
    try:
        found: Any = importlib.import_module(module_name)
    except SystemExit as left:  # a script that runs as a whole, also when it is only imported
        raise ConfigError(
            f"{path!r} can't be imported: the module ends by sys.exit({left.code!r}); put what it does as a "
            "script under `if __name__ == '__main__':`"
        ) from left
    except Exception as failure:  # whatever a user's module does when it is imported
        raise ConfigError(f"{path!r} can't be imported: {type(failure).__name__}: {failure}") from failure
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{path!r}: {found!r} has no {part!r}")
        found = getattr(found, part)
    return found
