"""What the tests of jobs run in processes of their own: they import this module, and nothing of pytest."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier

from openai_adapter.database import Database
from openai_adapter.job_queue import JobQueue
from openai_adapter.job_store import JobStore, NewJob

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


def create_with_key(
    url: str, barrier: Barrier, new_jobs: list[NewJob], found: multiprocessing.Queue[list[str]]
) -> None:
    """Create these jobs, each when all others create it."""
    database = Database(url)
    store = JobStore(database)
    ids = []
    for new in new_jobs:
        barrier.wait(60)
        ids.append(store.create(new).job.id)
    found.put(ids)
    database.close()
