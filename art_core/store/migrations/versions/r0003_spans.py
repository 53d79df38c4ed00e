"""What was traced of a rollout (nodes, tools, retrievers) is kept, too.

Revision: 0003, from 0002. Older stores never held spans, so there is nothing to move.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "spans",
        sa.Column("seq", _SEQUENCE, nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["trajectories.id"], name="fk_spans_rollout_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_spans"),
    )
    op.create_index("ix_spans_rollout_id", "spans", ["rollout_id"])
