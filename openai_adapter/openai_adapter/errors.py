"""One envelope for every error: ``{"error": {"message", "type", "param", "code"}}``, all four keys always."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

from diffusion_backend.errors import DiffusionError, Status, show
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from openai_adapter.whole_files import StoreError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 2
CLIENT_CLOSED_REQUEST = 499  # nginx's number; HTTP has none for a request that its sender gave up
DO_NOT_RETRY = {"x-should-retry": "false"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "content_too_large"}


class ApiError(Exception):
    """An error as the client gets it: what ``DiffusionError`` is to Triton, with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_envelope(self) -> dict[str, dict[str, str | None]]:
        """The error as a client reads it."""
        error = {
            "message": _printable(self.message),
            "type": "invalid_request_error" if self.status < 500 else "server_error",
            "param": None if self.param is None else _printable(self.param[:80]),
            "code": self.code,
        }
        return {"error": error}

    def to_response(self) -> JSONResponse:
        """The envelope as an answer of its own."""
        return JSONResponse(self.to_envelope(), self.status, self.headers)


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """503: worth asking again shortly."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def internal(code: str = "server_error") -> ApiError:
    """500: the details are in the log, and asking again would only repeat the model's work."""
    return ApiError(
        500, "the server failed to answer; its log has the details", code=code, headers=DO_NOT_RETRY
    )


def from_diffusion_error(error: DiffusionError, request_id: str) -> ApiError:
    """The HTTP side of a ``DiffusionError``; our own faults go to the log, with ``request_id``.

    A text that a stage wrote for the client has a code. What Triton or gRPC say themselves has none, and may
    hold addresses and paths: it goes to the log alone, and as an INVALID_ARG it means that we called Triton
    wrongly.
    """
    ours = error.code is not None
    if error.status is Status.INVALID_ARG and ours:
        return ApiError(400, error.message, param=error.param, code=error.code)
    if error.status is Status.UNAVAILABLE:
        logger.warning("request %s: upstream is unavailable: %s", request_id, error.message)
        message = error.message if ours else "the model server cannot take the request now"
        return unavailable(message, error.code or "service_unavailable")
    if error.status is Status.CANCELLED:
        return ApiError(CLIENT_CLOSED_REQUEST, "the request was cancelled", code=error.code or "cancelled")
    logger.error("request %s: upstream failed: %s", request_id, error.message, exc_info=error)
    return internal(error.code or "server_error")


def explain(error: BaseException, request_id: str) -> ApiError:
    """What the client is told of ``error``; what nobody expected goes to the log, with ``request_id``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DiffusionError):
        return from_diffusion_error(error, request_id)
    if isinstance(error, asyncio.CancelledError):
        logger.warning("request %s outlasted the time for shutting down", request_id)
        return unavailable("the server is shutting down", "shutting_down")
    logger.error("request %s failed", request_id, exc_info=error)
    if isinstance(error, SQLAlchemyError):
        return unavailable("the database of jobs cannot be used now")
    if isinstance(error, StoreError):
        return unavailable("the store of files cannot be used now")
    return internal()


def install(app: FastAPI) -> None:
    """Make the envelope the app's answer to every exception that a route or the router raises."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(DiffusionError, _on_diffusion_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.to_response()


async def _on_diffusion_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DiffusionError)
    return from_diffusion_error(error, request.state.request_id).to_response()


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is nothing at {show(request.url.path)}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "none")
        message = f"{request.method[:20]} is not allowed at {show(request.url.path)}; allowed: {allowed}"
    code = _CODES.get(error.status_code, "invalid_request")
    return ApiError(error.status_code, message, code=code, headers=error.headers).to_response()


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return ApiError(400, f"{param!r}: {first['msg']}", param=param, code="invalid_value").to_response()


def _printable(text: str) -> str:
    # A client's lone surrogates would make the response itself unencodable.
    return text.encode("utf-8", "backslashreplace").decode()
