"""What a page of the list of jobs costs, by how many jobs there are.

Pages of 20 by the adapter's own store: the first one, and pages behind random jobs. Beside them the page in the middle
of the list as a query with OFFSET would read it, which is what the store does not do. SQLite, and a Postgres that is
started for this; with --quick SQLite alone, and no million of jobs.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import measure
from diffusion_backend.tritonserver import CHECKOUT
from openai_adapter.database import Database
from openai_adapter.job_store import JobStore
from openai_adapter.job_table import Job
from sqlalchemy import select, text

sys.path.insert(0, str(CHECKOUT))  # for the tests' Postgres
from tests.postgres import new_database, running_postgres

COUNTS = (100, 10_000, 1_000_000)
CALLER = "benchmark"
PAGE = 20
ROUNDS = 300
OFFSET_ROUNDS = 10
_FILL = """
INSERT INTO jobs (id, kind, caller, status, model, request, progress, created_at, completed_at, expires_at, files,
                  file_bytes, attempts, max_attempts, token)
WITH RECURSIVE numbers(n) AS (SELECT CAST(:first AS INTEGER) UNION ALL SELECT n + 1 FROM numbers WHERE n < :last)
SELECT 'video_' || n, 'video', :caller, 'completed', 'emoji-wan', '{"prompt": "a red apple moving left"}', 100,
       n / 10, n / 10 + 5, n / 10 + 86405, '{"video": {"name": "of the job", "bytes": 20000}}', 20000, 1, 3, 1
FROM numbers
"""


def main() -> None:
    """Measure, print and write what was asked for."""
    options = measure.parse_options(__doc__ or "")
    counts = COUNTS[:-1] if options.quick else COUNTS
    figures: dict[str, float] = {}
    rows: list[Sequence[str | float]] = []
    for engine in (sqlite,) if options.quick else (sqlite, postgres):
        with engine() as url:
            database = Database(url)
            database.upgrade()
            filled = 0
            for count in counts:
                fill(database, filled + 1, count)
                filled = count
                measured = measure_pages(database, count)
                name = f"{engine.__name__}_{count}"
                figures |= {f"{name}_{key}_ms": value for key, value in measured.items()}
                rows.append([f"{engine.__name__}, {count:,} jobs", *measured.values()])
            database.close()
    head = ("", "first p50", "first p99", "behind p50", "behind p99", "asc p50", "OFFSET p50")
    measure.report(f"a page of {PAGE} jobs, ms, {ROUNDS} rounds", head, rows)
    measure.write_json(options.json, figures)


@contextmanager
def sqlite() -> Iterator[str]:
    """The URL of an empty SQLite database."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield f"sqlite:///{Path(folder) / 'jobs.sqlite3'}"


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty Postgres database."""
    with running_postgres() as server, new_database(server) as url:
        yield url


def fill(database: Database, first: int, last: int) -> None:
    """Add completed jobs with the numbers from ``first`` to ``last``."""
    with database.writing() as session:
        if not database.is_sqlite:
            session.execute(text("SET LOCAL statement_timeout = 0"))
        session.execute(text(_FILL), {"first": first, "last": last, "caller": CALLER})
    if not database.is_sqlite:
        with database.writing() as session:
            session.execute(text("ANALYZE jobs"))


def measure_pages(database: Database, count: int) -> dict[str, float]:
    """Milliseconds, by what was read; the kinds take turns, so that other load on the machine hits all alike."""
    store = JobStore(database)
    choose = random.Random(0)

    def first() -> None:
        store.list_page("video", CALLER, limit=PAGE)

    def behind(order: str) -> None:
        after = f"video_{choose.randint(1, count)}"
        store.list_page("video", CALLER, after=after, limit=PAGE, order=order)

    def by_offset() -> None:
        with database.reading() as session:
            session.scalars(select(Job).order_by(Job.sequence.desc()).offset(count // 2).limit(PAGE)).all()

    for _ in range(5):
        first()
        behind("desc")
    times: dict[str, list[float]] = {"first": [], "behind": [], "ascending": [], "offset": []}
    for number in range(ROUNDS):
        times["first"].append(_time(first))
        times["behind"].append(_time(lambda: behind("desc")))
        times["ascending"].append(_time(lambda: behind("asc")))
        if number % (ROUNDS // OFFSET_ROUNDS) == 0:
            times["offset"].append(_time(by_offset))
    return {
        "first_p50": statistics.median(times["first"]),
        "first_p99": statistics.quantiles(times["first"], n=100)[-1],
        "behind_p50": statistics.median(times["behind"]),
        "behind_p99": statistics.quantiles(times["behind"], n=100)[-1],
        "ascending_p50": statistics.median(times["ascending"]),
        "offset_p50": statistics.median(times["offset"]),
    }


def _time(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
