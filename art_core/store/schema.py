"""The tables, at the newest revision.

Invariant: these tables equal what the migrations build from an empty database (a test compares them),
and nothing here is particular to one database.

Structured values are JSON text, token arrays are packed bytes (see `packing`). Free keys (``scenario_id``,
``group_id`` and ``id``) are the user's or the recorder's own; ``seq`` is the order of arrival.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
)

from art_core.store.free_text import FreeText

REVISIONS = ("0001", "0002", "0003", "0004", "0005")
"""Every revision that this code can read or migrate from, oldest first; the last one is the tables below."""

HEAD = REVISIONS[-1]

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite numbers rows by itself only in a column that is called INTEGER.
_Sequence = BigInteger().with_variant(Integer, "sqlite")

alembic_version = Table(
    "alembic_version",
    MetaData(),  # alembic's own table: it stays out of what alembic compares
    Column("version_num", FreeText, primary_key=True),
)

store_info = Table(
    "store_info", metadata, Column("key", FreeText, primary_key=True), Column("value", FreeText)
)

runs = Table(
    "runs",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("id", FreeText, nullable=False, unique=True),
    Column("model", FreeText, nullable=False),
    Column("config", FreeText, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("state", FreeText, nullable=False),
    Column("continues", FreeText),  # the run whose policy it went on from
)

scenarios = Table(
    "scenarios",
    metadata,
    Column("digest", LargeBinary, primary_key=True),  # of the whole content: ids may be used twice
    Column("scenario_id", FreeText, nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("id", FreeText, nullable=False, unique=True),
    Column("run_id", FreeText, ForeignKey("runs.id"), index=True),
    Column("scenario", LargeBinary, ForeignKey("scenarios.digest"), nullable=False),
    Column("created_at", Double, nullable=False),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("id", FreeText, nullable=False, unique=True),
    Column("run_id", FreeText, ForeignKey("runs.id"), index=True),
    Column("group_id", FreeText, ForeignKey("groups.id"), index=True),
    Column("group_position", Integer),
    Column("scenario", LargeBinary, ForeignKey("scenarios.digest"), nullable=False, index=True),
    Column("status", FreeText, nullable=False),
    Column("reward", Double),
    Column("components", FreeText, nullable=False),
    Column("step_rewards", FreeText, nullable=False),
    Column("node_rewards", FreeText, nullable=False),
    Column("metrics", FreeText, nullable=False),
    Column("metadata", FreeText, nullable=False),
    Column("faults", FreeText, nullable=False),
    Column("failure", FreeText),
    Column("started_at", Double, nullable=False),
    Column("duration", Double),
    Column("policy_number", Integer),  # the newest that answered in it, of the run's model if any did
    Index("ix_trajectories_run_id_policy_number", "run_id", "policy_number"),
)

contents = Table(
    "contents",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("id", FreeText, nullable=False, unique=True),
    Column("rollout_id", FreeText, ForeignKey("trajectories.id"), nullable=False),
    Column("call_id", FreeText, nullable=False),
    Column("choice", Integer, nullable=False),
    Column("model", FreeText, nullable=False),
    Column("policy_model", FreeText),
    Column("policy_number", Integer),
    Column("node", FreeText),
    Column("identity", FreeText, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("duration", Double, nullable=False),
    Column("messages", LargeBinary, nullable=False),  # digests of contents, one per message
    Column("tools", LargeBinary, nullable=False),  # digest of the list, or nothing
    Column("sampling", FreeText, nullable=False),
    Column("response", LargeBinary),
    Column("finish_reason", FreeText),
    Column("usage", FreeText, nullable=False),
    Column("untrainable", FreeText),
    Column("error", FreeText),
    Column("prompt_blocks", LargeBinary),  # digests of the prompt's whole blocks
    Column("prompt_tokens", LargeBinary),  # what follows them
    Column("completion_tokens", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("time_to_first_token", Double),
    Column("raw_logprobs", Boolean),  # NULL where it is not known: as false
    Index("ix_steps_rollout_id_node", "rollout_id", "node"),  # lists ask who called, and read no step for it
)

spans = Table(
    "spans",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("rollout_id", FreeText, ForeignKey("trajectories.id"), nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),  # a list of spans: those of the rollout's end, or later ones
)

graphs = Table(
    "graphs",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("run_id", FreeText, ForeignKey("runs.id"), index=True),
    Column("body", FreeText, nullable=False),  # nodes and edges of a graph that its rollouts ran
)

scores = Table(
    "scores",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("trajectory_id", FreeText, ForeignKey("trajectories.id"), nullable=False, index=True),
    Column("reward", Double, nullable=False),
    Column("components", FreeText, nullable=False),
    Column("author", FreeText, nullable=False),
    Column("explanation", FreeText, nullable=False),
    Column("created_at", Double, nullable=False),
)

feedback = Table(
    "feedback",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("trajectory_id", FreeText, ForeignKey("trajectories.id"), nullable=False, index=True),
    Column("kind", FreeText, nullable=False),
    Column("value", Double, nullable=False),
    Column("author", FreeText, nullable=False),
    Column("comment", FreeText, nullable=False),
    Column("over", FreeText, ForeignKey("trajectories.id")),
    Column("created_at", Double, nullable=False),
)

trained_steps = Table(
    "trained_steps",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("run_id", FreeText, ForeignKey("runs.id"), nullable=False),
    Column("train_step", Integer, nullable=False),
    Column("step_id", FreeText, ForeignKey("steps.id"), nullable=False),
    Column("advantage", Double, nullable=False),
    Column("ratio", LargeBinary, nullable=False),  # float32 for each sampled token, NaN where unknown
    Column("trained", LargeBinary, nullable=False),  # a byte for each sampled token
    UniqueConstraint("step_id", "run_id", "train_step"),
    Index("ix_trained_steps_run_id_train_step", "run_id", "train_step"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("run_id", FreeText, ForeignKey("runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("name", FreeText, nullable=False),
    Column("value", Double),  # NULL is NaN, which SQLite cannot hold
    Column("created_at", Double, nullable=False),
    UniqueConstraint("run_id", "step", "name"),
    Index("ix_metrics_run_id_name_step", "run_id", "name", "step"),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("model", FreeText, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("run_id", FreeText, ForeignKey("runs.id")),
    Column("adapter_dir", FreeText),
    Column("metadata", FreeText, nullable=False),
    Column("created_at", Double, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("run_id", FreeText, ForeignKey("runs.id")),
    Column("kind", FreeText, nullable=False),
    Column("message", FreeText, nullable=False),
    Column("data", FreeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_events_run_id_kind", "run_id", "kind"),
)
