"""The table of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "jobs",
        sa.Column("sequence", big, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("caller", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("image", sa.LargeBinary()),
        sa.Column("progress", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.String()),
        sa.Column("result", sa.JSON()),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("file_bytes", big, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(255)),
        sa.Column("lease_until", sa.Double()),
        sa.Column("heartbeat_at", sa.Double()),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("body_digest", sa.String(64)),
        sa.Column("deleted_at", sa.Double()),
        sa.CheckConstraint("status IN ('queued', 'in_progress', 'completed', 'failed')", name="status"),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name="progress"),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_idempotency", "jobs", ["kind", "caller", "idempotency_key"], unique=True)
    _create_partial_index("jobs_listed", ["kind", "caller", "sequence"], "deleted_at IS NULL")
    _create_partial_index(
        "jobs_unfinished", ["kind", "sequence"], "completed_at IS NULL AND deleted_at IS NULL"
    )
    _create_partial_index("jobs_expiring", ["expires_at"], "deleted_at IS NULL AND expires_at IS NOT NULL")
    _create_partial_index("jobs_stored", ["completed_at", "sequence", "file_bytes"], "file_bytes > 0")
    _create_partial_index("jobs_buried", ["deleted_at"], "deleted_at IS NOT NULL")


def _create_partial_index(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "jobs", columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
