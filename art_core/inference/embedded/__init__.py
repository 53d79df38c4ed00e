"""The embedded engine: transformers in process, OpenAI's schema over HTTP, no GPU needed."""

from art_core.inference.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
