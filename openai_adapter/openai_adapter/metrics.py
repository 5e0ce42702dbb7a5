"""Prometheus metrics, in a registry of the app's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diffusion_backend.healing_report import read_report
from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 600)


class Metrics:
    """Labels hold route templates and checked values only, so their number is bounded."""

    def __init__(self, healing_report: Path | None = None) -> None:
        self.registry = CollectorRegistry()
        if healing_report is not None:
            self.registry.register(_Restarts(healing_report))
        self.requests = Counter(
            "openai_adapter_requests",
            "Answered HTTP requests.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "openai_adapter_request_seconds",
            "Time from a request's head to the end of its response.",
            ["route", "method"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "openai_adapter_requests_in_progress", "HTTP requests being answered.", registry=self.registry
        )
        self.images = Counter(
            "openai_adapter_images",
            "Generated images.",
            ["model", "quality", "decode_path"],
            registry=self.registry,
        )
        self.videos = Counter(
            "openai_adapter_videos",
            "Generated videos.",
            ["model", "quality", "decode_path"],
            registry=self.registry,
        )
        self.jobs = Counter(
            "openai_adapter_jobs",
            "Attempts at jobs that ended here: completed, failed, retried (it will be tried again), or lost (the job "
            "was deleted or taken over, or what became of it could not be written).",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.previews = Counter(
            "openai_adapter_previews", "Previews sent in streams.", ["model"], registry=self.registry
        )
        self.upstream_errors = Counter(
            "openai_adapter_upstream_errors",
            "Failed calls of Triton, by its status.",
            ["status"],
            registry=self.registry,
        )
        self.interruptions = Counter(
            "openai_adapter_interruptions",
            "Generations whose work was lost in the model server, by how they ended.",
            ["outcome"],
            registry=self.registry,
        )
        self.media_bytes = Counter(
            "openai_adapter_media_bytes", "Bytes written to the media store.", registry=self.registry
        )
        self.media_expired = Counter(
            "openai_adapter_media_expired", "Files that the sweep deleted.", registry=self.registry
        )
        self.jobs_removed = Counter(
            "openai_adapter_jobs_removed",
            "Finished jobs that retention removed, by what they were beyond: age or bytes.",
            ["reason"],
            registry=self.registry,
        )
        self.job_orphans = Counter(
            "openai_adapter_job_orphans",
            "Files that were removed because no job has them.",
            registry=self.registry,
        )


class _Restarts(Collector):
    """What the launcher has started again, from its own file."""

    def __init__(self, report: Path) -> None:
        self._report = report

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "triton_diffusion_restarts",
            "Parts of the server that died and were started (models: loaded) again.",
            labels=["part", "reason"],
        )
        for labels, count in read_report(self._report).restarts.items():
            family.add_metric(labels, count)
        yield family


def routes(metrics: Metrics) -> APIRouter:
    """The route that Prometheus scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics")
    async def scrape() -> Response:
        """All metrics in Prometheus's text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
