"""Receive request bodies into bounded memory, before their requests take a slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from vitral.serve.limits import MIB, YIELD_AFTER_S, Budget, Limits, RequestError

DISCARD_FACTOR = 4  # an oversized body is read up to this multiple of the limit before the connection is closed


@dataclass(eq=False)
class IncomingBody:
    content: bytearray = field(default_factory=bytearray)
    size: int = 0  # bytes counted against the memory
    started: float = 0.0  # loop.time()
    timeout: asyncio.Timeout | None = None  # while the body is incomplete


class BodyReceiver:
    """Receives bodies whose total size is bounded by `memory`, and ends those that arrive too slowly.

    A body must arrive at `min_body_kib_s` on average, with `stall_timeout_s` of slack, and within `body_timeout_s`.
    When the memory is full, the oldest body that has been incomplete for more than YIELD_AFTER_S seconds is dropped,
    so that slow clients do not keep others out.
    """

    def __init__(self, limits: Limits, memory: Budget) -> None:
        self.limits, self.memory = limits, memory
        self.incomplete: dict[IncomingBody, None] = {}  # oldest first

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytearray]:
        """The complete body. Its size counts against the memory until the context exits."""
        content_length = request.headers.get("content-length", "")
        if content_length.isdecimal() and int(content_length) > self.limits.max_body_mib * MIB:
            raise await self._too_large(request)
        body = IncomingBody()
        self.incomplete[body] = None
        try:
            await self._collect(request, body)
            self.incomplete.pop(body)
            yield body.content
        finally:
            self.incomplete.pop(body, None)
            self.memory.release(body.size)

    async def _collect(self, request: Request, body: IncomingBody) -> None:
        limits, loop = self.limits, asyncio.get_running_loop()
        started = body.started = loop.time()
        deadline = started + min(limits.stall_timeout_s, limits.body_timeout_s)
        try:
            async with asyncio.timeout_at(deadline) as body.timeout:
                async for chunk in request.stream():
                    if body.size + len(chunk) > limits.max_body_mib * MIB:
                        break
                    self._make_room(len(chunk), body)
                    if body not in self.incomplete:  # dropped while this chunk was on its way
                        raise TimeoutError
                    self.memory.acquire(len(chunk))
                    body.size += len(chunk)
                    body.content += chunk
                    deadline += len(chunk) / (1024 * limits.min_body_kib_s)
                    deadline = min(deadline, loop.time() + limits.stall_timeout_s, started + limits.body_timeout_s)
                    body.timeout.reschedule(deadline)
                else:
                    return
        except TimeoutError as error:
            hint = f"Send at least {limits.min_body_kib_s:g} KiB/s"
            raise RequestError(408, "body_timeout", "the body arrived too slowly", hint) from error
        except ClientDisconnect as error:
            raise RequestError(400, "connection_closed", "the connection closed before the end of the body") from error
        raise await self._too_large(request)

    def _make_room(self, size: int, newcomer: IncomingBody) -> None:
        """Drop the oldest incomplete bodies until `size` bytes are free or no other body has taken too long."""
        now = asyncio.get_running_loop().time()
        for body in list(self.incomplete):
            if self.memory.used + size <= self.memory.capacity or now - body.started < YIELD_AFTER_S:
                return
            if body is newcomer:
                continue
            del self.incomplete[body]
            self.memory.release(body.size)
            body.size = 0
            body.content.clear()
            if body.timeout is not None and not body.timeout.expired():
                body.timeout.reschedule(now)

    async def _too_large(self, request: Request) -> RequestError:
        """Read on without storing anything: a client that is cut off while it sends does not see the response."""
        discarded = 0
        with suppress(TimeoutError, ClientDisconnect, RuntimeError):
            async with asyncio.timeout(self.limits.stall_timeout_s):
                async for chunk in request.stream():
                    discarded += len(chunk)
                    if discarded > DISCARD_FACTOR * self.limits.max_body_mib * MIB:
                        break
        message = f"the body exceeds {self.limits.max_body_mib} MiB"
        return RequestError(413, "body_too_large", message, "Send fewer or smaller images")
