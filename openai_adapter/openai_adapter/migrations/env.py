"""What Alembic runs for an upgrade: in the transaction that ``Database.upgrade`` has begun."""

from __future__ import annotations

from alembic import context

from openai_adapter.database import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # SQLite's is, too, as the driver is kept from committing by itself
)
with context.begin_transaction():
    context.run_migrations()
