"""``Idempotency-Key``: the same request, sent again with the same key, is worked on once.

https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
"""

from __future__ import annotations

import hashlib
import json

from starlette.requests import Request

from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.errors import DO_NOT_RETRY, ApiError, unavailable
from openai_adapter.job_store import (
    Created,
    Idempotency,
    IdempotencyConflictError,
    NewJob,
    QueueFullError,
)
from openai_adapter.job_table import Job

_HEADER = "idempotency-key"


def is_keyed(request: Request) -> bool:
    """Whether ``request`` brings a key: only then it matters what is the same as it."""
    return _HEADER in request.headers


def read_idempotency(request: Request, fields: object) -> Idempotency | None:
    """The key that ``request`` brings, if any, with a digest of its path and of all that its body asks for.

    ``fields`` are those of the body; a file among them is there as its digest.

    Raises:
        DiffusionError: INVALID_ARG, the key is not visible ASCII of at most 255 characters.
        ApiError: 400, there are several keys.
    """
    keys = request.headers.getlist(_HEADER)
    if not keys:
        return None
    if len(keys) > 1:
        raise ApiError(
            400,
            f"'Idempotency-Key' comes {len(keys)} times; allowed: once",
            param="Idempotency-Key",
            code="invalid_value",
        )
    asked = json.dumps([request.url.path, fields], sort_keys=True)
    return Idempotency(keys[0], hashlib.sha256(asked.encode()).hexdigest())


async def create_job(jobs: AsyncJobs, new: NewJob) -> Created:
    """A new job, or the one that the same request has made.

    Raises:
        ApiError: 409, the key was used for another body; 503, there are ``max_unfinished`` already.
    """
    try:
        return await jobs.create(new)
    except IdempotencyConflictError as error:
        raise _to_api_error(error) from None
    except QueueFullError as error:
        raise unavailable(f"the server is busy: {error}", "queue_full") from None


async def find_job(jobs: AsyncJobs, kind: str, caller: str, idempotency: Idempotency) -> Job | None:
    """The job that the same request has made already, if any.

    Raises:
        ApiError: 409, the key was used for another body.
    """
    try:
        return await jobs.find_by_key(kind, caller, idempotency)
    except IdempotencyConflictError as error:
        raise _to_api_error(error) from None


def _to_api_error(error: IdempotencyConflictError) -> ApiError:
    """Sending it again would change nothing."""
    return ApiError(
        409,
        f"'Idempotency-Key' {error}; allowed: a new key, or the same body",
        param="Idempotency-Key",
        code="idempotency_key_reused",
        headers=DO_NOT_RETRY,
    )
