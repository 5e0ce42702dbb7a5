"""Images of requests that bring an ``Idempotency-Key``: made once, and kept as a job for whoever asks again.

The request that claims the job makes the images; those that come meanwhile wait for it, and later ones get what it has
made. When it fails, or its client leaves, the next one that has the key does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from diffusion_backend.settings import Settings as ImageSettings
from sqlalchemy.exc import SQLAlchemyError

from openai_adapter import idempotency, image_files
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.errors import DO_NOT_RETRY, ApiError
from openai_adapter.image_generation import ImageGenerator, Picture
from openai_adapter.image_inputs import RequestInputs
from openai_adapter.image_request import ImageRequest, Plan
from openai_adapter.job_files import JobFiles
from openai_adapter.job_lease import LEASE_SECONDS, Lease, worker_name
from openai_adapter.job_publishing import publish
from openai_adapter.job_queue import Claim, LeaseLostError
from openai_adapter.job_store import Idempotency, NewJob
from openai_adapter.job_table import Job, JobStatus
from openai_adapter.metrics import Metrics
from openai_adapter.settings import Settings

logger = logging.getLogger(__name__)

KIND = "image"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Making:
    """Images that are being made, or were made. Of a key, model and ``plan`` are those of the first request with it."""

    model: str
    plan: Plan
    created_at: int
    pictures: AsyncGenerator[Picture, None]


class KeyedImages:
    """What ``ImageGenerator`` is, for requests with a key."""

    def __init__(
        self,
        generator: ImageGenerator,
        jobs: AsyncJobs,
        files: JobFiles,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._generator = generator
        self._jobs = jobs
        self._files = files
        self._metrics = metrics
        self._ttl = settings.job_ttl_seconds
        self._timeout = settings.request_timeout_seconds

    async def find(
        self, caller: str, key: Idempotency, request: ImageRequest, inputs: RequestInputs
    ) -> Making | None:
        """The images of ``key``, if it was used before.

        Raises:
            ApiError: 409, it was used for another body.
        """
        job = await idempotency.find_job(self._jobs, KIND, caller, key)
        return None if job is None else self._follow(job, key, request, inputs)

    async def begin(
        self,
        caller: str,
        key: Idempotency,
        model: str,
        plan: Plan,
        request: ImageRequest,
        inputs: RequestInputs,
    ) -> Making:
        """The images of ``key``, which are made now, or by the request that was faster.

        Raises:
            ApiError: 409, it was used for another body.
        """
        content = {"settings": plan.settings.model_dump(), "n": plan.n}
        new = NewJob(KIND, caller, model, content, idempotency=key, ttl=self._ttl)
        return self._follow((await idempotency.create_job(self._jobs, new)).job, key, request, inputs)

    def _follow(self, job: Job, key: Idempotency, request: ImageRequest, inputs: RequestInputs) -> Making:
        plan = Plan(ImageSettings.model_validate(job.request["settings"]), job.request["n"])
        return Making(job.model, plan, int(job.created_at), self._stream(job, key, plan, request, inputs))

    async def _stream(
        self, job: Job, key: Idempotency, plan: Plan, request: ImageRequest, inputs: RequestInputs
    ) -> AsyncGenerator[Picture, None]:
        """As ``ImageGenerator.stream``; images that were there already come without previews."""
        again = NewJob(KIND, job.caller, job.model, job.request, idempotency=key, ttl=self._ttl)
        deadline = asyncio.get_running_loop().time() + self._timeout
        while asyncio.get_running_loop().time() < deadline:
            now = await self._jobs.get(KIND, job.caller, job.id)
            if now is None:  # it failed, or was removed
                job = (await idempotency.create_job(self._jobs, again)).job
            elif now.status is JobStatus.FAILED:
                raise ApiError(
                    500, now.error_message or "", code=now.error_code or "server_error", headers=DO_NOT_RETRY
                )
            elif now.status is JobStatus.COMPLETED:
                if (made := await self._load(now)) is not None:
                    for picture in made:
                        yield picture
                    return
                await self._jobs.delete(KIND, job.caller, job.id)
            elif claim := await self._claim(now):
                with self._jobs.queue.working_on(claim):
                    async with aclosing(self._make(claim, plan, request, inputs)) as pictures:
                        async for picture in pictures:
                            yield picture
                return
            else:
                await asyncio.sleep(_LOOK_SECONDS)
        raise ApiError(
            504,
            f"the images were not done within {self._timeout:g} seconds",
            code="timeout",
            headers=DO_NOT_RETRY,
        )

    async def _claim(self, job: Job) -> Claim | None:
        """The right to make the images, unless somebody else has it."""
        if not await self._jobs.is_claimable(job.id):
            return None
        return await self._jobs.claim(KIND, worker_name(), LEASE_SECONDS, job_id=job.id)

    async def _make(
        self, claim: Claim, plan: Plan, request: ImageRequest, inputs: RequestInputs
    ) -> AsyncGenerator[Picture, None]:
        """Make the images; the last one is handed on when all are kept."""
        renewing = asyncio.create_task(Lease(self._jobs, claim).renew_forever())
        images: list[Picture] = []
        is_made = False
        try:
            files = await inputs.files(plan)
            async with aclosing(self._generator.stream(claim.job.model, plan, request, files)) as pictures:
                async for picture in pictures:
                    if picture.preview is None:
                        images.append(picture)
                    if len(images) == plan.n and not is_made:
                        is_made = True
                        await self._keep(claim, images, request)
                    yield picture
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            if not is_made:
                await self._forget(claim)

    async def _keep(self, claim: Claim, images: list[Picture], request: ImageRequest) -> None:
        """For whoever asks again; where that fails, the images are handed on all the same."""
        images = sorted(images, key=lambda image: image.index)
        extension = image_files.FORMATS[request.output_format][0]
        parts = {f"image{image.index}.{extension}": image.file for image in images}
        result = {"infos": [image.info for image in images]}
        try:
            await publish(self._jobs, self._files, claim, parts, result)
        except LeaseLostError:
            outcome = "lost"
        except Exception:
            logger.exception("%s: the images could not be kept", claim.job.id)
            outcome = "failed"
        else:
            outcome = "completed"
        self._metrics.jobs.labels(KIND, outcome).inc()

    async def _forget(self, claim: Claim) -> None:
        """A failure is not kept: the same request may pass when it comes again.

        Nothing is taken from a request that has the job by now.
        """
        with contextlib.suppress(LeaseLostError, SQLAlchemyError):
            await self._jobs.discard(claim)
        self._metrics.jobs.labels(KIND, "failed").inc()

    async def _load(self, job: Job) -> list[Picture] | None:
        """The images of a finished job; None where their files are gone."""
        assert job.result is not None
        pictures = []
        for index, info in enumerate(job.result["infos"]):
            file = await asyncio.to_thread(self._files.read, job.files[f"image{index}"]["name"])
            if file is None:
                return None
            pictures.append(Picture(index, file, info))
        return pictures
