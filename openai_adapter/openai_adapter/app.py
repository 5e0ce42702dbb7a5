"""``create_app``: everything is built here, and nothing at import."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from openai_adapter import (
    errors,
    health,
    images,
    job_retention,
    media,
    metrics,
    middleware,
    models,
    videos,
)
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.registry import Registry
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton
from openai_adapter.video_worker import VideoWorker

TOMBSTONE_SECONDS = 86400.0  # how long the cursor of a deleted job keeps its place


def create_app(settings: Settings) -> FastAPI:
    """The ASGI app. Its lifespan owns the channel to Triton, the poller, the worker on jobs, and the sweeps.

    Raises:
        DatabaseError: the URL of the database of jobs is none. The lifespan raises it where it cannot be opened.
    """
    registry = Registry(settings.default_model)
    triton = Triton(settings, registry)
    measured = metrics.Metrics(settings.healing_report)
    store = media.MediaStore(settings.media_store_url, settings.media_ttl_seconds)
    database = Database(settings.job_database_url)
    jobs = AsyncJobs(database, settings.job_ttl_seconds)
    files = JobFiles(settings.job_store_url)
    limits = job_retention.Limits(settings.job_max_bytes, TOMBSTONE_SECONDS)
    worker = VideoWorker(settings, registry, triton, jobs, files, measured)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(database.upgrade)
        async with triton:
            loops = [
                asyncio.create_task(loop)
                for loop in (
                    media.sweep_forever(store, measured),
                    job_retention.sweep_forever(database, jobs.queue, files, limits, measured),
                    worker.run(),
                )
            ]
            yield
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        jobs.close()
        database.close()

    app = FastAPI(
        title="Triton Diffusion",
        lifespan=lifespan,
        middleware=_middleware(settings, measured),
        redirect_slashes=False,
        # FastAPI's pages of documentation load scripts from elsewhere; /openapi.json has it all.
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.include_router(images.routes(settings, registry, triton, store, jobs, files, measured))
    app.include_router(videos.routes(videos.Videos(settings, registry, jobs, files, worker)))
    app.include_router(models.routes(registry))
    app.include_router(media.routes(store))
    app.include_router(health.routes(registry))
    app.include_router(metrics.routes(measured))
    return app


def _middleware(settings: Settings, measured: metrics.Metrics) -> list[Middleware]:
    """Outermost first: ids and figures cover every answer, and a page of another origin can read them all."""
    stack = [Middleware(middleware.RequestIds), Middleware(middleware.Measure, metrics=measured)]
    if settings.cors_origins:
        stack.append(
            Middleware(
                middleware.Cors,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[
                    middleware.REQUEST_ID_HEADER,
                    "retry-after",
                    "openai-poll-after-ms",
                    *("accept-ranges", "content-disposition", "content-range", "etag"),
                    *errors.DO_NOT_RETRY,
                ],
            )
        )
    stack.append(Middleware(middleware.Failures))
    if settings.api_keys:
        keys = [key.get_secret_value() for key in settings.api_keys]
        stack.append(Middleware(middleware.ApiKeys, keys=keys))
    stack.append(
        Middleware(
            middleware.BodyLimit,
            limit=settings.max_body_bytes,
            uploads_limit=settings.max_body_bytes + settings.max_base64_bytes,
        )
    )
    stack.append(Middleware(middleware.Forms))
    return stack
