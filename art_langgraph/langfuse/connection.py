"""Where Langfuse is, and how hard it may be asked.

Invariant: the secret key is in no message and no ``repr``.
"""

import os
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from art_core.config.settings import Settings
from art_core.errors import ConfigError

CLOUD = "https://cloud.langfuse.com"
"""Where Langfuse is when nobody says otherwise, as in its SDK."""


class LangfuseConnection(Settings):
    """One project of a Langfuse server, and the pace at which it is asked.

    Attributes:
        base_url: of the server.
        public_key: of the project.
        secret_key: of the project.
        environment: Langfuse's environment of what is sent (``training``, ``staging``); None: its default.
        release: Langfuse's release of what is sent.
        timeout: seconds for one request.
        attempts: how often a request is tried before the server counts as unavailable. What was refused
            with 429 and a time to wait is not counted, up to ``patience``.
        patience: seconds that one request waits, all its waits together, before it is given up.
        requests_per_minute: the most requests. Langfuse Cloud takes 1,000 a minute of traces and 30 a
            minute of most others on its smallest plan (https://langfuse.com/faq/all/api-limits); what is
            above a plan's limit is answered with the time to wait, which is kept to.
    """

    public_key: str = Field(min_length=1)
    secret_key: SecretStr = Field(min_length=1)
    base_url: str = CLOUD
    environment: str | None = Field(default=None, pattern=r"^[a-z0-9_-]{1,40}$")
    release: str | None = None
    timeout: float = Field(default=20.0, gt=0)
    attempts: int = Field(default=5, ge=1)
    patience: float = Field(default=300.0, ge=0)
    requests_per_minute: float = Field(default=600.0, gt=0)

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.username:
            raise ValueError("expected the server's address, such as https://cloud.langfuse.com")
        return url.rstrip("/")

    @field_validator("environment")
    @classmethod
    def _is_ours(cls, name: str | None) -> str | None:
        if name is not None and name.startswith("langfuse"):
            raise ValueError("names that begin with 'langfuse' are Langfuse's own")
        return name

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **changes: object) -> Self:
        """The connection that Langfuse's own environment variables name.

        Args:
            environ: in place of the process's environment.
            changes: settings that are not in it, or differ.

        Raises:
            ConfigError: a key is missing, or a setting is wrong.
        """
        environ = os.environ if environ is None else environ
        url = environ.get("LANGFUSE_BASE_URL") or environ.get("LANGFUSE_HOST")
        found = {
            "public_key": environ.get("LANGFUSE_PUBLIC_KEY"),
            "secret_key": environ.get("LANGFUSE_SECRET_KEY"),
            "base_url": url,
            "environment": environ.get("LANGFUSE_TRACING_ENVIRONMENT"),
            "release": environ.get("LANGFUSE_RELEASE"),
        }
        settings = {name: value for name, value in found.items() if value} | changes
        missing = [name for name in ("public_key", "secret_key") if not settings.get(name)]
        if missing:
            raise ConfigError(
                "no Langfuse project: set "
                + " and ".join(f"LANGFUSE_{name.upper()}" for name in missing)
                + " (and LANGFUSE_BASE_URL unless it is Langfuse's cloud); a project's settings have its keys"
            )
        return cls(**settings)  # type: ignore[arg-type]  # checked by pydantic

    @property
    def destination(self) -> str:
        """What tells projects apart: the server and the public key."""
        return f"{self.base_url}#{self.public_key}"
