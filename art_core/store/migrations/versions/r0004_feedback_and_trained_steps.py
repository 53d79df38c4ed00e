"""What people said, what training did to each step, which policy answered in a trajectory.

Revision: 0004, from 0003. The policy of older trajectories is found in their steps.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")

_trajectories = sa.table("trajectories", sa.column("id", sa.Text), sa.column("policy_number", sa.Integer))
_steps = sa.table("steps", sa.column("rollout_id", sa.Text), sa.column("policy_number", sa.Integer))


def upgrade() -> None:
    """Make the tables, the columns and the indexes, and fill in what is known."""
    op.add_column("runs", sa.Column("continues", sa.Text()))
    op.add_column("trajectories", sa.Column("policy_number", sa.Integer()))
    newest = sa.select(sa.func.max(_steps.c.policy_number)).where(_steps.c.rollout_id == _trajectories.c.id)
    op.execute(sa.update(_trajectories).values(policy_number=newest.scalar_subquery()))
    op.create_index(
        "ix_trajectories_run_id_policy_number", "trajectories", ["run_id", "policy_number"], unique=False
    )
    op.create_index("ix_steps_rollout_id_node", "steps", ["rollout_id", "node"], unique=False)
    op.drop_index("ix_steps_rollout_id", "steps")
    op.create_index("ix_metrics_run_id_name_step", "metrics", ["run_id", "name", "step"], unique=False)
    op.create_table(
        "feedback",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("over", sa.Text()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name="fk_feedback_trajectory_id"),
        sa.ForeignKeyConstraint(["over"], ["trajectories.id"], name="fk_feedback_over"),
        sa.PrimaryKeyConstraint("seq", name="pk_feedback"),
    )
    op.create_index("ix_feedback_trajectory_id", "feedback", ["trajectory_id"])
    op.create_table(
        "graphs",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_graphs_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_graphs"),
    )
    op.create_index("ix_graphs_run_id", "graphs", ["run_id"])
    op.create_table(
        "trained_steps",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("train_step", sa.Integer(), nullable=False),
        sa.Column("step_id", sa.Text(), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.Column("ratio", sa.LargeBinary(), nullable=False),
        sa.Column("trained", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trained_steps_run_id"),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name="fk_trained_steps_step_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_trained_steps"),
        sa.UniqueConstraint(
            "step_id", "run_id", "train_step", name="uq_trained_steps_step_id_run_id_train_step"
        ),
    )
    op.create_index("ix_trained_steps_run_id_train_step", "trained_steps", ["run_id", "train_step"])
