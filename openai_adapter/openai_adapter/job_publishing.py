"""The end of an attempt at a job: its files are stored, and the job is completed with them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.job_files import JobFiles
from openai_adapter.job_lease import PAUSE_SECONDS, insist
from openai_adapter.job_queue import Claim, LeaseLostError
from openai_adapter.job_table import FileEntry

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def publish(
    jobs: AsyncJobs,
    files: JobFiles,
    claim: Claim,
    parts: Mapping[str, bytes],
    result: Mapping[str, Any],
    *,
    patience: float = 0.0,
) -> None:
    """Store ``parts``, such as ``video.mp4``, and complete the job with them; else none of them is left.

    A store that takes nothing is tried again for ``patience`` seconds, as the work is done already.
    Once the job is completed, being cancelled changes nothing.

    Raises:
        LeaseLostError: somebody else has the job, or it was deleted.
        OSError: the store takes no more.
    """
    deadline = time.monotonic() + patience
    entries: dict[str, FileEntry] = {}
    try:
        for part, data in parts.items():
            entries[part.partition(".")[0]] = await _put(files, claim, part, data, deadline)
    except BaseException:
        await in_thread(files.discard, claim, parts)
        raise
    try:
        await insist(lambda: jobs.complete(claim, entries, result))
    except LeaseLostError:
        await in_thread(files.discard, claim, parts)
        raise
    # After any other error the job may be completed: if not, the next sweep removes its files.


async def _put(files: JobFiles, claim: Claim, part: str, data: bytes, deadline: float) -> FileEntry:
    while True:
        try:
            return await in_thread(files.put, claim, part, data)
        except OSError as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("%s: %s could not be stored: %s", claim.job.id, part, error)
            await asyncio.sleep(PAUSE_SECONDS)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As ``asyncio.to_thread``, but however often it is cancelled, it waits for the thread.

    What the thread uses is let go of afterwards.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()
