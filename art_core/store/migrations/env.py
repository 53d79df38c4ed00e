"""What alembic runs: the migrations, on the connection that `upgrade` was given."""

from alembic import context

from art_core.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
context.run_migrations()
