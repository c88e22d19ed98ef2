"""What the server counts, for Prometheus to fetch."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Meters:
    """A registry of its own: two servers in one process do not count for each other."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        seconds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        own = self.registry
        self.requests = Counter("vitral_requests", "Requests answered", ["route", "status"], registry=own)
        said = "From the headers to the answer's last byte"
        self.seconds = Histogram("vitral_request_seconds", said, ["route"], buckets=seconds, registry=own)
        self.images = Counter("vitral_images", "Images answered", ["model"], registry=own)
        self.sizes = Histogram("vitral_batch_images", "Images in a batch", ["model"], buckets=sizes, registry=own)
        said = "What a batch takes in the model"
        self.model_seconds = Histogram("vitral_model_seconds", said, ["model"], buckets=seconds, registry=own)
        said = "Images that hold a place in the queue"
        self.waiting = Gauge("vitral_waiting_images", said, ["model"], registry=own)
        self.under_way = Gauge("vitral_requests_under_way", "Requests that are not answered yet", registry=own)
        self.held = Gauge("vitral_held_bytes", "Bodies that are in memory", registry=own)
        said = "Connections cut off: headers that never came, answers that nobody fetched"
        self.dropped = Counter("vitral_dropped_connections", said, ["why"], registry=own)
        self.ready = Gauge("vitral_ready", "1 between warm-up and draining", registry=own)

    def batch(self, model: str, size: int, seconds: float) -> None:
        self.sizes.labels(model).observe(size)
        self.model_seconds.labels(model).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
