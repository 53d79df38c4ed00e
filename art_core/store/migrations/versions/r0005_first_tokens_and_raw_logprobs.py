"""When a stream's first token came, and which log-probabilities are the model's own.

Revision: 0005, from 0004. Of older steps neither is known.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the columns."""
    op.add_column("steps", sa.Column("time_to_first_token", sa.Double()))
    op.add_column("steps", sa.Column("raw_logprobs", sa.Boolean()))
