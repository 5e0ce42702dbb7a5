"""The adapter's database: SQLite in WAL mode by default, Postgres by URL, behind the same statements."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

VERSION_TABLE = (
    "openai_adapter_schema"  # Alembic's own name may be taken, in a Postgres database that is shared
)

_BUSY_SECONDS = 30.0  # how long a statement waits for another one's lock
_CONNECT_SECONDS = 10
# A replica whose host vanished must not hold its locks until TCP gives up, which takes hours.
_POSTGRES_OPTIONS = " ".join(
    f"-c {name}={int(_BUSY_SECONDS * 1000)}"
    for name in ("lock_timeout", "idle_in_transaction_session_timeout", "statement_timeout")
)


class DatabaseError(Exception):
    """Why the database cannot be used, in words for the operator."""


class Base(DeclarativeBase):
    """What the tables of the adapter derive from."""


class Lock(IntEnum):
    """What one transaction at a time may do, in all adapters together: the keys of Postgres's advisory locks."""

    UPGRADE = 0x7D1F_0001
    CREATE = 0x7D1F_0002
    RETENTION = 0x7D1F_0003


class Database:
    """An engine, and the two kinds of transaction on it. All methods block: call them in a worker thread.

    SQLite has one writer at a time: a transaction that writes begins by waiting for its turn, as one that has read
    first could not have it any more. Where its file is gone, transactions fail, and none makes a new one.
    """

    def __init__(self, url: str, connections: int = 10) -> None:
        """Connects to nothing yet. ``connections``: as many as there are threads that use it.

        Raises:
            DatabaseError: ``url`` is not one of SQLite or Postgres.
        """
        self._url = _parse_url(url)
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        self._engine = _create_engine(self._url, connections)
        self._reading_engine = self._engine.execution_options(read_only=True)

    @property
    def name(self) -> str:
        """The URL without its password, for messages."""
        return self._url.render_as_string(hide_password=True)

    def upgrade(self) -> None:
        """Bring the schema up to date, and make the file where there is none; safe in several processes at once.

        Raises:
            DatabaseError: it does not answer, or its schema is newer than this code.
        """
        try:
            if self.is_sqlite:
                _prepare_sqlite_file(Path(self._url.database or ""))
            with self._engine.begin() as connection:
                if not self.is_sqlite:  # an upgrade, or another adapter's, takes the time it takes
                    connection.execute(text("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0"))
                _lock(connection, Lock.UPGRADE)
                _upgrade(connection, self.name)
        except (DBAPIError, sqlite3.Error, OSError) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise DatabaseError(f"the database {self.name} cannot be opened: {reason}") from error

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that sees the database and leaves it as it is."""
        with Session(self._reading_engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def writing(self, lock: Lock | None = None) -> Iterator[Session]:
        """A transaction that commits at the end; with ``lock``, at most one with that lock runs at a time."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            if lock is not None:
                _lock(session.connection(), lock)
            yield session

    def close(self) -> None:
        """Close all connections that are not in use."""
        self._engine.dispose()


def read_clock(session: Session) -> float:
    """Seconds since 1970 by the one clock that all adapters on this database share."""
    if session.connection().dialect.name == "sqlite":
        return time.time()
    now = session.scalar(select(func.extract("epoch", func.statement_timestamp())))
    assert now is not None
    return float(now)


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise DatabaseError(
            "the database's URL is none: expected sqlite:///FILE or postgresql://..."
        ) from None
    driver = {"sqlite": "sqlite", "postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}.get(
        parsed.drivername, parsed.drivername
    )
    if driver not in ("sqlite", "postgresql+psycopg"):
        raise DatabaseError(f"there is no support for {driver!r} databases; allowed: sqlite, postgresql")
    path = parsed.database or ""
    if driver == "sqlite" and (path in ("", ":memory:") or path.startswith("file:")):
        raise DatabaseError("an SQLite database needs a file, by its path: sqlite:////folder/jobs.sqlite3")
    return parsed.set(drivername=driver)


def _create_engine(url: URL, connections: int) -> Engine:
    arguments: dict[str, Any]
    is_sqlite = url.drivername == "sqlite"
    if is_sqlite:
        assert url.database
        # Jobs in a new, empty file in the place of one that somebody removed would be lost without a word.
        url = url.set(database="file:" + quote(os.fsencode(Path(url.database).absolute())))
        url = url.update_query_dict({"mode": "rw", "uri": "true"})
        arguments = {"timeout": _BUSY_SECONDS}
    else:
        arguments = {"connect_timeout": _CONNECT_SECONDS}
        if "options" not in url.query:
            arguments["options"] = _POSTGRES_OPTIONS
    engine = create_engine(
        url,
        connect_args=arguments,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=not is_sqlite,  # Postgres may have been restarted meanwhile
    )
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "checkout", _check_sqlite_file)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    record.info["file"] = _identify_file(connection)
    connection.isolation_level = None  # the module would begin transactions by itself, and late
    # A commit is on the disk when it returns: SQLite's default, which some builds weaken in WAL mode.
    connection.execute("PRAGMA synchronous=FULL")


def _check_sqlite_file(
    connection: sqlite3.Connection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
) -> None:
    """A connection to a file that was removed, or replaced, would go on in what nobody will ever read."""
    file = _identify_file(connection)
    if file is None or file != record.info["file"]:
        raise DisconnectionError("the file of the database is another one")  # the pool connects anew


def _identify_file(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """The device and inode of what is where the database's file should be, if anything is that can be reached."""
    # The first of them: behind it are temporary ones.
    _, _, path = connection.execute("PRAGMA database_list").fetchone()
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _prepare_sqlite_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _BUSY_SECONDS
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                # Two that change the mode at the same time are told so at once, whatever the timeout.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    if mode != "wal":
        raise DatabaseError(f"{path} cannot be in SQLite's WAL mode: put it on a local file system")


def _lock(connection: Connection, lock: Lock) -> None:
    """Until the transaction ends. On SQLite every transaction that writes is alone anyway."""
    if connection.dialect.name != "sqlite":
        connection.execute(select(func.pg_advisory_xact_lock(int(lock))))


def _upgrade(connection: Connection, name: str) -> None:
    config = Config()
    config.set_main_option("script_location", "openai_adapter:migrations")
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    newer = sorted(set(context.get_current_heads()) - known)
    if newer:
        raise DatabaseError(
            f"the schema of {name} has version {newer[0]}, newer than this adapter, which knows up to "
            f"{script.get_current_head()}: start the adapter that made it, or a newer one"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
