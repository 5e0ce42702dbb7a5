"""Pure ASGI middleware, outermost first: request ids, metrics, CORS, failures, API keys, body size, forms."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_adapter.errors import ApiError, explain
from openai_adapter.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_OPEN_PATHS = ("/health", "/health/live", "/health/serving")
_OPEN_PREFIX = "/v1/media/"
_UPLOADING_PATHS = ("/v1/videos",)  # where a body may hold an image
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_DRAIN_FACTOR = 16


class HttpMiddleware(ABC):
    """Answers HTTP requests; the rest (the lifespan) is the app's alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.answer if scope["type"] == "http" else self.app)(scope, receive, send)

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""


class RequestIds(HttpMiddleware):
    """``x-request-id`` on every response: the client's own where it is well-formed, else a new one."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class Measure(HttpMiddleware):
    """Counts and times requests by the template of their route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        super().__init__(app)
        self.metrics = metrics

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0  # stays so where the connection was lost before an answer
        start = time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self.metrics.in_progress.track_inprogress():
            try:
                await self.app(scope, receive, send_and_note)
            finally:
                seconds = time.perf_counter() - start
                route = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self.metrics.requests.labels(route, method, str(status)).inc()
                self.metrics.seconds.labels(route, method).observe(seconds)
                logger.debug(
                    "%s %s %d %.3f s %s", method, route, status, seconds, scope["state"]["request_id"]
                )


class Cors(CORSMiddleware):
    """Starlette's, with our envelope for a preflight that it refuses."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = ApiError(400, bytes(response.body).decode(), code="cors_refused").to_response()
        refused.headers.update({key: value for key, value in response.headers.items() if key == "vary"})
        return refused


class Failures(HttpMiddleware):
    """An exception that nobody expected: a 500 that tells nothing, and the traceback in the log."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except (Exception, asyncio.CancelledError) as error:
            if started:  # only closing the connection can tell the client now
                raise
            await explain(error, scope["state"]["request_id"]).to_response()(scope, receive, send)


class ApiKeys(HttpMiddleware):
    """Bearer keys for everything but health and media files.

    ``is_stranger`` in the state says who has none, and ``caller`` who it is: a digest of the key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        self.keys = [key.encode() for key in keys]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = _bearer_token(Headers(scope=scope))
        is_allowed = self._is_allowed(token)
        scope["state"]["is_stranger"] = not is_allowed
        scope["state"]["caller"] = hashlib.sha256(token).hexdigest() if is_allowed else ""
        if is_allowed or self._is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        refused = ApiError(
            401,
            "no valid API key; allowed: 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refused.to_response()(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)

    def _is_allowed(self, token: bytes) -> bool:
        # A list, not a generator: every key is compared, so the time does not tell which one matched.
        matches = [hmac.compare_digest(token, key) for key in self.keys]
        return any(matches)


def _bearer_token(headers: Headers) -> bytes:
    """Empty where there is none, and so is no key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode() if scheme.lower() == "bearer" else b""


def caller_of(request: Request) -> str:
    """Whose the jobs of a request are: of everybody, where no keys are needed."""
    return str(getattr(request.state, "caller", ""))


class BodyLimit(HttpMiddleware):
    """413 for a body that is larger than its path's limit in bytes, announced or sent in chunks."""

    def __init__(self, app: ASGIApp, limit: int, uploads_limit: int) -> None:
        super().__init__(app)
        self.limit = limit
        self.uploads_limit = uploads_limit

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.uploads_limit if scope["path"] in _UPLOADING_PATHS else self.limit
        announced = Headers(scope=scope).get("content-length", "0")
        if not _LENGTH.fullmatch(announced):
            invalid = ApiError(400, "'content-length' is not a number", code="invalid_request")
            await invalid.to_response()(scope, receive, send)
            return
        if int(announced) > limit:
            await self._drain(receive, limit)
            await self._too_large(limit).to_response()(scope, receive, send)
            return
        read = 0

        async def receive_within_limit() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                await self._drain(receive, limit)
                raise self._too_large(limit)
            return message

        await self.app(scope, receive_within_limit, send)

    @staticmethod
    def _too_large(limit: int) -> ApiError:
        return ApiError(
            413,
            f"the body is too large; allowed: {limit} bytes",
            code="content_too_large",
            headers={"Connection": "close"},
        )

    @staticmethod
    async def _drain(receive: Receive, limit: int) -> None:
        """Throw away the rest: closing while a client still sends would lose it the answer."""
        left = limit * _DRAIN_FACTOR
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return


class Forms(HttpMiddleware):
    """Closes the files of a request's form (``bodies.read_fields``) once it is answered."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            if (form := scope["state"].get("form")) is not None:
                await form.close()
