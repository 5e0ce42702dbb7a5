"""``/health/live``: the process runs. ``/health``: a request for an image would be served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from openai_adapter.errors import unavailable
from openai_adapter.registry import Registry


def routes(registry: Registry) -> APIRouter:
    """The two health routes; both are open without a key, but tell strangers less."""
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
        is_stranger = getattr(request.state, "is_stranger", False)
        models = {name: model.ready for name, model in sorted(registry.models.items())}
        details = {} if is_stranger else {"models": models}
        if registry.problem is None:
            return JSONResponse({"status": "ready", **details})
        error = unavailable("the server is not ready" if is_stranger else registry.problem, "not_ready")
        return JSONResponse(
            {"status": "not_ready", **details, **error.to_envelope()}, error.status, error.headers
        )

    return router
