"""The first tables.

Revision: 0001, from nothing. A migration never changes once it has been released.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "runs",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_table(
        "scenarios",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scenario_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_scenarios"),
    )
    op.create_index("ix_scenarios_scenario_id", "scenarios", ["scenario_id"])
    op.create_table(
        "store_info",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text()),
        sa.PrimaryKeyConstraint("key", name="pk_store_info"),
    )
    op.create_table(
        "events",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_events_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
    )
    op.create_index("ix_events_run_id_kind", "events", ["run_id", "kind"])
    op.create_table(
        "groups",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("scenario", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_groups_run_id"),
        sa.ForeignKeyConstraint(["scenario"], ["scenarios.digest"], name="fk_groups_scenario"),
        sa.PrimaryKeyConstraint("seq", name="pk_groups"),
        sa.UniqueConstraint("id", name="uq_groups_id"),
    )
    op.create_index("ix_groups_run_id", "groups", ["run_id"])
    op.create_table(
        "metrics",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_metrics_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_metrics"),
        sa.UniqueConstraint("run_id", "step", "name", name="uq_metrics_run_id_step_name"),
    )
    op.create_table(
        "policy_versions",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("adapter_dir", sa.Text()),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_policy_versions_run_id"),
        sa.PrimaryKeyConstraint("model", "number", name="pk_policy_versions"),
    )
    op.create_table(
        "trajectories",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("group_id", sa.Text()),
        sa.Column("group_position", sa.Integer()),
        sa.Column("scenario", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.Column("components", sa.Text(), nullable=False),
        sa.Column("step_rewards", sa.Text(), nullable=False),
        sa.Column("node_rewards", sa.Text(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("faults", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("duration", sa.Double()),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_trajectories_group_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trajectories_run_id"),
        sa.ForeignKeyConstraint(["scenario"], ["scenarios.digest"], name="fk_trajectories_scenario"),
        sa.PrimaryKeyConstraint("seq", name="pk_trajectories"),
        sa.UniqueConstraint("id", name="uq_trajectories_id"),
    )
    op.create_index("ix_trajectories_group_id", "trajectories", ["group_id"])
    op.create_index("ix_trajectories_run_id", "trajectories", ["run_id"])
    op.create_index("ix_trajectories_scenario", "trajectories", ["scenario"])
    op.create_table(
        "scores",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("components", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("explanation", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name="fk_scores_trajectory_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_scores"),
    )
    op.create_index("ix_scores_trajectory_id", "scores", ["trajectory_id"])
    op.create_table(
        "steps",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("policy_model", sa.Text()),
        sa.Column("policy_number", sa.Integer()),
        sa.Column("node", sa.Text()),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("duration", sa.Double(), nullable=False),
        sa.Column("messages", sa.LargeBinary(), nullable=False),
        sa.Column("tools", sa.LargeBinary(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("response", sa.LargeBinary()),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.Column("untrainable", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("prompt_tokens", sa.LargeBinary()),
        sa.Column("completion_tokens", sa.LargeBinary()),
        sa.Column("logprobs", sa.LargeBinary()),
        sa.ForeignKeyConstraint(["rollout_id"], ["trajectories.id"], name="fk_steps_rollout_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_steps"),
        sa.UniqueConstraint("id", name="uq_steps_id"),
    )
    op.create_index("ix_steps_rollout_id", "steps", ["rollout_id"])
