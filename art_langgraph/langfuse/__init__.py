"""Langfuse, in both directions: what the store holds goes there, production traces come from there.

Invariant: importing this package imports neither Langfuse's SDK nor OpenTelemetry; using it does (extra
``langfuse``).

- `export_to_langfuse` sends what is in the store; `LangfuseLive` does so while a run goes on.
- `import_from_langfuse` and `import_file` bring traces into the store; `scenarios_from` and `groups_from`
  make scenarios and groups of them.
- `resolve_prompts` fills in the prompts that scenarios name.
"""

from art_langgraph.langfuse.client import (
    LangfuseClient,
    LangfuseError,
    LangfuseRefusedError,
    LangfuseUnavailableError,
)
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import ExportOptions, ExportResult, export_to_langfuse
from art_langgraph.langfuse.importing import ImportResult, import_file, import_from_langfuse
from art_langgraph.langfuse.ledger import Ledger
from art_langgraph.langfuse.live import LangfuseLive
from art_langgraph.langfuse.prompts import langfuse_prompt, resolve_prompts
from art_langgraph.langfuse.traces import TraceFileError, TraceFilter, TraceRecord, traces_in_file
from art_langgraph.langfuse.trajectories import groups_from, scenario_of, scenarios_from, trajectory_of

__all__ = [
    "ExportOptions",
    "ExportResult",
    "ImportResult",
    "LangfuseClient",
    "LangfuseConnection",
    "LangfuseError",
    "LangfuseLive",
    "LangfuseRefusedError",
    "LangfuseUnavailableError",
    "Ledger",
    "TraceFileError",
    "TraceFilter",
    "TraceRecord",
    "export_to_langfuse",
    "groups_from",
    "import_file",
    "import_from_langfuse",
    "langfuse_prompt",
    "resolve_prompts",
    "scenario_of",
    "scenarios_from",
    "traces_in_file",
    "trajectory_of",
]
