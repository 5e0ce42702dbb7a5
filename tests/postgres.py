"""A Postgres of the tests' own, from Debian's packages; or one that is named in TEST_POSTGRES_URL.

Debian's programs are used where they are installed; else its packages are unpacked into ``.venv``, which needs no root
and changes nothing beyond. Postgres refuses to run as root: then it runs as ``nobody``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from diffusion_backend.processes import LaunchError, ManagedProcess, free_ports
from sqlalchemy import make_url

from tests.debian_packages import library_path, run, unpack
from tests.running_server import ROOT

URL_VARIABLE = "TEST_POSTGRES_URL"

_UNPACKED = ROOT / ".venv" / "postgresql"
_PROGRAMS = "usr/lib/postgresql/*/bin"
_START_SECONDS = 60
_ADVICE = f"install postgresql, or set {URL_VARIABLE} to a server where databases can be created"


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a server where databases can be created.

    Raises:
        LaunchError: there is none, and none can be started.
    """
    if url := os.environ.get(URL_VARIABLE):
        yield url
        return
    with own_postgres() as url:
        yield url


@contextmanager
def own_postgres() -> Iterator[str]:
    """The URL of a server that is started here, for who stops it.

    Raises:
        LaunchError: none can be started.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        yield from _serve(Path(folder))


@contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """The URL of an empty database on that server; dropped at the end."""
    name = f"test_{secrets.token_hex(8)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def frozen(server_url: str) -> Iterator[None]:
    """A server on this machine, of which no process runs: it takes connections and requests, and answers none."""
    with psycopg.connect(server_url) as connection:
        backend = Path(f"/proc/{connection.info.backend_pid}/stat").read_text()
        server = int(backend.rpartition(")")[2].split()[1])  # its parent
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        pids = [server, *map(int, children)]
    try:
        _signal(pids, signal.SIGSTOP)
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Those that are still there: the backend of a connection that was closed may be ending."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _serve(folder: Path) -> Iterator[str]:
    programs = _find_programs() or _unpack_packages()
    if os.geteuid() == 0:
        programs = _make_reachable(programs, folder)
    environment = {**os.environ, "LD_LIBRARY_PATH": _library_path(programs)}
    password = secrets.token_hex(16)
    data = _create_cluster(programs, folder, password, environment)
    (port,) = free_ports(1)
    options = ("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=")
    process = ManagedProcess(
        "postgres",
        [*_as_user(), str(programs / "postgres"), "-D", str(data), "-p", str(port), *options],
        log=folder / "log",
        environment=environment,
        patience=10,
    )
    try:
        url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
        _wait(process, url)
        yield url
    finally:
        process.stop()


def _find_programs() -> Path | None:
    found = [
        path.parent
        for path in (*Path("/").glob(f"{_PROGRAMS}/initdb"), *_UNPACKED.glob(f"{_PROGRAMS}/initdb"))
    ]
    if program := shutil.which("initdb"):
        found.append(Path(program).resolve().parent)
    return next((folder for folder in found if (folder / "postgres").exists()), None)


def _unpack_packages() -> Path:
    try:
        unpack("postgresql", _UNPACKED)
    except LaunchError as error:
        raise LaunchError(f"there is no Postgres: {_ADVICE}; {error}") from None
    programs = next(_UNPACKED.glob(_PROGRAMS), None)
    if programs is None:
        raise LaunchError(f"Debian's packages have no Postgres in {_PROGRAMS}: {_ADVICE}")
    return programs


def _make_reachable(programs: Path, folder: Path) -> Path:
    """A place from where ``nobody`` can run the programs; and ``folder`` is theirs."""
    shutil.chown(folder, "nobody")
    try:
        run([*_as_user(), "test", "-x", str(programs / "postgres")], Path("/"))
    except LaunchError:
        if not programs.is_relative_to(_UNPACKED):
            raise
        shutil.copytree(_UNPACKED, folder / "programs", symlinks=True)
        return folder / "programs" / programs.relative_to(_UNPACKED)
    return programs


def _library_path(programs: Path) -> str:
    root = programs.parents[4]  # of usr/lib/postgresql/VERSION/bin
    return os.environ.get("LD_LIBRARY_PATH", "") if root == Path("/") else library_path(root)


def _create_cluster(programs: Path, folder: Path, password: str, environment: Mapping[str, str]) -> Path:
    # Others on this machine can reach the port.
    password_file = folder / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(password)
    if os.geteuid() == 0:
        shutil.chown(password_file, "nobody")
    data = folder / "data"
    options = ("--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync")
    command = [str(programs / "initdb"), f"--pgdata={data}", f"--pwfile={password_file}", *options]
    run([*_as_user(), *command], Path("/"), environment)
    return data


def _as_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def _wait(process: ManagedProcess, url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None:
                raise LaunchError(process.obituary()) from None
            if time.monotonic() > deadline:
                raise LaunchError(f"Postgres does not answer: {error}") from None
            time.sleep(0.05)
