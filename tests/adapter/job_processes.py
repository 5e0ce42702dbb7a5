"""What the tests of jobs run in processes of their own: they import this module, and nothing of pytest."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from multiprocessing.synchronize import Barrier

from jobs import count_unfinished
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_queue import JobQueue, LeaseLostError
from openai_adapter.job_store import JobStore, NewJob, QueueFullError

# Each begins as a copy of a process that has imported everything.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["openai_adapter.job_files", "openai_adapter.job_store"])

Claims = list[tuple[str, int]]


def upgrade(url: str, barrier: Barrier) -> None:
    """Bring the schema up to date when all others do."""
    database = Database(url)
    barrier.wait(60)
    database.upgrade()
    database.close()


def claim_all(url: str, barrier: Barrier, found: multiprocessing.Queue[Claims]) -> None:
    """Claim jobs, and finish none, until there are no more; says which, with their tokens."""
    database = Database(url)
    queue = JobQueue(database, ttl=1000)
    claims: Claims = []
    barrier.wait(60)
    while claim := queue.claim("video", f"process {os.getpid()}", 1000):
        claims.append((claim.job.id, claim.token))
    found.put(claims)
    database.close()


def create_at_once(
    url: str, barrier: Barrier, new_jobs: list[NewJob], found: multiprocessing.Queue[list[str]]
) -> None:
    """Create these jobs, each when all others create it; says which, but for those that found the queue full."""
    database = Database(url)
    store = JobStore(database)
    ids = []
    for new in new_jobs:
        barrier.wait(60)
        with contextlib.suppress(QueueFullError):
            ids.append(store.create(new).job.id)
    found.put(ids)
    database.close()


def work(url: str, files_url: str) -> None:
    """Work on jobs until all are done."""
    database = Database(url)
    queue, files = JobQueue(database, ttl=1000), JobFiles(files_url)
    while count_unfinished(database).total():
        claim = queue.claim("video", f"process {os.getpid()}", 0.5)
        if claim is None:
            time.sleep(0.05)
            continue
        try:
            queue.report_progress(claim, 50)
            time.sleep(random.uniform(0, 0.1))
            entry = files.put(claim, "video.mp4", f"{claim.token}".encode())
            queue.complete(claim, {"video": entry})
        except LeaseLostError:
            pass  # what it has left in the store is for the sweep
    database.close()
