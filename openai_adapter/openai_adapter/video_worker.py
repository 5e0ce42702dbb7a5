"""The worker that makes the videos of queued jobs, inside each adapter: the queue is the table of jobs.

A job runs until its video is published, or it fails for good. What may pass (a process of the model server died, the
server is busy) is tried again, a few times; an adapter that stops gives its jobs back, and those of one that died are
free when their leases have run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from diffusion_backend.client import check_slice, require_final
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.settings import Settings as VideoSettings
from sqlalchemy.exc import SQLAlchemyError

from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.errors import DO_NOT_RETRY, ApiError, explain
from openai_adapter.job_files import JobFiles
from openai_adapter.job_lease import (
    INSIST_SECONDS,
    LEASE_SECONDS,
    Lease,
    WorkTooLongError,
    insist,
    worker_name,
)
from openai_adapter.job_publishing import in_thread, publish
from openai_adapter.job_queue import Claim, LeaseLostError
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Registry
from openai_adapter.request_fields import blame
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton
from openai_adapter.video_files import VideoFiles
from openai_adapter.video_request import VideoRequest

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

KIND = "video"
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 2.0  # after the first failed attempt; twice as long after each further one
_SHOWN = ("decode_path", "timings")


@dataclass(frozen=True)
class _Made:
    """The files of a video, and what the server said of making it."""

    files: dict[str, bytes]
    info: dict[str, Any]


class VideoWorker:
    """Works on jobs, some at a time, while ``run`` does."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        triton: Triton,
        jobs: AsyncJobs,
        files: JobFiles,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._triton = triton
        self._jobs = jobs
        self._files = files
        self._metrics = metrics
        self._recovery = Recovery(triton, registry, metrics)
        self._timeout = settings.video_timeout_seconds
        self._free = asyncio.Semaphore(settings.max_videos_in_flight)
        self._news = asyncio.Event()
        self._running: dict[asyncio.Task[None], str] = {}

    def wake(self) -> None:
        """There is a new job."""
        self._news.set()

    def cancel(self, job_id: str) -> None:
        """The job was deleted. Another adapter's worker learns that from the table."""
        for task, running_id in self._running.items():
            if running_id == job_id:
                task.cancel()

    async def run(self) -> None:
        """Work until cancelled; then give back what is not finished."""
        try:
            while True:
                await self._free.acquire()
                self._start(await self._claim())
        finally:
            tasks = list(self._running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, claim: Claim) -> None:
        task = asyncio.create_task(self._work(claim))
        self._running[task] = claim.job.id

        def end(task: asyncio.Task[None]) -> None:
            self._free.release()
            del self._running[task]

        task.add_done_callback(end)

    async def _claim(self) -> Claim:
        """The next job of a model that is ready, once there is one."""
        while True:
            self._news.clear()
            ready = [name for name, model in self._registry.models.items() if model.ready]
            try:
                if ready and (
                    claim := await self._jobs.claim(KIND, worker_name(), LEASE_SECONDS, models=ready)
                ):
                    return claim
            except SQLAlchemyError as error:
                logger.warning("the queue of videos cannot be read: %s", error)
            except Exception:
                logger.exception("the queue of videos could not be read")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._news.wait()

    async def _work(self, claim: Claim) -> None:
        job_id = claim.job.id
        try:
            with self._jobs.queue.working_on(claim):
                outcome = await self._attempt(claim)
        except LeaseLostError:
            outcome = "lost"
        except asyncio.CancelledError:
            with contextlib.suppress(LeaseLostError, SQLAlchemyError):
                await self._jobs.release(claim, counts=False)
            raise
        except Exception:
            outcome = "lost"
            logger.exception("%s: its outcome could not be written", job_id)
        logger.info("%s: %s", job_id, outcome)
        self._metrics.jobs.labels(KIND, outcome).inc()

    async def _attempt(self, claim: Claim) -> str:
        """Make and publish the video, or say why not; returns what became of it."""
        lease = Lease(self._jobs, claim)
        try:
            await lease.hold(self._make_and_publish(claim, lease), self._timeout)
        except LeaseLostError:
            raise
        except WorkTooLongError:
            message = f"the video was not done within {self._timeout:g} seconds"
            return await self._fail(claim, "timeout", message)
        except Exception as error:
            return await self._give_up(claim, error)
        return "completed"

    async def _give_up(self, claim: Claim, error: Exception) -> str:
        """Put the job back where it may pass the next time, else end it."""
        job = claim.job
        if _may_pass(error) and job.attempts < job.max_attempts:
            delay = _RETRY_SECONDS * 2 ** (job.attempts - 1)
            logger.warning(
                "%s: attempt %d failed: %s", job.id, job.attempts, error, exc_info=_unexpected(error)
            )
            await insist(lambda: self._jobs.release(claim, counts=True, delay=delay))
            return "retried"
        told = explain(blame(error, VideoRequest.model_fields), job.id)
        return await self._fail(claim, told.code or "server_error", told.message)

    async def _fail(self, claim: Claim, code: str, message: str) -> str:
        job = await insist(lambda: self._jobs.fail(claim, code, message))
        return job.status.value  # a ``complete`` whose outcome was not known may have come first

    async def _make_and_publish(self, claim: Claim, lease: Lease) -> None:
        job = claim.job
        settings = VideoSettings.model_validate(job.request["settings"])
        image = await self._jobs.read_image(claim)

        async def attempt() -> _Made:
            return await self._make(job.model, settings, image, lease)

        made = await self._recovery.run(job.model, attempt)
        result = {key: made.info.get(key) for key in _SHOWN}
        await publish(self._jobs, self._files, claim, made.files, result, patience=INSIST_SECONDS)
        self._metrics.videos.labels(job.model, settings.quality, str(made.info.get("decode_path"))).inc()

    async def _make(self, model: str, settings: VideoSettings, image: bytes | None, lease: Lease) -> _Made:
        """One generation, encoded slice by slice while it arrives."""
        assert settings.num_frames
        assert settings.fps
        last, count = None, 0
        size = (settings.width, settings.height)
        with VideoFiles(settings.num_frames, settings.fps, *size) as files:
            async with aclosing(
                self._triton.client.stream(model, **self._ask(model, settings, image))
            ) as answers:
                async for last in answers:
                    if last.is_progress:
                        lease.report(100 * last.info["step"] // settings.num_inference_steps)
                    else:
                        check_slice(last, count)
                        await _take(files.add, last.frames)
                        count += len(last.frames)
            return _Made(await _take(files.finish), require_final(last).info)

    def _ask(self, model: str, settings: VideoSettings, image: bytes | None) -> dict[str, Any]:
        """The arguments of the client: progress where the model's stages tell of it."""
        facts = self._registry.find(model).denoise_facts or {}
        return {
            "prompt": settings.prompt,
            "negative_prompt": settings.negative_prompt,
            **settings.to_parameters(),
            "progress": facts.get("no_progress") is None,
            "image": image,
            "timeout": self._timeout,
        }


async def _take(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` on the server's frames returns, in a thread.

    Raises:
        DiffusionError: INTERNAL, they are not those that were asked for. The next attempt would bring the same ones.
    """
    try:
        return await in_thread(work, *args, **kwargs)
    except ValueError as error:
        raise DiffusionError(f"the server sent the wrong frames: {error}", code="wrong_frames") from error


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may end otherwise.

    Not where a stage has said what is wrong with the request itself; nor where the model server has lost its work twice
    (``Recovery``), as it may be this very job that brings a process down, and the work of others with it.
    """
    if isinstance(error, ApiError):
        return not DO_NOT_RETRY.items() <= error.headers.items()
    if isinstance(error, DiffusionError) and error.code not in (None, "internal_error"):
        return error.status in (Status.UNAVAILABLE, Status.CANCELLED)
    return True


def _unexpected(error: Exception) -> Exception | None:
    """``error`` where it has to be looked into: nobody has put it into words."""
    return None if isinstance(error, ApiError | DiffusionError) else error
