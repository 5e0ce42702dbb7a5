"""Whatever happens in whatever order: every job ends once, and is published once."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from job_processes import PROCESSES, work
from jobs import CALLER, KIND, claim, count_unfinished, create, expire, new_job
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_queue import Claim, JobQueue, LeaseLostError
from openai_adapter.job_retention import Limits, enforce_retention
from openai_adapter.job_store import JobStore
from openai_adapter.job_table import Job, JobStatus

ENOUGH = 1000  # attempts; more than can be lost here
KEEP = Limits(max_bytes=None, tombstone_seconds=1000)


@dataclass
class World:
    """Workers that take one random step at a time, and what they believe to have done."""

    database: Database
    store: JobStore
    queue: JobQueue
    files: JobFiles
    choose: random.Random
    claims: list[Claim] = field(default_factory=list)  # of live and of dead workers
    first_claims: list[str] = field(default_factory=list)
    tokens: set[tuple[str, int]] = field(default_factory=set)
    published: Counter[str] = field(default_factory=Counter)
    deleted: set[str] = field(default_factory=set)
    progress: dict[str, int] = field(default_factory=dict)

    def step(self) -> None:
        actions = (self.claim, self.claim, self.report, self.complete, self.die, self.release, self.delete)
        self.choose.choices(actions, weights=(3, 3, 4, 3, 2, 1, 0.3))[0]()

    def claim(self) -> None:
        claimed = self.queue.claim(KIND, "worker", 1000)
        if claimed is None:
            return
        if claimed.token == 1:
            self.first_claims.append(claimed.job.id)
        assert (claimed.job.id, claimed.token) not in self.tokens
        self.tokens.add((claimed.job.id, claimed.token))
        self.claims.append(claimed)

    def report(self) -> None:
        if claimed := self._pick():
            try:
                self.queue.report_progress(claimed, self.choose.randint(0, 100))
            except LeaseLostError:
                self._forget(claimed)
            self._check_progress(claimed.job.id)

    def complete(self) -> None:
        if claimed := self._pick():
            entry = self.files.put(claimed, "video.mp4", f"{claimed.token}".encode())
            try:
                self.queue.complete(claimed, {"video": entry})
                self.published[claimed.job.id] += 1
            except LeaseLostError:
                self.files.remove([entry["name"]])
            self._forget(claimed)

    def die(self) -> None:
        """Its lease runs out; but it is slow, not dead, and may come back."""
        if claimed := self._pick():
            if self.choose.random() < 0.5:
                self.files.put(claimed, "video.mp4", b"never published")
            expire(self.database, claimed)
            if self.choose.random() < 0.5:
                self._forget(claimed)

    def release(self) -> None:
        if claimed := self._pick():
            with contextlib.suppress(LeaseLostError):
                self.queue.release(claimed, counts=False)
            self._forget(claimed)

    def delete(self) -> None:
        jobs = self.store.list_page(KIND, CALLER, limit=100).data
        if jobs:
            job = self.choose.choice(jobs)
            deletion = self.store.delete(KIND, CALLER, job.id)
            assert deletion is not None
            self.files.remove(deletion.files)
            self.deleted.add(job.id)

    def finish(self) -> None:
        """Everybody dies, and one worker that works well takes over."""
        for claimed in self.claims:
            expire(self.database, claimed)
        self.claims = []
        while claimed := self.queue.claim(KIND, "last", 1000):
            if claimed.token == 1:
                self.first_claims.append(claimed.job.id)
            self.claims.append(claimed)
            self.complete()

    def _pick(self) -> Claim | None:
        return self.choose.choice(self.claims) if self.claims else None

    def _forget(self, claimed: Claim) -> None:
        self.claims = [each for each in self.claims if each is not claimed]

    def _check_progress(self, job_id: str) -> None:
        job = self.store.get(KIND, CALLER, job_id)
        if job is not None:
            assert job.progress >= self.progress.get(job_id, 0), "progress fell"
            self.progress[job_id] = job.progress


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings(
    database: Database, store: JobStore, queue: JobQueue, tmp_path: Path, seed: int
) -> None:
    files = JobFiles(f"file://{tmp_path}/files")
    world = World(database, store, queue, files, random.Random(seed))
    jobs = create(store, 12, max_attempts=ENOUGH)
    for _ in range(120):
        world.step()
    world.finish()
    check_ends(world, jobs)
    assert world.first_claims == [job.id for job in jobs if job.id in set(world.first_claims)], "out of order"


def check_ends(world: World, jobs: list[Job]) -> None:
    """Each job is deleted, or completed and published once with its own attempt's files, and with nothing else."""
    enforce_retention(world.database, world.files, KEEP)
    expected = set()
    for job in jobs:
        found = world.store.get(KIND, CALLER, job.id)
        assert (found is None) is (job.id in world.deleted)
        assert world.published[job.id] <= 1, "published twice"
        if found is not None:
            assert (found.status, found.progress) == (JobStatus.COMPLETED, 100)
            assert world.published[job.id] == 1
            name = found.files["video"]["name"]
            assert world.files.read(name) == name.split(".")[1].encode()
            expected.add(name)
    assert {file.name for file in world.files.find_all()} == expected
    assert count_unfinished(world.database).total() == 0


def test_threads_that_die_and_delete(
    database: Database, store: JobStore, queue: JobQueue, tmp_path: Path
) -> None:
    """The same with real concurrency: leases run out by themselves, some workers stop for good, some are slow."""
    files = JobFiles(f"file://{tmp_path}/files")
    jobs = create(store, 40, max_attempts=ENOUGH)
    world = World(database, store, queue, files, random.Random(0))
    lock, failures, started = threading.Lock(), [], Counter[str]()

    def work(number: int) -> None:
        choose = random.Random(number)
        try:
            while count_unfinished(database).total():
                claimed = queue.claim(KIND, f"worker {number}", 0.5)
                if claimed is None:
                    time.sleep(0.05)
                    continue
                with lock:
                    assert (claimed.job.id, claimed.token) not in world.tokens
                    world.tokens.add((claimed.job.id, claimed.token))
                    started[claimed.job.id] += 1
                serve(choose, claimed)
        except Exception as error:
            failures.append(error)

    def serve(choose: random.Random, claimed: Claim) -> None:
        fate = choose.random()
        try:
            queue.report_progress(claimed, choose.randint(0, 99))
            if fate < 0.2:
                return  # dead: the lease runs out
            if fate < 0.35:
                time.sleep(0.7)  # slow: somebody else may have it by now
            if fate < 0.4:
                delete(claimed)
            entry = files.put(claimed, "video.mp4", f"{claimed.token}".encode())
            queue.complete(claimed, {"video": entry})
            with lock:
                world.published[claimed.job.id] += 1
        except LeaseLostError:
            pass  # what it has left in the store is for the sweep

    def delete(claimed: Claim) -> None:
        deletion = store.delete(KIND, CALLER, claimed.job.id)
        if deletion is not None:
            files.remove(deletion.files)
            with lock:
                world.deleted.add(claimed.job.id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    check_ends(world, jobs)
    assert max(started.values()) > 1, "nothing was taken over: the test showed nothing"


def test_eight_threads_hammer(database: Database, store: JobStore, queue: JobQueue) -> None:
    """Writers and readers wait for each other, and none is turned away."""
    failures: list[Exception] = []
    ends = Counter[str]()
    stop = time.monotonic() + 4

    def hammer(number: int) -> None:
        choose = random.Random(number)
        try:
            while time.monotonic() < stop:
                job = store.create(new_job("hammer", caller=f"caller {number}")).job
                claimed = claim(queue)
                queue.heartbeat(claimed)
                store.list_page(KIND, f"caller {number}")
                queue.report_progress(claimed, choose.randint(0, 99))
                if choose.random() < 0.5:
                    queue.complete(claimed, {})
                else:
                    queue.fail(claimed, "code", "message")
                ends[job.id] += 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(ends) > 8
    assert count_unfinished(database).total() == 0


def test_processes_that_are_killed(
    empty_database_url: str, database: Database, store: JobStore, queue: JobQueue, tmp_path: Path
) -> None:
    """Workers get SIGKILL at any moment, also within a transaction, and others take their places."""
    choose = random.Random(0)
    world = World(database, store, queue, JobFiles(f"file://{tmp_path}/files"), choose)
    jobs = create(store, 40, max_attempts=ENOUGH)
    kills = 0

    def start() -> BaseProcess:
        process = PROCESSES.Process(target=work, args=(empty_database_url, f"file://{tmp_path}/files"))
        process.start()
        return process

    workers = [start() for _ in range(3)]
    deadline = time.monotonic() + 120
    while count_unfinished(database).total():
        assert time.monotonic() < deadline
        time.sleep(choose.uniform(0.05, 0.3))
        victim = choose.randrange(len(workers))
        if kills < 25 and count_unfinished(database)[JobStatus.IN_PROGRESS]:
            workers[victim].kill()
            workers[victim].join()
            workers[victim] = start()
            kills += 1
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    assert kills > 3
    for job in jobs:  # what the workers believe died with them: what can be fetched was published
        world.published[job.id] = 1
    check_ends(world, jobs)
    found = [store.get(KIND, CALLER, job.id) for job in jobs]
    assert max(job.token for job in found if job is not None) > 1, "nothing was taken over"
