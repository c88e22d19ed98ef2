"""Limits of the server, and the errors that a client receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

MIB = 2**20
YIELD_AFTER_S = 2.0  # requests incomplete for longer are dropped when others need their memory or connection

ErrorCode = Literal[
    "invalid_body",  # 400: empty, malformed or without an image
    "invalid_headers",  # 400: a Host that is not allowed, or both Content-Length and Transfer-Encoding
    "connection_closed",  # 400: the client stopped sending before the end of the body
    "unauthorized",  # 401: the API key is missing or wrong
    "not_found",  # 404: no such path or model
    "method_not_allowed",  # 405
    "body_timeout",  # 408: the body arrived too slowly
    "body_too_large",  # 413
    "too_many_images",  # 413: more images than one request may have
    "unsupported_media_type",  # 415: a Content-Type that is not supported
    "invalid_parameter",  # 422: a query parameter has a wrong value
    "unreadable_image",  # 422, or for one image of several: not an image, or a damaged one
    "image_too_large",  # 422, or for one image of several: more pixels than allowed
    "too_many_requests",  # 429: retry after Retry-After seconds
    "internal_error",  # 500: the log has the traceback
    "not_ready",  # 503: warming up
    "timeout",  # 503: no result within the time limit
    "too_many_connections",  # 503
]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one server process. A request that exceeds one of them receives an error response."""

    max_body_mib: int = 32  # size of one request body in MiB
    max_total_body_mib: int = 256  # size of all request bodies in memory together, in MiB
    max_megapixels: int = 50  # size of one image, checked in its header before decoding
    max_images: int = 64  # images per request
    max_queue: int = 256  # images queued per model; further requests receive status 429
    max_explain_queue: int = 16  # explain requests queued per model; further requests receive status 429
    max_requests: int = 256  # requests per model and kind whose body is complete; further requests receive status 429
    queue_timeout_s: float = 1.0  # longest time in the queue; requests that would wait longer receive status 429
    explain_queue_timeout_s: float = 10.0  # the same for explain requests
    max_connections: int = 1024  # open connections; further connections receive status 503
    max_batch: int = 32  # images per forward pass
    batch_wait_ms: float = 5.0  # longest time an image waits for others that are being decoded
    request_timeout_s: float = 30.0  # from the last byte of the body to the response
    header_timeout_s: float = 10.0  # for receiving the request headers
    body_timeout_s: float = 60.0  # for receiving the request body
    min_body_kib_s: float = 1.0  # slowest average rate at which a request body may arrive, in KiB per second
    stall_timeout_s: float = 10.0  # without progress while a body is received or a response is sent
    keep_alive_s: float = 75.0  # idle time of a connection (longer than nginx's, so that nginx closes first)
    drain_s: float = 2.0  # after SIGTERM, /readyz fails but requests are still accepted for this time

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # `not value > 0` also refuses nan
            if name in ("batch_wait_ms", "drain_s"):
                if not value >= 0:
                    raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {value}")
            elif not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
        if self.max_body_mib > self.max_total_body_mib:
            raise ValueError(
                f"--max-body-mib ({self.max_body_mib}) must not exceed --max-total-body-mib ({self.max_total_body_mib})"
            )


class RequestError(Exception):
    """An error response: HTTP status, machine-readable code, message for people, and what to do about it."""

    def __init__(
        self,
        status: int,
        code: ErrorCode,
        message: str,
        hint: str | None = None,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def to_dict(self) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message}
        return {"error": error | ({"hint": self.hint} if self.hint else {})}


def too_many_requests(message: str, retry_after: int = 1) -> RequestError:
    return RequestError(429, "too_many_requests", f"{message}; retry in {retry_after} s", retry_after=retry_after)


class Budget:
    """A bounded quantity that requests acquire and release, such as bytes in memory or requests in flight."""

    def __init__(self, capacity: int, exhausted_message: str) -> None:
        self.capacity, self.exhausted_message, self.used = capacity, exhausted_message, 0

    def acquire(self, amount: int) -> None:
        if self.used + amount > self.capacity:
            raise too_many_requests(self.exhausted_message)
        self.used += amount

    def release(self, amount: int) -> None:
        self.used -= amount

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        self.acquire(amount)
        try:
            yield
        finally:
            self.release(amount)
