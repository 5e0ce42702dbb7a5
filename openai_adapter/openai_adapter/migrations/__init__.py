"""The versions of the database's schema, for Alembic; ``Database.upgrade`` runs what is missing."""
