"""Prometheus metrics of the server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """All metrics in a registry of their own, so that two servers in one process do not share counters."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "vitral_requests_total", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "vitral_request_duration_seconds",
            "Time from the request headers to the last byte of the response.",
            ["route"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.images = Counter("vitral_images_total", "Images classified.", ["model"], registry=registry)
        self.batch_size = Histogram(
            "vitral_batch_size", "Images per forward pass.", ["model"], buckets=BATCH_BUCKETS, registry=registry
        )
        self.inference_seconds = Histogram(
            "vitral_inference_duration_seconds",
            "Time of one forward pass.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queued_images = Gauge(
            "vitral_queued_images", "Images being decoded, queued or classified.", ["model"], registry=registry
        )
        self.queued_explanations = Gauge(
            "vitral_queued_explanations", "Explain requests queued or in progress.", ["model"], registry=registry
        )
        self.in_flight = Gauge(
            "vitral_requests_in_flight", "Predict and explain requests whose body is complete.", registry=registry
        )
        self.body_bytes = Gauge("vitral_request_body_bytes", "Request bodies in memory.", registry=registry)
        self.dropped_connections = Counter(
            "vitral_dropped_connections_total",
            "Connections closed early: incomplete headers, an unread response, or too many connections.",
            ["reason"],
            registry=registry,
        )
        self.ready = Gauge("vitral_ready", "1 when the server is warmed up and not draining.", registry=registry)

    def observe_batch(self, model: str, size: int, seconds: float) -> None:
        self.batch_size.labels(model).observe(size)
        self.inference_seconds.labels(model).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)
