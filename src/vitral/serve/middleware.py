"""Around every request: who may ask, how many at once, what is logged and counted, which headers go back."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.serve.limits import Limits, Refused, Room
from vitral.serve.metrics import Meters

OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/favicon.ico")  # and /page/…: no key is asked for these
QUIET = ("/healthz", "/readyz", "/metrics", "/page/{file}")  # asked for every few seconds: counted, not logged
log = logging.getLogger("vitral.serve")

# The page is made of its own files alone: no script or style from elsewhere or inline, nobody frames it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}


@dataclass
class State:
    """Of one server: what its parts must agree on."""

    limits: Limits
    keys: tuple[bytes, ...] = ()  # SHA-256 of each
    ready: bool = False
    draining: bool = False
    meters: Meters = field(default_factory=Meters)

    def __post_init__(self) -> None:
        self.held = Room(self.limits.held_mib * 2**20, "the server holds as many bytes as it may")
        self.under_way = Room(self.limits.requests, "the server answers as many requests as it can")


def digests(keys: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


class Guard:
    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, sent = time.perf_counter(), {"status": 0}
        request_id = secrets.token_hex(8)
        scope["seen"], scope["request_id"] = {}, request_id  # seen: what the log says of the request

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                headers["X-Request-Id"] = request_id
                if self.state.draining or message["status"] in (408, 413):
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._admit(scope, receive, send_and_note)
        except Exception:  # the app has answered it with a 500
            log.exception("a request failed", extra={"fields": {"id": request_id}})
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - started
            self.state.meters.requests.labels(route, sent["status"]).inc()
            self.state.meters.seconds.labels(route).observe(seconds)
            fields = {"id": request_id, "method": scope["method"], "route": route, "status": sent["status"]}
            if route not in QUIET:
                log.info("request", extra={"fields": fields | {"ms": round(seconds * 1000, 1)} | scope["seen"]})

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            path = scope["path"]
            if path in OPEN or path.startswith("/page/"):
                return await self.app(scope, receive, send)
            self._check_key(Headers(scope=scope))
            with self.state.under_way.holding(1):
                return await self.app(scope, receive, send)
        except Refused as said:
            await refusal(said)(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        """Every key is compared, each in constant time: how long it takes says nothing about them."""
        if not self.state.keys:
            return
        given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        if not any([hmac.compare_digest(digest, key) for key in self.state.keys]):  # noqa: C419 (no short cut)
            raise Refused(401, "this server asks for an API key", "Authorization: Bearer KEY")


def refusal(said: Refused) -> Response:
    return Response(
        json.dumps(said.plain, ensure_ascii=False),
        status_code=said.status,
        headers=said.headers | ({"WWW-Authenticate": "Bearer"} if said.status == 401 else {}),
        media_type="application/json",
    )
