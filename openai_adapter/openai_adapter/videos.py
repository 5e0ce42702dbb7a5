"""``/v1/videos``: videos are jobs. They are created, looked up, listed, fetched, made anew, and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from diffusion_backend.errors import invalid, show
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_adapter import idempotency, video_answers, video_request
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.bodies import is_form, read_fields, read_json_object
from openai_adapter.byte_ranges import serve_bytes
from openai_adapter.errors import DO_NOT_RETRY, ApiError
from openai_adapter.image_inputs import ImageInputs
from openai_adapter.job_files import JobFiles
from openai_adapter.job_pages import DEFAULT_LIMIT, DEFAULT_ORDER, parse_limit
from openai_adapter.job_store import Idempotency, NewJob
from openai_adapter.job_table import Job, JobStatus
from openai_adapter.middleware import caller_of
from openai_adapter.registry import Registry
from openai_adapter.request_fields import from_form, unwrap
from openai_adapter.settings import Settings
from openai_adapter.video_files import MEDIA_TYPES
from openai_adapter.video_request import Plan, VideoRequest
from openai_adapter.video_worker import KIND, VideoWorker

POLL_AFTER_MS = 500  # what clients that poll are asked to wait
_VARIANTS = {name.partition(".")[0]: name for name in MEDIA_TYPES}
_SCHEMA = VideoRequest.model_json_schema()
_CREATE = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _SCHEMA},
            "multipart/form-data": {"schema": _SCHEMA},
        },
    }
}
_REMIX = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["prompt"],
                    "properties": {"prompt": {"type": "string"}},
                }
            }
        },
    }
}


class Videos:
    """What the routes do."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        jobs: AsyncJobs,
        files: JobFiles,
        inputs: ImageInputs,
        worker: VideoWorker,
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._files = files
        self._worker = worker
        self._max_unfinished = settings.max_unfinished_videos
        self._max_field_bytes = settings.max_field_bytes
        self._inputs = inputs

    async def create(self, request: Request) -> Job:
        """A job from the request's body, or the one that it made before with the same key."""
        _read_query(request)
        fields = await read_fields(request, self._max_field_bytes)
        given = unwrap(fields)
        if is_form(request):
            given = from_form(VideoRequest, given)
        asked = video_request.parse(given)
        sent = await self._inputs.digest(given) if idempotency.is_keyed(request) else None
        key = idempotency.read_idempotency(request, sent)
        if key and (known := await idempotency.find_job(self._jobs, KIND, caller_of(request), key)):
            return known
        model, limits = self._registry.require_ready(asked.model, *video_request.tasks_for(asked))
        plan = video_request.plan(asked, limits)
        content = {
            "settings": plan.settings.model_dump(),
            "seconds": plan.seconds,
            "remixed_from_video_id": None,
        }
        image = await self._read_image(asked.input_reference, plan)
        return await self._submit(request, model, content, image, key)

    async def remix(self, request: Request, video_id: str) -> Job:
        """A job for the same video with another prompt: same settings, same seed, same image."""
        _read_query(request)
        given = unwrap(await read_json_object(request))
        prompt = video_request.parse_remix(given)
        key = idempotency.read_idempotency(request, given)
        if key and (known := await idempotency.find_job(self._jobs, KIND, caller_of(request), key)):
            return known
        source = await self._find(request, video_id)
        _require_completed(source)
        model, limits = self._registry.require_ready(source.model, *video_request.TASKS)
        settings = video_request.plan_remix(prompt, source.request["settings"], limits)
        content = {**source.request, "settings": settings.model_dump(), "remixed_from_video_id": source.id}
        image = await self._jobs.image_of(KIND, caller_of(request), video_id)
        if image is None and limits.takes_image:  # it was deleted meanwhile
            raise _no_such_video(video_id)
        return await self._submit(request, model, content, image, key)

    async def retrieve(self, request: Request, video_id: str) -> Job:
        """The job of that id, as it is."""
        _read_query(request)
        return await self._find(request, video_id)

    async def _find(self, request: Request, video_id: str) -> Job:
        """The job of that id.

        Raises:
            ApiError: 404, the caller has none.
        """
        job = await self._jobs.get(KIND, caller_of(request), video_id)
        if job is None:
            raise _no_such_video(video_id)
        return job

    async def delete(self, request: Request, video_id: str) -> dict[str, Any]:
        """Purge the job and its files; its work is cancelled."""
        _read_query(request)
        deletion = await self._jobs.delete(KIND, caller_of(request), video_id)
        if deletion is None:
            raise _no_such_video(video_id)
        if deletion.was_running:
            self._worker.cancel(video_id)
        await asyncio.to_thread(self._files.remove, deletion.files)
        return video_answers.build_deletion(video_id)

    async def list_page(self, request: Request) -> dict[str, Any]:
        """The page that the query asks for."""
        query = _read_query(request, "after", "limit", "order")
        limit = parse_limit(query["limit"]) if "limit" in query else DEFAULT_LIMIT
        page = await self._jobs.list_page(
            KIND,
            caller_of(request),
            after=query.get("after"),
            limit=limit,
            order=query.get("order", DEFAULT_ORDER),
        )
        return video_answers.build_page(page)

    async def serve(self, request: Request, video_id: str) -> Response:
        """One of the files of a video."""
        variant = _read_query(request, "variant").get("variant", "video")
        if variant not in _VARIANTS:
            allowed = ", ".join(f"'{name}'" for name in _VARIANTS)
            raise invalid("variant", f"'variant' is {show(variant)}; allowed: {allowed}")
        job = await self._find(request, video_id)
        _require_completed(job)
        entry = job.files[variant]
        part = _VARIANTS[variant]
        return await serve_bytes(
            request,
            lambda start, end: self._files.read(entry["name"], start, end),
            size=entry["bytes"],
            media_type=MEDIA_TYPES[part],
            etag=f'"{entry["name"]}"',
            filename=f"{video_id}.{part}",
            headers={"Cache-Control": "private"},
        )

    async def _read_image(self, reference: object, plan: Plan) -> bytes | None:
        """The picture that a video begins with, of the video's size: all that is kept of it."""
        if reference is None:
            return None
        size = (plan.settings.width, plan.settings.height)
        return await self._inputs.to_png(reference, "input_reference", size)

    async def _submit(
        self,
        request: Request,
        model: str,
        content: Mapping[str, Any],
        image: bytes | None,
        key: Idempotency | None,
    ) -> Job:
        new = NewJob(
            KIND, caller_of(request), model, content, image, key, max_unfinished=self._max_unfinished
        )
        created = await idempotency.create_job(self._jobs, new)
        if created.is_new:
            self._worker.wake()
        return created.job


def routes(videos: Videos) -> APIRouter:
    """The routes of videos."""
    router = APIRouter(prefix="/v1/videos", tags=["videos"])

    @router.post("", openapi_extra=_CREATE)
    async def create(request: Request) -> Response:
        """Have a video made, of a prompt and perhaps an image."""
        return _answer(await videos.create(request))

    @router.get("")
    async def list_videos(request: Request) -> Response:
        """The videos of this caller, page by page."""
        return JSONResponse(await videos.list_page(request))

    # Before the routes of a video of that id.
    @router.api_route("/edits", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/extensions", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/characters", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/characters/{_:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def refuse(request: Request) -> Response:
        """What OpenAI's API has beside, and no model here can do."""
        raise ApiError(
            501,
            f"{show(request.url.path)} is not supported: no model here edits or extends videos, or keeps characters",
            code="not_supported",
            headers=DO_NOT_RETRY,
        )

    @router.get("/{video_id}")
    async def retrieve(request: Request, video_id: str) -> Response:
        """How far a video is."""
        return _answer(await videos.retrieve(request, video_id))

    @router.delete("/{video_id}")
    async def delete(request: Request, video_id: str) -> Response:
        """Remove a video, finished or not."""
        return JSONResponse(await videos.delete(request, video_id))

    @router.head("/{video_id}/content", include_in_schema=False)
    @router.get("/{video_id}/content")
    async def fetch(request: Request, video_id: str) -> Response:
        """The video, its thumbnail, or its spritesheet."""
        return await videos.serve(request, video_id)

    @router.post("/{video_id}/remix", openapi_extra=_REMIX)
    async def remix(request: Request, video_id: str) -> Response:
        """Have a finished video made anew, with another prompt."""
        return _answer(await videos.remix(request, video_id))

    return router


def _answer(job: Job) -> Response:
    headers = {} if job.completed_at else {"openai-poll-after-ms": str(POLL_AFTER_MS)}
    return JSONResponse(video_answers.build_video(job), headers=headers)


def _require_completed(job: Job) -> None:
    if job.status is JobStatus.FAILED:
        raise ApiError(400, f"the video {job.id} failed: {job.error_message}", code="video_failed")
    if job.status is not JobStatus.COMPLETED:
        raise ApiError(
            400,
            f"the video {job.id} is {job.status.value}; allowed: one that is completed",
            code="video_not_ready",
        )


def _no_such_video(video_id: str) -> ApiError:
    return ApiError(
        404, f"there is no video {show(video_id)}, or it was removed", param="video_id", code="not_found"
    )


def _read_query(request: Request, *allowed: str) -> Mapping[str, str]:
    """The query's parameters, each at most once."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            names = ", ".join(allowed) or "none in the query"
            raise invalid(
                name, f"{show(name)} is not a known parameter; allowed: {names}", "unknown_parameter"
            )
        if name in query:
            raise invalid(name, f"'{name}' comes twice; allowed: once", "duplicate_field")
        query[name] = value
    return query
