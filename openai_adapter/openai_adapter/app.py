"""``create_app``: everything is built here, and nothing at import."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from openai_adapter import errors, health, images, media, metrics, middleware, models
from openai_adapter.registry import Registry
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton


def create_app(settings: Settings) -> FastAPI:
    """The ASGI app. Its lifespan owns the channel to Triton, the poller and the sweep of expired files."""
    registry = Registry(settings.default_model)
    triton = Triton(settings, registry)
    measured = metrics.Metrics(settings.healing_report)
    store = media.MediaStore(settings.media_store_url, settings.media_ttl_seconds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with triton:
            sweep = asyncio.create_task(media.sweep_forever(store, measured))
            yield
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)

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
    app.include_router(images.routes(settings, registry, triton, store, measured))
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
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[middleware.REQUEST_ID_HEADER, "retry-after", *errors.DO_NOT_RETRY],
            )
        )
    stack.append(Middleware(middleware.Failures))
    if settings.api_keys:
        keys = [key.get_secret_value() for key in settings.api_keys]
        stack.append(Middleware(middleware.ApiKeys, keys=keys))
    stack.append(Middleware(middleware.BodyLimit, limit=settings.max_body_bytes))
    return stack
