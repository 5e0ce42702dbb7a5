"""``/health/live``: the process runs. ``/health``: every model serves. ``/health/serving``: at least one does."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from openai_adapter.errors import unavailable
from openai_adapter.registry import Registry


def routes(registry: Registry) -> APIRouter:
    """The health routes; all are open without a key, but tell strangers less."""
    router = APIRouter(tags=["health"])

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live")
    async def live() -> JSONResponse:
        """200 as long as the process answers."""
        return JSONResponse({"status": "live"})

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def ready(request: Request) -> JSONResponse:
        """200 when Triton and all of its models are ready, else 503 with the reason.

        Where there are keys, the models and the reason, which names them, are for those who have one.
        """
        return _answer(request, registry, None if registry.problem is None else "not_ready", "ready")

    @router.head("/health/serving", include_in_schema=False)
    @router.get("/health/serving")
    async def serving(request: Request) -> JSONResponse:
        """200 when Triton can be reached and at least one model is ready, else 503 with the reason.

        Where there are keys, the models and the reason, which names them, are for those who have one.
        """
        is_serving = any(model.ready for model in registry.models.values())
        return _answer(request, registry, None if is_serving else "not_serving", "serving")

    return router


def _answer(request: Request, registry: Registry, failure: str | None, success: str) -> JSONResponse:
    """Whether each model is ready, under the status ``success``; 503 with the reason and the code ``failure``."""
    is_stranger = getattr(request.state, "is_stranger", False)
    models = {name: model.ready for name, model in sorted(registry.models.items())}
    details = {} if is_stranger else {"models": models}
    if failure is None:
        return JSONResponse({"status": success, **details})
    reason = None if is_stranger else registry.problem
    error = unavailable(reason or f"the server is {failure.replace('_', ' ')}", failure)
    body = {"status": failure, **details, **error.to_envelope()}
    return JSONResponse(body, error.status, error.headers)
