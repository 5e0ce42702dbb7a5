from __future__ import annotations

import time

import pytest
from diffusion_backend.errors import DiffusionError, Status
from job_processes import PROCESSES, create_at_once
from jobs import CALLER, KIND, claim, create, key, new_job, row
from openai_adapter.database import Database
from openai_adapter.job_queue import JobQueue, LeaseLostError
from openai_adapter.job_store import (
    Deletion,
    IdempotencyConflictError,
    JobStore,
    NewJob,
    QueueFullError,
)
from openai_adapter.job_table import Job, JobStatus
from sqlalchemy import select

STRANGE = "\0 \ud800 \U0001f98a \\u0000 ' \" % 狐"


def test_a_new_job(store: JobStore) -> None:
    created = store.create(new_job("a fox"))
    assert created.is_new
    job = store.get(KIND, CALLER, created.job.id)
    assert job is not None
    assert job.id.startswith("video_")
    assert (job.status, job.progress, job.model) == (JobStatus.QUEUED, 0, "tiny-wan")
    assert job.request == {"prompt": "a fox"}
    assert abs(job.created_at - time.time()) < 5
    assert (job.completed_at, job.expires_at, job.error_code, job.result, job.files) == (
        None,
        None,
        None,
        None,
        {},
    )


def test_a_request_may_have_any_text(store: JobStore) -> None:
    job = store.create(new_job(STRANGE)).job
    again = store.get(KIND, CALLER, job.id)
    assert again is not None
    assert again.request == {"prompt": STRANGE}


@pytest.mark.parametrize("job_id", ["", "video_0", "video_\0", "\ud800", "%", "video_" + "0" * 32])
def test_what_is_not_there(store: JobStore, job_id: str) -> None:
    create(store)
    assert store.get(KIND, CALLER, job_id) is None
    assert store.delete(KIND, CALLER, job_id) is None


def test_others_and_other_kinds_do_not_see_a_job(store: JobStore) -> None:
    (job,) = create(store)
    for kind, caller in ((KIND, "other"), ("image", CALLER)):
        assert store.get(kind, caller, job.id) is None
        assert store.delete(kind, caller, job.id) is None
        assert store.list_page(kind, caller).data == []
        with pytest.raises(DiffusionError):
            store.list_page(kind, caller, after=job.id)
    assert store.get(KIND, CALLER, job.id) is not None


def test_the_same_key_gives_the_same_job(store: JobStore, queue: JobQueue) -> None:
    first = store.create(new_job(idempotency=key()))
    again = store.create(new_job(idempotency=key()))
    assert (first.is_new, again.is_new, again.job.id) == (True, False, first.job.id)
    queue.complete(claim(queue), {})
    done = store.create(new_job(idempotency=key()))
    assert (done.is_new, done.job.id, done.job.status) == (False, first.job.id, JobStatus.COMPLETED)
    assert queue.claim(KIND, "worker", 1) is None
    assert len(store.list_page(KIND, CALLER).data) == 1


def test_the_same_key_with_another_body_is_a_conflict(store: JobStore) -> None:
    store.create(new_job(idempotency=key()))
    with pytest.raises(IdempotencyConflictError, match="'key' was used for a request with another body"):
        store.create(new_job(idempotency=key(digest="other")))
    assert len(store.list_page(KIND, CALLER).data) == 1


def test_keys_of_others_and_other_kinds_do_not_count(store: JobStore) -> None:
    mine = store.create(new_job(idempotency=key()))
    others = store.create(new_job(idempotency=key(digest="other"), caller="other"))
    image = store.create(new_job(idempotency=key(digest="other"), kind="image"))
    assert len({mine.job.id, others.job.id, image.job.id}) == 3


def test_a_deleted_job_frees_its_key(store: JobStore) -> None:
    first = store.create(new_job(idempotency=key()))
    store.delete(KIND, CALLER, first.job.id)
    assert store.create(new_job(idempotency=key(digest="other"))).is_new


@pytest.mark.parametrize("text", ["", "a b", "\0", "é", "k" * 256])
def test_bad_keys(store: JobStore, text: str) -> None:
    with pytest.raises(DiffusionError) as raised:
        store.create(new_job(idempotency=key(text)))
    assert (raised.value.status, raised.value.param) == (Status.INVALID_ARG, "Idempotency-Key")


def test_many_processes_create_with_the_same_keys(empty_database_url: str, database: Database) -> None:
    """Each key makes one job, whoever was first."""
    ids = create_in_processes(empty_database_url, [new_job(idempotency=key(f"key-{n}")) for n in range(20)])
    assert all(each == ids[0] for each in ids)
    assert len(set(ids[0])) == 20
    assert len(JobStore(database).list_page(KIND, CALLER, limit=100).data) == 20


def test_many_processes_create_until_the_queue_is_full(empty_database_url: str, database: Database) -> None:
    """The last place in it is taken once."""
    ids = create_in_processes(empty_database_url, [new_job(max_unfinished=10)] * 8)
    assert len({job_id for each in ids for job_id in each}) == sum(map(len, ids)) == 10
    assert len(JobStore(database).list_page(KIND, CALLER, limit=100).data) == 10


def create_in_processes(url: str, requests: list[NewJob]) -> list[list[str]]:
    """The ids that each of four processes is told, which make the same requests at the same moments."""
    barrier, found = PROCESSES.Barrier(4), PROCESSES.Queue()
    arguments = (url, barrier, requests, found)
    processes = [PROCESSES.Process(target=create_at_once, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    ids = [found.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    return ids


def test_a_full_queue(store: JobStore, queue: JobQueue) -> None:
    """What is finished, deleted or of another kind takes no place; a key that was used needs none."""
    first, second = create(store, 2, max_unfinished=2)
    create(store, kind="image")
    with pytest.raises(QueueFullError, match="2 videos are waiting or being made"):
        create(store, max_unfinished=2)
    queue.fail(claim(queue), "code", "message")
    with_key = new_job(idempotency=key(), max_unfinished=2)
    third = store.create(with_key)
    assert store.create(with_key).job.id == third.job.id != first.id
    store.delete(KIND, CALLER, second.id)
    create(store, max_unfinished=2)
    with pytest.raises(QueueFullError):
        create(store, max_unfinished=2)


def test_delete_a_queued_job(store: JobStore, queue: JobQueue) -> None:
    (job,) = create(store)
    assert store.delete(KIND, CALLER, job.id) == Deletion(was_running=False, files=[])
    assert store.delete(KIND, CALLER, job.id) is None
    assert store.get(KIND, CALLER, job.id) is None
    assert queue.claim(KIND, "worker", 1) is None


def test_delete_a_running_job(store: JobStore, queue: JobQueue) -> None:
    create(store)
    claimed = claim(queue)
    assert store.delete(KIND, CALLER, claimed.job.id) == Deletion(was_running=True, files=[])
    for call in (
        lambda: queue.heartbeat(claimed),
        lambda: queue.report_progress(claimed, 50),
        lambda: queue.complete(claimed, {}),
        lambda: queue.fail(claimed, "code", "message"),
        lambda: queue.release(claimed, counts=True),
    ):
        with pytest.raises(LeaseLostError):
            call()
    assert queue.claim(KIND, "worker", 1) is None


def test_delete_purges_what_the_client_said_and_what_was_made(
    database: Database, store: JobStore, queue: JobQueue
) -> None:
    (job,) = create(store, idempotency=key())
    queue.complete(claim(queue), {"video": {"name": "n", "bytes": 7}}, {"seed": 5})
    assert store.delete(KIND, CALLER, job.id) == Deletion(was_running=False, files=["n"])
    tombstone = row(database, job.id)
    assert tombstone is not None
    assert tombstone.sequence == job.sequence
    assert tombstone.deleted_at is not None
    assert (tombstone.request, tombstone.files, tombstone.file_bytes, tombstone.result) == ({}, {}, 0, None)
    assert (tombstone.idempotency_key, tombstone.body_digest, tombstone.worker) == (None, None, None)


def test_delete_a_failed_job(store: JobStore, queue: JobQueue) -> None:
    create(store)
    job = queue.fail(claim(queue), "code", "message")
    assert store.delete(KIND, CALLER, job.id) == Deletion(was_running=False, files=[])
    assert store.get(KIND, CALLER, job.id) is None


def test_the_image_is_its_callers_until_it_is_deleted(database: Database, store: JobStore) -> None:
    (job,) = create(store, image=b"image")
    assert store.image_of(KIND, CALLER, job.id) == b"image"
    assert store.image_of(KIND, "other", job.id) is None
    assert store.image_of("image", CALLER, job.id) is None
    assert store.image_of(KIND, CALLER, "video_\0") is None
    store.delete(KIND, CALLER, job.id)
    assert store.image_of(KIND, CALLER, job.id) is None
    with database.reading() as session:
        assert session.scalar(select(Job.image).where(Job.id == job.id)) is None
