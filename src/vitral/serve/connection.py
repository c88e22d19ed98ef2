"""HTTP/1.1 connections with the timeouts that uvicorn does not have."""

from __future__ import annotations

import asyncio
import math
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.serve.limits import YIELD_AFTER_S, Limits
from vitral.serve.metrics import ServerMetrics

_BODY = b'{"error": {"code": "too_many_connections", "message": "too many connections; retry in a moment"}}'
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def incomplete_since(connection: Any) -> float:
    """When the connection started to wait for a complete request; infinity while a complete request is in progress."""
    cycle = connection.cycle
    in_progress = cycle is not None and not cycle.more_body and not cycle.response_complete
    return math.inf if in_progress or connection.transport.is_closing() else float(connection.waiting_since)


def make_protocol(limits: Limits, metrics: ServerMetrics) -> type[H11Protocol]:
    """A protocol class with these limits, which uvicorn instantiates for each connection."""
    return type("TimeoutProtocol", (TimeoutProtocol,), {"limits": limits, "metrics": metrics})


class TimeoutProtocol(H11Protocol):
    """Closes connections whose headers never complete or whose response is never read.

    When there are too many connections, the one that has waited the longest for a complete request is closed.
    """

    limits: ClassVar[Limits]
    metrics: ClassVar[ServerMetrics]

    header_timer: asyncio.TimerHandle | None = None  # running while request headers are incomplete
    write_timer: asyncio.TimerHandle | None = None  # running while the client does not read the response
    close_timer: asyncio.TimerHandle | None = None  # running while a closing connection has unread data

    waiting_since = 0.0  # loop.time() of the end of the last response, or of the first byte of this request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.waiting_since = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            oldest: Any = min(self.connections, key=incomplete_since)
            if now - incomplete_since(oldest) < YIELD_AFTER_S:
                transport.write(TOO_MANY_CONNECTIONS)
                return transport.close()
            oldest.give_way()
        self._start_header_timer()

    def give_way(self) -> None:
        self.metrics.dropped_connections.labels("too_many_connections").inc()
        if self.cycle is not None and not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(TOO_MANY_CONNECTIONS)
        self.transport.close()
        self._start_close_timer()

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete and self.header_timer is None:
            self.waiting_since = self.loop.time()
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_header_timer()
        else:
            self._stop_header_timer()

    def _start_header_timer(self) -> None:
        if self.header_timer is None:
            self.header_timer = self.loop.call_later(self.limits.header_timeout_s, self._drop, "headers")

    def _stop_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(self.limits.stall_timeout_s, self._drop, "unread_response")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        self._start_close_timer()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._start_close_timer()

    def _start_close_timer(self) -> None:
        """Bound the time that a closing connection waits for the client to read the last response."""
        if self.transport.is_closing() and self.close_timer is None:
            self.close_timer = self.loop.call_later(self.limits.stall_timeout_s, self._drop, "unread_response")

    def _drop(self, reason: str) -> None:
        self.metrics.dropped_connections.labels(reason).inc()
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._drop("unread_response")
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        for timer in (self.write_timer, self.close_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
