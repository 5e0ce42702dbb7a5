from __future__ import annotations

import random
import threading

import pytest
from diffusion_backend.errors import DiffusionError, Status
from jobs import CALLER, KIND, create, new_job
from openai_adapter.database import Database
from openai_adapter.job_pages import parse_limit
from openai_adapter.job_store import JobStore
from openai_adapter.job_table import Job
from sqlalchemy import text, update


def list_all(store: JobStore, order: str, limit: int) -> list[str]:
    ids: list[str] = []
    after = None
    while True:
        page = store.list_page(KIND, CALLER, after=after, limit=limit, order=order)
        ids += [job.id for job in page.data]
        if not page.has_more:
            return ids
        assert len(page.data) == limit
        after = page.last_id


def test_an_empty_list(store: JobStore) -> None:
    page = store.list_page(KIND, CALLER)
    assert (page.data, page.first_id, page.last_id, page.has_more) == ([], None, None, False)


def test_the_newest_twenty_come_first(store: JobStore) -> None:
    ids = [job.id for job in create(store, 21)][::-1]
    page = store.list_page(KIND, CALLER)
    assert [job.id for job in page.data] == ids[:20]
    assert (page.first_id, page.last_id, page.has_more) == (ids[0], ids[19], True)
    last = store.list_page(KIND, CALLER, after=page.last_id)
    assert [job.id for job in last.data] == ids[20:]
    assert (last.first_id, last.last_id, last.has_more) == (ids[20], ids[20], False)
    assert store.list_page(KIND, CALLER, after=last.last_id).data == []


@pytest.mark.parametrize("limit", [1, 7, 20, 100])
def test_ascending_is_the_reverse_of_descending_within_one_second(
    database: Database, store: JobStore, limit: int
) -> None:
    ids = [job.id for job in create(store, 23)]
    with database.writing() as session:
        session.execute(update(Job).values(created_at=1_800_000_000.0))
    assert list_all(store, "asc", limit) == ids
    assert list_all(store, "desc", limit) == ids[::-1]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("seed", range(3))
def test_every_job_once_with_deletions_between_pages(store: JobStore, order: str, seed: int) -> None:
    """Jobs are deleted on all sides of the cursor, at it as well, and new ones come while the list is read."""
    choose = random.Random(seed)
    jobs = create(store, 250)
    ids = [job.id for job in (jobs if order == "asc" else jobs[::-1])]
    left, seen, created = set(ids), [], set()
    after = None
    while True:
        page = store.list_page(KIND, CALLER, after=after, limit=choose.randint(1, 30), order=order)
        assert all(job.id in left or job.id in created for job in page.data)
        seen += [job.id for job in page.data]
        if not page.has_more:
            break
        after = page.last_id
        assert after is not None
        doomed = choose.sample(sorted(left), min(len(left), 5))
        if choose.random() < 0.5 and after in left:
            doomed.append(after)
        for job_id in set(doomed):
            assert store.delete(KIND, CALLER, job_id) is not None
            left.remove(job_id)
        created.add(store.create(new_job()).job.id)
    assert len(seen) == len(set(seen)), "a job came twice"
    assert left <= set(seen), "a job was missed"
    old = [job_id for job_id in seen if job_id not in created]
    assert old == [job_id for job_id in ids if job_id in set(old)], "out of order"
    # Who pages from old to new meets the new ones; who pages from new to old has left their place behind.
    assert (created <= set(seen) | {seen[-1]}) if order == "asc" else not (created & set(seen))


def test_readers_of_the_end_miss_nothing_of_concurrent_writers(store: JobStore) -> None:
    """A job never appears behind the cursor of somebody who reads from old to new."""
    writers = [threading.Thread(target=create, args=(store, 25)) for _ in range(4)]
    for writer in writers:
        writer.start()
    seen: list[str] = []
    after = None
    while len(seen) < 100:
        is_more_to_come = any(writer.is_alive() for writer in writers)
        page = store.list_page(KIND, CALLER, after=after, limit=3, order="asc")
        assert page.data or is_more_to_come, "a job was missed"
        seen += [job.id for job in page.data]
        after = page.last_id or after
    for writer in writers:
        writer.join()
    assert seen == list_all(store, "asc", 100)


@pytest.mark.parametrize("limit", [0, -1, 101, 10**30])
def test_bad_limits(store: JobStore, limit: int) -> None:
    with pytest.raises(
        DiffusionError, match=f"'limit' is {limit}; allowed: integers from 1 to 100"
    ) as raised:
        store.list_page(KIND, CALLER, limit=limit)
    assert (raised.value.status, raised.value.param) == (Status.INVALID_ARG, "limit")


@pytest.mark.parametrize("value", ["", "x", "1.5", "-1", "0", "101", "²", "٣", " 5", "1" * 5000])
def test_limits_that_are_none(value: str) -> None:
    with pytest.raises(DiffusionError) as raised:
        parse_limit(value)
    assert raised.value.param == "limit"


def test_limits() -> None:
    assert [parse_limit(text) for text in ("1", "020", "100")] == [1, 20, 100]


@pytest.mark.parametrize("order", ["", "ASC", "newest"])
def test_bad_orders(store: JobStore, order: str) -> None:
    with pytest.raises(DiffusionError, match="allowed: 'asc', 'desc'") as raised:
        store.list_page(KIND, CALLER, order=order)
    assert (raised.value.status, raised.value.param) == (Status.INVALID_ARG, "order")


@pytest.mark.parametrize("after", ["", "video_0", "\0", "\ud800", "é"])
def test_cursors_that_never_were(store: JobStore, after: str) -> None:
    create(store)
    with pytest.raises(DiffusionError, match="allowed: the id of a video in this list") as raised:
        store.list_page(KIND, CALLER, after=after)
    assert (raised.value.status, raised.value.param) == (Status.INVALID_ARG, "after")


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_is_read_from_the_index(database: Database, store: JobStore, order: str) -> None:
    """No sorting, and nothing that grows with the table."""
    create(store, 3)
    where = f"kind = 'video' AND caller = 'c' AND deleted_at IS NULL AND sequence {'>' if order == 'asc' else '<'} 3"
    query = f"SELECT * FROM jobs WHERE {where} ORDER BY sequence {order} LIMIT 21"
    with database.reading() as session:
        if database.is_sqlite:
            plan = str(session.execute(text(f"EXPLAIN QUERY PLAN {query}")).all())
        else:
            session.execute(text("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"))
            plan = str(session.execute(text(f"EXPLAIN {query}")).all())
    assert "jobs_listed" in plan
    assert "sort" not in plan.lower()
    assert "temp b-tree" not in plan.lower()
