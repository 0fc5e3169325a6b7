"""What a monitoring system reads: counts, times and sizes, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The service's own registry; names begin with ``inference_``."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model: str, version: str, runtime: str) -> None:
        """Args: the model's name and version, and the runtime's name and version in one text."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        Info("inference_model", "What is served", registry=self._registry).info(
            {"name": model, "version": version, "runtime": runtime}
        )
        self.requests = Counter(
            "inference_requests", "Requests by protocol and status", ["protocol", "status"], registry=self._registry
        )
        self.in_flight = Gauge("inference_in_flight", "Requests being read or answered", registry=self._registry)
        self._seconds = Histogram(
            "inference_run_seconds", "Seconds of the runtime, by run", buckets=SECONDS, registry=self._registry
        )
        self._waited = Histogram(
            "inference_queue_seconds", "Seconds the oldest request of a run waited", buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._rows = Histogram("inference_run_rows", "Rows by run", buckets=ROWS, registry=self._registry)

    def observe_run(self, rows: int, waited: float, seconds: float) -> None:
        """Count one run of the runtime: its rows, and seconds waited and taken."""
        self._rows.observe(rows)
        self._waited.observe(waited)
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All of it."""
        made: bytes = generate_latest(self._registry)
        return made
