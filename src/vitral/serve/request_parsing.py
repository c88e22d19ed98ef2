"""From a request's body to the images in it: multipart files, raw bytes, or base64 in JSON.

Only bytes are taken from a client: no path, no address, nothing pickled. They stay in memory and are gone with the
request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from PIL import Image
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from vitral.data.decode import FORMATS, NotAnImage, decode
from vitral.data.preprocess import Preprocessing
from vitral.serve.limits import MIB, Limits, Refused, Room

HOW = 'send image files as multipart/form-data, one image as raw bytes, or JSON with base64: {"images": ["…"]}'
MOST_DISCARDED = 4  # bodies that are too long are read so many times the limit before the connection is closed


class Upload(NamedTuple):
    name: str
    content: bytes


@asynccontextmanager
async def body_of(request: Request, limits: Limits, held: Room) -> AsyncIterator[bytearray]:
    """The whole body, counted while it streams in; given back to the room of all bodies at the end."""
    most = limits.body_mib * MIB
    body, taken = bytearray(), 0
    too_long = Refused(413, f"the body is longer than {limits.body_mib} MiB", "send fewer or smaller images")
    try:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            await _discard(request, limits)
            raise too_long
        try:
            async with asyncio.timeout(limits.body_s):
                async for piece in _pieces(request, limits.pause_s):
                    if len(body) + len(piece) > most:
                        await _discard(request, limits)
                        raise too_long
                    held.take(len(piece))
                    taken += len(piece)
                    body += piece
        except TimeoutError as error:
            raise Refused(408, "the body took too long to arrive") from error
        except ClientDisconnect as error:
            raise Refused(400, "the connection ended before the body did") from error
        yield body
    finally:
        held.give(taken)


async def _pieces(request: Request, pause_s: float) -> AsyncIterator[bytes]:
    stream = request.stream().__aiter__()
    while True:
        async with asyncio.timeout(pause_s):
            piece = await anext(stream, None)
        if piece is None:
            return
        yield piece


async def _discard(request: Request, limits: Limits) -> None:
    """Read on for a while without keeping it: who is cut off while sending does not see the answer."""
    read = 0
    try:
        async with asyncio.timeout(limits.pause_s):
            async for piece in request.stream():
                read += len(piece)
                if read > MOST_DISCARDED * limits.body_mib * MIB:
                    return
    except (TimeoutError, ClientDisconnect, RuntimeError):
        return


def uploads(content_type: str, body: bytearray, limits: Limits) -> list[Upload]:
    """The images in a body."""
    if not body:
        raise Refused(400, "the body is empty", HOW)
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        found = _multipart(body, options.get(b"boundary", b""), limits)
    elif kind == b"application/json":
        found = _json(body, limits)
    elif kind.startswith(b"image/") or kind in (b"application/octet-stream", b""):
        found = [Upload("image", bytes(body))]
    else:
        raise Refused(415, f"the type {content_type[:60]!r} is not read here", HOW)
    if not found:
        raise Refused(400, "there is no image in the body", HOW)
    return found


def _too_many(limits: Limits) -> Refused:
    return Refused(413, f"more than {limits.images} images in one request", "send them in several")


def _multipart(body: bytearray, boundary: bytes, limits: Limits) -> list[Upload]:
    """Each part with a file name is an image."""
    if not boundary:
        raise Refused(400, "multipart/form-data without a boundary", "let the HTTP library set the Content-Type")
    found: list[Upload] = []
    header, value, content = bytearray(), bytearray(), bytearray()
    headers: dict[bytes, bytes] = {}
    ended = False

    def header_ends() -> None:
        headers[bytes(header).lower()] = bytes(value)
        header.clear()
        value.clear()

    def part_begins() -> None:
        content.clear()
        headers.clear()

    def part_ends() -> None:
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        file = options.get(b"filename")
        if file is None:
            raise Refused(400, f"the field {name[:40]!r} is no file", "settings go into the address: ?top=3")
        if len(found) == limits.images:
            raise _too_many(limits)
        found.append(Upload(file.decode("utf-8", "replace")[:200], bytes(content)))

    def body_ends() -> None:
        nonlocal ended
        ended = True

    callbacks: Any = {
        "on_part_begin": part_begins,
        "on_part_data": lambda data, start, end: content.extend(data[start:end]),
        "on_part_end": part_ends,
        "on_header_field": lambda data, start, end: header.extend(data[start:end]),
        "on_header_value": lambda data, start, end: value.extend(data[start:end]),
        "on_header_end": header_ends,
        "on_end": body_ends,
    }
    try:
        parser = MultipartParser(boundary, callbacks)
        parser.write(bytes(body))
        parser.finalize()
    except ValueError as error:
        raise Refused(400, "the multipart body cannot be read", "let the HTTP library write it") from error
    if not ended:
        raise Refused(400, "the multipart body ends too early")
    return found


def _json(body: bytearray, limits: Limits) -> list[Upload]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON", HOW) from error
    if not isinstance(said, dict):
        raise Refused(400, "the JSON is not an object", HOW)
    if unknown := sorted(said.keys() - {"images"}):
        raise Refused(400, f"the JSON has a key that is not known: {unknown[0][:40]!r}", HOW)
    images = said.get("images")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise Refused(400, "'images' must be a list of base64 texts", HOW)
    if len(images) > limits.images:
        raise _too_many(limits)
    found = []
    for index, text in enumerate(images):
        try:
            found.append(Upload(f"image {index + 1}", base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError) as error:
            raise Refused(400, f"image {index + 1} is not base64", HOW) from error
    return found


def pixels_of(upload: Upload, preprocessing: Preprocessing, limits: Limits) -> Tensor:
    """uint8, C H W, as `vitral predict` makes it; what claims to be too large is refused before it is decoded."""
    try:
        with Image.open(io.BytesIO(upload.content), formats=FORMATS) as picture:
            width, height = picture.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise NotAnImage(f"more than the {limits.megapixels} megapixels read here") from error
    except Exception:  # decode says what is wrong with it
        width = height = 0
    if width * height > limits.megapixels * 1_000_000:
        raise NotAnImage(f"{width}×{height} pixels, more than the {limits.megapixels} megapixels read here")
    try:
        return preprocessing.pixels(decode(upload.content))
    except NotAnImage as error:
        raise NotAnImage(error.what.removeprefix("the image: ")) from error
    except MemoryError as error:
        raise NotAnImage("too large to be decoded") from error
