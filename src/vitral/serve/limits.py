"""What a client may ask for, and how long it may take over it. Everything that could grow has a bound here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one server process. A request beyond one of them gets a sentence and a status, never a crash."""

    body_mib: int = 32  # of one request; a phone's photograph has 3 to 12
    held_mib: int = 256  # bodies of all requests together
    megapixels: int = 50  # of one image, as its header says, before anything is decoded
    images: int = 64  # a request
    queue: int = 256  # images a model may have waiting; more are answered 429
    requests: int = 256  # under way at once; more are answered 429
    connections: int = 1024
    batch: int = 32  # images the model sees at once
    wait_ms: float = 5.0  # the longest that an image waits for others that are still being decoded
    request_s: float = 30.0  # from the body's last byte to the answer
    header_s: float = 10.0  # until a request's headers are whole
    body_s: float = 60.0  # until its body is
    pause_s: float = 10.0  # between two pieces of the body, or with an answer that is not fetched
    idle_s: float = 75.0  # between two requests on one connection: longer than nginx keeps its own
    drain_s: float = 2.0  # after SIGTERM: not ready any more, but answering, while balancers look elsewhere

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value >= 0 if name in ("wait_ms", "drain_s") else value > 0):
                raise ValueError(f"{name.replace('_', '-')} must be above 0, not {value}")
        if self.body_mib > self.held_mib:
            raise ValueError(f"body-mib ({self.body_mib}) cannot be more than held-mib ({self.held_mib})")


class Refused(Exception):
    """A request that is not served: the status, a sentence, and where it helps, what to do."""

    def __init__(self, status: int, what: str, hint: str = "", retry_after: int | None = None) -> None:
        super().__init__(what)
        self.status, self.what, self.hint, self.retry_after = status, what, hint, retry_after

    @property
    def plain(self) -> dict[str, str]:
        return {"error": self.what} | ({"hint": self.hint} if self.hint else {})

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def busy(what: str) -> Refused:
    return Refused(429, f"{what}: try again in a moment", retry_after=1)


class Room:
    """A bound that is taken from and given back to: bytes held, requests under way."""

    def __init__(self, most: int, full: str) -> None:
        self.most, self.full, self.taken = most, full, 0

    def take(self, amount: int) -> None:
        if self.taken + amount > self.most:
            raise busy(self.full)
        self.taken += amount

    def give(self, amount: int) -> None:
        self.taken -= amount

    @contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)
