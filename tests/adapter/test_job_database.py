from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from diffusion_backend.processes import free_ports
from job_processes import PROCESSES, upgrade
from jobs import CALLER, KIND, create
from openai_adapter.database import VERSION_TABLE, Base, Database, DatabaseError
from openai_adapter.job_store import JobStore
from sqlalchemy import URL, text
from sqlalchemy.exc import OperationalError


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[tuple[Database, Path]]:
    """A database in a file, and the file."""
    path = tmp_path / "folder" / "jobs.sqlite3"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    yield database, path
    database.close()


def test_migrations_make_the_tables_of_the_code(database: Database) -> None:
    with database.reading() as session:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(session.connection(), opts=options)
        assert compare_metadata(context, Base.metadata) == []


def test_upgrading_again_changes_nothing(database: Database, store: JobStore) -> None:
    (job,) = create(store)
    database.upgrade()
    assert store.get(job.kind, job.caller, job.id) is not None


def test_a_newer_schema_is_refused(database: Database) -> None:
    with database.writing() as session:
        session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(
        DatabaseError, match=r"has version 9999, newer than this adapter, which knows up to 0001"
    ):
        database.upgrade()


def test_many_adapters_start_at_once(empty_database_url: str) -> None:
    barrier = PROCESSES.Barrier(6)
    processes = [PROCESSES.Process(target=upgrade, args=(empty_database_url, barrier)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 6
    database = Database(empty_database_url)
    create(JobStore(database))
    database.close()


def test_an_upgrade_that_fails_leaves_nothing(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(empty_database_url)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cut short")

    with monkeypatch.context() as patch:
        # The last thing that an upgrade does is to note its version.
        patch.setattr("alembic.runtime.migration.HeadMaintainer.update_to_step", fail)
        with pytest.raises(RuntimeError, match="cut short"):
            database.upgrade()
    database.upgrade()
    create(JobStore(database))
    database.close()


def test_sqlite_is_in_wal_mode_and_its_folder_is_made(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/new folder/jobs.sqlite3")
    database.upgrade()
    database.close()
    with closing(sqlite3.connect(tmp_path / "new folder" / "jobs.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_path_of_any_characters(tmp_path: Path) -> None:
    url = URL.create("sqlite", database=str(tmp_path / "50%41 ü#1" / "jobs?.sqlite3"))
    database = Database(url.render_as_string())
    database.upgrade()
    create(JobStore(database))
    database.close()
    assert (tmp_path / "50%41 ü#1" / "jobs?.sqlite3").is_file()


def _put_a_file_in_the_place_of_its_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("away"))
    path.parent.write_text("")


@pytest.mark.parametrize("away", [Path.unlink, _put_a_file_in_the_place_of_its_folder])
def test_nothing_is_written_to_a_file_that_was_removed(
    away: Callable[[Path], None], sqlite: tuple[Database, Path]
) -> None:
    """A job that only open connections can see is lost; and a new file would be empty."""
    database, path = sqlite
    store = JobStore(database)
    create(store, 3)
    away(path)
    for call in (lambda: create(store), lambda: store.list_page(KIND, CALLER)):
        with pytest.raises(OperationalError, match="unable to open database file"):
            call()
    assert not path.exists()
    if path.parent.is_file():
        path.parent.unlink()


def test_a_file_that_was_put_back_is_used(sqlite: tuple[Database, Path], tmp_path: Path) -> None:
    """As from a backup."""
    database, path = sqlite
    store = JobStore(database)
    (kept,) = create(store)
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(tmp_path / "backup")) as backup:
        live.backup(backup)
    (later,) = create(store)
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()
    (tmp_path / "backup").rename(path)
    assert [job.id for job in store.list_page(KIND, CALLER).data] == [kept.id]
    assert store.get(KIND, CALLER, later.id) is None
    assert create(store)[0].sequence == later.sequence


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "expected sqlite:///FILE or postgresql://"),
        ("mysql://host/name", "no support for 'mysql'"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite:///file:jobs.sqlite3?uri=true", "needs a file, by its path"),
    ],
)
def test_other_databases_are_refused(url: str, words: str) -> None:
    with pytest.raises(DatabaseError, match=words):
        Database(url)


def test_a_database_that_is_down_is_named_without_its_password() -> None:
    (port,) = free_ports(1)
    database = Database(f"postgres://user:geheim@127.0.0.1:{port}/jobs")
    with pytest.raises(DatabaseError, match="cannot be opened") as raised:
        database.upgrade()
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    database = Database(f"sqlite:///{tmp_path}/file/jobs.sqlite3")
    with pytest.raises(DatabaseError, match="cannot be opened"):
        database.upgrade()
