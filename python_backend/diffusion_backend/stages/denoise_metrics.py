"""The step engine's events as metrics of Triton's own /metrics."""

from __future__ import annotations

from typing import Any

from diffusion_backend.engine_events import EngineEvents

_SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


class DenoiseMetrics(EngineEvents):
    """One instance of a denoise stage. Made in ``initialize``: only there are metrics to be had."""

    def __init__(self, model: str, instance: str) -> None:
        self._labels = {"model": model, "instance": instance}
        # A metric is broken once its family is collected, so each is kept.
        self._families: list[Any] = []
        self._running = self._gauge(
            "running_rows", "requests in the step engine: those running, and those waiting"
        )
        self._waiting = self._gauge("waiting_rows", "those of them that have had no step yet")
        self._batch_rows = self._histogram(
            "batch_size", "rows in one forward (guidance may take two a request)", _ROWS
        )
        self._step_seconds = self._histogram(
            "step_seconds", "one forward and what the pipelines do until the next", _SECONDS
        )
        self._wait_seconds = self._histogram(
            "wait_seconds", "from a request's arrival to its first step", _SECONDS
        )
        self._cancel_seconds = self._histogram(
            "cancel_seconds", "from the cancel of a request until its place is free", _SECONDS
        )
        self._requests = self._family("requests_total", "requests by outcome", "COUNTER")
        self._outcomes: dict[str, Any] = {}

    def counted(self, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def waited(self, seconds: float) -> None:
        self._wait_seconds.observe(seconds)

    def stepped(self, rows: int, seconds: float) -> None:
        self._batch_rows.observe(rows)
        self._step_seconds.observe(seconds)

    def ended(self, outcome: str) -> None:
        if outcome not in self._outcomes:
            self._outcomes[outcome] = self._requests.Metric(labels={**self._labels, "outcome": outcome})
        self._outcomes[outcome].increment(1)

    def freed(self, seconds: float) -> None:
        self._cancel_seconds.observe(seconds)

    def _family(self, name: str, description: str, kind: str) -> Any:
        import triton_python_backend_utils as pb_utils

        family = pb_utils.MetricFamily(
            name=f"diffusion_denoise_{name}",
            description=description,
            kind=getattr(pb_utils.MetricFamily, kind),
        )
        self._families.append(family)
        return family

    def _gauge(self, name: str, description: str) -> Any:
        return self._family(name, description, "GAUGE").Metric(labels=self._labels)

    def _histogram(self, name: str, description: str, buckets: list[float]) -> Any:
        return self._family(name, description, "HISTOGRAM").Metric(labels=self._labels, buckets=buckets)
