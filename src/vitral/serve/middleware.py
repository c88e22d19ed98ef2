"""ASGI middleware around every request: allowed hosts, API keys, HEAD, security headers, log and metrics."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.errors import VitralError
from vitral.serve.admission import Admission
from vitral.serve.body import BodyReceiver
from vitral.serve.hosts import AllowedHosts
from vitral.serve.limits import MIB, Budget, Limits, RequestError
from vitral.serve.metrics import ServerMetrics
from vitral.utils.json_toml import dump_json

PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/favicon.ico")  # and /page/...: no key needed
# Polled by machines, or many at once; counted but not logged.
UNLOGGED_ROUTES = ("/healthz", "/readyz", "/metrics", "/page/{file}", "/explorer/{file:path}")
log = logging.getLogger("vitral.serve")

# The page loads only its own files: no inline or third-party scripts and styles, and no framing.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}


@dataclass
class ServerState:
    """State shared by the routes, the middleware and the process."""

    limits: Limits
    key_digests: tuple[bytes, ...] = ()  # SHA-256 of each API key; empty: no key needed
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    ready: bool = False
    draining: bool = False
    offers_explorer: bool = False  # /explorer/, which publishes the weights
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def __post_init__(self) -> None:
        self.body_bytes = Budget(self.limits.max_total_body_mib * MIB, "the server's memory for request bodies is full")
        self.bodies = BodyReceiver(self.limits, self.body_bytes)
        self.queues: dict[str, Admission] = {}  # by request path


def hash_keys(keys: Sequence[str] | None) -> tuple[bytes, ...]:
    """SHA-256 of each key. None: the server needs no key; an empty list is more likely a mistake than a wish."""
    if keys is None:
        return ()
    if not keys:
        raise VitralError("the list of API keys is empty", "Pass at least one key, or None to serve without keys")
    for number, key in enumerate(keys, start=1):
        if not key or key != key.strip() or not key.isprintable():
            hint = "Use printable characters without spaces at the ends; openssl rand -hex 24 generates a key"
            raise VitralError(f"API key {number} cannot be sent in a header", hint)
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


class RequestMiddleware:
    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        is_head = scope["method"] == "HEAD"
        scope = dict(scope)  # the protocol's own copy keeps the method, and with it drops the body of the response
        started, status = time.perf_counter(), 0
        request_id = secrets.token_hex(8)
        scope["log_fields"], scope["request_id"] = {}, request_id  # routes add their own fields to the log record

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(message, request_id)
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._handle(scope, receive, send_with_headers)
        except Exception:  # the exception handler of the app has already sent status 500
            log.exception("request failed", extra={"fields": {"id": request_id}})
        finally:
            self._record(scope, "HEAD" if is_head else scope["method"], status, time.perf_counter() - started)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_headers(headers)
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
            path = scope["path"]
            if path in PUBLIC_PATHS or path.startswith("/page/"):
                return await self.app(scope, receive, send)
            self._check_key(headers)
            if scope["method"] == "POST" and path in self.state.queues:
                # A refusal here costs less than half of one in a route, and under overload most requests are refused.
                self.state.queues[path].check()
            return await self.app(scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)

    def _check_headers(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self.state.hosts.allows(host):
            hint = "Use the server's own address, or start it with --allowed-hosts NAME"
            raise RequestError(400, "invalid_headers", f"host {host[:64]!r} is not allowed", hint)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have ended the body elsewhere, so whatever follows it is not trusted as a request.
            message = "the request has both Content-Length and Transfer-Encoding"
            raise RequestError(400, "invalid_headers", message, "Send one of them", headers={"Connection": "close"})

    def _check_key(self, headers: Headers) -> None:
        """Compare with every key in constant time, so that the response time reveals nothing about the keys.

        Header values are bytes. Clients encode keys that are not ASCII in UTF-8 or in Latin-1.
        """
        if not self.state.key_digests:
            return
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        text = (credentials if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip(" \t")
        digests = [hashlib.sha256(text.encode(encoding)).digest() for encoding in ("latin-1", "utf-8")]
        matches = [hmac.compare_digest(digest, key) for digest in digests for key in self.state.key_digests]
        if not any(matches):
            hint = "Send the header: Authorization: Bearer KEY"
            raise RequestError(401, "unauthorized", "this server requires an API key", hint)

    def _add_headers(self, message: Message, request_id: str) -> None:
        headers = MutableHeaders(scope=message)
        for name, value in SECURITY_HEADERS.items():
            headers.setdefault(name, value)
        headers.setdefault("Cache-Control", "no-store")
        headers["X-Request-Id"] = request_id
        if self.state.draining or message["status"] in (408, 413):
            headers["Connection"] = "close"

    def _record(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or self._route_of_queue(scope["path"])
        self.state.metrics.requests.labels(route, status).inc()
        self.state.metrics.request_seconds.labels(route).observe(seconds)
        if route not in UNLOGGED_ROUTES:
            fields = {"id": scope["request_id"], "method": method, "route": route, "status": status}
            log.info("request", extra={"fields": fields | {"ms": round(seconds * 1000, 1)} | scope["log_fields"]})

    def _route_of_queue(self, path: str) -> str:
        return f"/v1/models/{{name}}/{path.rpartition('/')[2]}" if path in self.state.queues else "other"


def error_response(error: RequestError) -> Response:
    content = dump_json(error.to_dict(), ensure_ascii=False)
    return Response(content, status_code=error.status, headers=error.headers, media_type="application/json")
