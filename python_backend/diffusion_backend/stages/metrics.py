"""What the stages tell of themselves in Triton's own /metrics."""

from __future__ import annotations

from typing import Any

from diffusion_backend.engine_events import EngineEvents

_SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


class DenoiseMetrics(EngineEvents):
    """The step engine of one denoise instance."""

    def __init__(self, model: str, instance: str) -> None:
        labels = {"model": model, "instance": instance}

        def series(name: str, description: str, kind: str, **options: Any) -> _Series:
            return _Series(labels, f"denoise_{name}", description, kind, **options)

        self._running = series("running_rows", "requests in the step engine, waiting or running", "GAUGE")
        self._waiting = series("waiting_rows", "those of them that have had no step yet", "GAUGE")
        self._requests = series("requests_total", "requests by outcome", "COUNTER")
        self._batch_rows = series(
            "batch_size", "rows in one forward (guidance may take two a request)", "HISTOGRAM", buckets=_ROWS
        )
        self._step_seconds = series(
            "step_seconds",
            "one forward and what the pipelines do until the next",
            "HISTOGRAM",
            buckets=_SECONDS,
        )
        self._wait_seconds = series(
            "wait_seconds", "from a request's arrival to its first step", "HISTOGRAM", buckets=_SECONDS
        )
        self._cancel_seconds = series(
            "cancel_seconds",
            "from the cancel of a request until its place is free",
            "HISTOGRAM",
            buckets=_SECONDS,
        )
        self.counted(0, 0)

    def counted(self, running: int, waiting: int) -> None:
        self._running.of().set(running)
        self._waiting.of().set(waiting)

    def waited(self, seconds: float) -> None:
        self._wait_seconds.of().observe(seconds)

    def stepped(self, rows: int, seconds: float) -> None:
        self._batch_rows.of().observe(rows)
        self._step_seconds.of().observe(seconds)

    def ended(self, outcome: str) -> None:
        self._requests.of(outcome=outcome).increment(1)

    def freed(self, seconds: float) -> None:
        self._cancel_seconds.of().observe(seconds)


class CacheMetrics:
    """The cache of one encode instance."""

    def __init__(self, model: str, instance: str) -> None:
        labels = {"model": model, "instance": instance}
        self._lookups = _Series(
            labels, "encode_cache_lookups_total", "text encoder calls by result", "COUNTER"
        )
        self._bytes = _Series(labels, "encode_cache_bytes", "bytes of cached encoder results", "GAUGE")

    def looked_up(self, result: str) -> None:
        """``result``: hit or miss."""
        self._lookups.of(result=result).increment(1)

    def filled(self, size: int) -> None:
        """The results that are kept have so many bytes."""
        self._bytes.of().set(size)


class DecodeMetrics:
    """The decoding of one vae_decode instance, by the path that ran: lossless or fast."""

    def __init__(self, model: str, instance: str) -> None:
        labels = {"model": model, "instance": instance}
        self._seconds = _Series(
            labels, "vae_decode_seconds", "one decode, of a batch where fast", "HISTOGRAM", buckets=_SECONDS
        )
        self._pictures = _Series(labels, "vae_decode_pictures_total", "decoded pictures and clips", "COUNTER")
        self._repeats = _Series(
            labels,
            "vae_decode_repeats_total",
            "fast decodes that failed and were repeated losslessly",
            "COUNTER",
        )
        self._repeats.of().increment(0)

    def decoded(self, path: str, pictures: int, seconds: float) -> None:
        self._seconds.of(decode_path=path).observe(seconds)
        self._pictures.of(decode_path=path).increment(pictures)

    def repeated(self) -> None:
        self._repeats.of().increment(1)


class _Series:
    """A metric family and its metrics, kept: a metric is broken once its family is collected."""

    def __init__(
        self, labels: dict[str, str], name: str, description: str, kind: str, **options: Any
    ) -> None:
        import triton_python_backend_utils as pb_utils

        self._labels = labels
        self._options = options
        self._family = pb_utils.MetricFamily(
            name=f"diffusion_{name}", description=description, kind=getattr(pb_utils.MetricFamily, kind)
        )
        self._metrics: dict[tuple[str, ...], Any] = {}

    def of(self, **labels: str) -> Any:
        """The metric with these labels besides the instance's own."""
        key = tuple(labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels={**self._labels, **labels}, **self._options)
        return self._metrics[key]
