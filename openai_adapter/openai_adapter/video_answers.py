"""What a client is told of its videos: OpenAI's objects, and facts of ours beside them."""

from __future__ import annotations

from typing import Any

from openai_adapter.job_pages import Page
from openai_adapter.job_table import Job, JobStatus

# Of the settings, beside OpenAI's own fields.
_SHOWN = ("quality", "num_frames", "fps", "num_inference_steps", "guidance_scale", "negative_prompt", "seed")


def build_video(job: Job) -> dict[str, Any]:
    """OpenAI's video object; from ``quality`` on, the fields are ours. Times are whole seconds since 1970."""
    settings = job.request["settings"]
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status.value,
        "progress": job.progress,
        "created_at": int(job.created_at),
        "completed_at": _seconds(job.completed_at),
        "expires_at": _seconds(job.expires_at),
        "prompt": settings["prompt"],
        "size": f"{settings['width']}x{settings['height']}",
        "seconds": job.request["seconds"],
        "remixed_from_video_id": job.request["remixed_from_video_id"],
        "error": _build_error(job),
        **{name: settings[name] for name in _SHOWN},
        "loras": dict(settings.get("loras", ())),
        **(job.result or {"decode_path": None, "timings": None}),
    }


def build_page(page: Page) -> dict[str, Any]:
    """OpenAI's list object: its clients stop without a word where one of these is missing."""
    return {
        "object": "list",
        "data": [build_video(job) for job in page.data],
        "first_id": page.first_id,
        "last_id": page.last_id,
        "has_more": page.has_more,
    }


def build_deletion(job_id: str) -> dict[str, Any]:
    """What is left to say of a video that was deleted."""
    return {"id": job_id, "object": "video.deleted", "deleted": True}


def _build_error(job: Job) -> dict[str, Any] | None:
    if job.status is not JobStatus.FAILED:
        return None
    return {"code": job.error_code, "message": job.error_message}


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
