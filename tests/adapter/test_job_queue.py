from __future__ import annotations

import threading
import time

import pytest
from job_processes import PROCESSES, claim_all
from jobs import CALLER, KIND, claim, create, expire, key, new_job, row, shift
from openai_adapter.database import Database
from openai_adapter.job_queue import JobQueue, LeaseLostError
from openai_adapter.job_store import JobStore
from openai_adapter.job_table import Job, JobStatus

FILES = {"video": {"name": "v", "bytes": 30}, "thumbnail": {"name": "t", "bytes": 12}}


def get(store: JobStore, job: Job) -> Job:
    found = store.get(KIND, CALLER, job.id)
    assert found is not None
    return found


def test_the_oldest_job_is_claimed_first(store: JobStore, queue: JobQueue) -> None:
    jobs = create(store, 5)
    claims = [claim(queue, f"worker {number}") for number in range(5)]
    assert [each.job.id for each in claims] == [job.id for job in jobs]
    assert queue.claim(KIND, "worker", 1) is None
    running = get(store, jobs[3])
    assert (running.status, running.worker, running.attempts) == (JobStatus.IN_PROGRESS, "worker 3", 1)


def test_only_jobs_of_the_kind_are_claimed(store: JobStore, queue: JobQueue) -> None:
    create(store, kind="image")
    assert queue.claim(KIND, "worker", 1) is None
    assert queue.claim("image", "worker", 1) is not None


def test_one_job_alone_is_claimed(store: JobStore, queue: JobQueue) -> None:
    jobs = create(store, 3)
    assert claim(queue, job_id=jobs[1].id).job.id == jobs[1].id
    assert queue.claim(KIND, "worker", 1, job_id=jobs[1].id) is None


def test_complete(store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store)
    claimed = claim(queue)
    queue.complete(claimed, FILES, {"seed": 7})
    done = get(store, job)
    assert (done.status, done.progress, done.files, done.file_bytes) == (JobStatus.COMPLETED, 100, FILES, 42)
    assert done.result == {"seed": 7}
    assert done.completed_at is not None
    assert done.expires_at == pytest.approx(done.completed_at + queue.ttl)
    assert queue.claim(KIND, "worker", 1) is None


def test_fail(store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store)
    queue.fail(claim(queue), "moderation", "no \0 \ud800 foxes")
    failed = get(store, job)
    assert (failed.status, failed.error_code) == (JobStatus.FAILED, "moderation")
    assert failed.error_message == "no \\x00 \\ud800 foxes"
    assert failed.completed_at is not None
    assert queue.claim(KIND, "worker", 1) is None


def test_ends_may_be_told_twice_as_their_outcome_may_be_unknown(store: JobStore, queue: JobQueue) -> None:
    create(store, 2)
    first, second = claim(queue), claim(queue)
    done = queue.complete(first, FILES)
    assert queue.complete(first, {}).files == done.files == FILES
    assert queue.fail(first, "code", "message").status is JobStatus.COMPLETED
    queue.fail(second, "code", "message")
    assert queue.fail(second, "other", "other").error_code == "code"
    with pytest.raises(LeaseLostError):
        queue.complete(second, FILES)
    for claimed in (first, second):
        for call in (queue.heartbeat, lambda each: queue.report_progress(each, 1)):
            with pytest.raises(LeaseLostError):
                call(claimed)
        with pytest.raises(LeaseLostError):
            queue.release(claimed, counts=True)


def test_a_heartbeat_keeps_the_job(store: JobStore, queue: JobQueue) -> None:
    create(store)
    claimed = claim(queue, lease_seconds=0.6)
    for _ in range(4):
        time.sleep(0.2)
        queue.heartbeat(claimed)
        assert queue.claim(KIND, "other", 1) is None
    time.sleep(0.8)
    taken = claim(queue, "other")
    assert (taken.job.id, taken.token > claimed.token) == (claimed.job.id, True)


def test_whoever_lost_the_lease_can_do_nothing_more(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    (job,) = create(store)
    slow = claim(queue, "slow")
    expire(database, slow)
    fast = claim(queue, "fast")
    for call in (
        lambda: queue.heartbeat(slow),
        lambda: queue.report_progress(slow, 99),
        lambda: queue.complete(slow, FILES),
        lambda: queue.fail(slow, "code", "message"),
        lambda: queue.release(slow, counts=True),
    ):
        with pytest.raises(LeaseLostError):
            call()
    assert (get(store, job).status, get(store, job).progress) == (JobStatus.IN_PROGRESS, 0)
    queue.complete(fast, FILES)
    with pytest.raises(LeaseLostError):
        queue.complete(slow, {})
    assert get(store, job).files == FILES


def test_a_process_does_not_take_over_its_own_work(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    """Its lease may have run out because the database was locked: its renewal comes together with others' claims."""
    (job,) = create(store, max_attempts=1)
    others = JobQueue(database, queue.ttl)
    slow = claim(queue, "slow")
    with queue.working_on(slow):
        expire(database, slow)
        shift(database, job.id, created_at=-2 * queue.ttl)
        assert not queue.is_claimable(job.id)
        assert queue.claim(KIND, "slow", 1) is None
        assert queue.claim(KIND, "slow", 1, job_id=job.id) is None
        assert queue.fail_exhausted() == 0
        assert others.is_claimable(job.id)
        queue.heartbeat(slow)
        expire(database, slow)
    assert queue.is_claimable(job.id)
    assert queue.fail_exhausted() == 1


def test_a_lease_that_ran_out_is_good_while_nobody_else_wants_it(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    create(store, 2)
    first, second = claim(queue), claim(queue)
    expire(database, first)
    queue.heartbeat(first)
    expire(database, second)
    queue.complete(second, FILES)
    assert queue.claim(KIND, "other", 1) is None


def test_progress_never_falls(database: Database, store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store)
    claimed = claim(queue)
    seen = []
    for percent in (0, 30, 10, -5, 60, 100, 70):
        queue.report_progress(claimed, percent)
        seen.append(get(store, job).progress)
    assert seen == [0, 30, 30, 30, 60, 99, 99]
    expire(database, claimed)
    again = claim(queue)
    queue.report_progress(again, 5)
    assert get(store, job).progress == 99
    queue.complete(again, {})
    assert get(store, job).progress == 100


def test_attempts_are_bounded(database: Database, store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store, max_attempts=2)
    for _ in range(2):
        last = claim(queue)
        assert get(store, job).status is JobStatus.IN_PROGRESS
        expire(database, last)
    assert queue.claim(KIND, "worker", 1) is None
    failed = get(store, job)
    assert (failed.status, failed.error_code) == (JobStatus.FAILED, "attempts_exhausted")
    assert failed.error_message == "the work on this video was interrupted 2 times"
    assert failed.completed_at is not None
    with pytest.raises(LeaseLostError):
        queue.complete(last, FILES)


def test_jobs_that_nobody_claims_any_more_end_as_well(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    create(store, 3, max_attempts=1)
    claims = [claim(queue) for _ in range(3)]
    for each in claims[:2]:
        expire(database, each)
    assert queue.fail_exhausted() == 2
    assert queue.fail_exhausted() == 0
    queue.heartbeat(claims[2])


def test_released_jobs_are_first_again(store: JobStore, queue: JobQueue) -> None:
    jobs = create(store, 2, max_attempts=1)
    claimed = claim(queue)
    queue.release(claimed, counts=False)
    released = get(store, jobs[0])
    assert (released.status, released.attempts, released.worker) == (JobStatus.QUEUED, 0, None)
    with pytest.raises(LeaseLostError):
        queue.heartbeat(claimed)
    again = claim(queue)
    assert (again.job.id, again.token > claimed.token) == (jobs[0].id, True)


def test_a_release_that_counts_may_be_the_last(store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store, max_attempts=1)
    queue.release(claim(queue), counts=True)
    assert get(store, job).status is JobStatus.QUEUED
    assert queue.claim(KIND, "worker", 1) is None
    assert get(store, job).error_code == "attempts_exhausted"


def test_processes_never_claim_the_same(empty_database_url: str, database: Database) -> None:
    store = JobStore(database)
    jobs = create(store, 120)
    barrier, found = PROCESSES.Barrier(6), PROCESSES.Queue()
    arguments = (empty_database_url, barrier, found)
    processes = [PROCESSES.Process(target=claim_all, args=arguments) for _ in range(6)]
    for process in processes:
        process.start()
    claims = [found.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(each for found in claims for each in found) == sorted((job.id, 1) for job in jobs)
    place = {job.id: number for number, job in enumerate(jobs)}
    for mine in claims:
        order = [place[job_id] for job_id, _ in mine]
        assert order == sorted(order), "a process got a younger job before an older one"


def test_deleting_and_completing_at_the_same_moment(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    """Either the worker published and the deletion knows the files, or the worker is told that it lost."""
    outcomes = set()
    for _ in range(40):
        create(store)
        claimed = claim(queue)
        barrier = threading.Barrier(2)
        published = []

        def complete(claimed=claimed, barrier=barrier, published=published) -> None:
            barrier.wait()
            try:
                queue.complete(claimed, FILES)
                published.append(True)
            except LeaseLostError:
                published.append(False)

        worker = threading.Thread(target=complete)
        worker.start()
        barrier.wait()
        deletion = store.delete(KIND, CALLER, claimed.job.id)
        worker.join()
        assert deletion is not None
        assert published == [bool(deletion.files)]
        assert deletion.was_running is not published[0]
        tombstone = row(database, claimed.job.id)
        assert tombstone is not None
        assert (tombstone.files, tombstone.file_bytes, tombstone.request) == ({}, 0, {})
        outcomes.add(published[0])
    assert queue.claim(KIND, "worker", 1) is None


def test_two_deletions_at_once(store: JobStore) -> None:
    for _ in range(20):
        (job,) = create(store)
        barrier = threading.Barrier(2)
        found = []

        def delete(job=job, barrier=barrier, found=found) -> None:
            barrier.wait()
            found.append(store.delete(KIND, CALLER, job.id))

        threads = [threading.Thread(target=delete) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(each is None for each in found) == [False, True]


def test_no_claims_of_an_empty_queue(queue: JobQueue, store: JobStore) -> None:
    assert queue.claim(KIND, "worker", 1) is None
    store.create(new_job())
    assert queue.claim(KIND, "worker", 1) is not None


def test_only_jobs_of_the_models_are_claimed(store: JobStore, queue: JobQueue) -> None:
    create(store, model="unloaded")
    (job,) = create(store)
    assert claim(queue, models=["tiny-wan", "other"]).job.id == job.id
    assert queue.claim(KIND, "worker", 1, models=["tiny-wan", "other"]) is None
    assert queue.claim(KIND, "worker", 1, models=[]) is None


def test_a_job_that_is_given_back_for_later(database: Database, store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store)
    queue.release(claim(queue), counts=True, delay=500)
    waiting = get(store, job)
    assert (waiting.status, waiting.attempts, waiting.worker) == (JobStatus.QUEUED, 1, None)
    assert queue.claim(KIND, "worker", 1) is None
    shift(database, job.id, lease_until=-501)
    assert claim(queue).token == 2


def test_the_image_is_its_holders(database: Database, store: JobStore, queue: JobQueue) -> None:
    create(store, image=b"image")
    first = claim(queue)
    assert queue.read_image(first) == b"image"
    expire(database, first)
    second = claim(queue)
    with pytest.raises(LeaseLostError):
        queue.read_image(first)
    assert queue.read_image(second) == b"image"
    store.delete(KIND, CALLER, second.job.id)
    with pytest.raises(LeaseLostError):
        queue.read_image(second)


def test_a_job_without_an_image(store: JobStore, queue: JobQueue) -> None:
    create(store)
    assert queue.read_image(claim(queue)) is None


def test_discard(store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store, idempotency=key())
    claimed = claim(queue)
    queue.discard(claimed)
    assert store.get(KIND, CALLER, job.id) is None
    with pytest.raises(LeaseLostError):
        queue.complete(claimed, FILES)
    assert store.create(new_job(idempotency=key(digest="other"))).is_new


def test_only_the_holder_discards(database: Database, store: JobStore, queue: JobQueue) -> None:
    """What another one makes, or has made, is not its to take."""
    (job,) = create(store)
    first = claim(queue)
    expire(database, first)
    second = claim(queue)
    with pytest.raises(LeaseLostError):
        queue.discard(first)
    queue.complete(second, FILES)
    for each in (first, second):
        with pytest.raises(LeaseLostError):
            queue.discard(each)
    assert get(store, job).status is JobStatus.COMPLETED
