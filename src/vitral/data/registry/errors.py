"""Errors of a single source of files. The next source is then tried; `fetch_files` reports all failures."""

from __future__ import annotations

import http.client
import socket
import urllib.error


class FetchError(Exception):
    """A source did not deliver the expected bytes: wrong content, too much of it, or none."""


FETCH_ERRORS = (FetchError, OSError, http.client.HTTPException)  # everything a fetcher may raise


def failure_reason(error: BaseException) -> str:
    """Why a source failed, in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "host name not found"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
