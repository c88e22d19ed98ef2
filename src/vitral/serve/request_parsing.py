"""Extract the images of a request body: multipart files, raw bytes, or base64 strings in JSON.

A client can only send bytes. Paths, URLs and pickled objects are never interpreted, and the bytes stay in memory until
the request ends.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

from python_multipart.multipart import MultipartParser, parse_options_header
from torch import Tensor

from vitral.data.decode import ImageDecodeError, ImageTooLargeError, read_format
from vitral.data.preprocess import Preprocessing
from vitral.serve.limits import ErrorCode, Limits, RequestError
from vitral.utils.json_toml import parse_json

BODY_HINT = (
    "Send image files as multipart/form-data, one image as raw bytes (Content-Type: image/jpeg), "
    'or JSON: {"images": ["<base64>"]}'
)


class Upload(NamedTuple):
    name: str
    content: bytes


class ImageError(Exception):
    """One image of a request cannot be used. The other images are still classified."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def _invalid_body(message: str, hint: str = BODY_HINT) -> RequestError:
    return RequestError(400, "invalid_body", message, hint)


def _too_many_images(limits: Limits) -> RequestError:
    message = f"more than {limits.max_images} images in one request"
    return RequestError(413, "too_many_images", message, "Split them into several requests")


def parse_uploads(content_type: str, body: bytearray, limits: Limits) -> list[Upload]:
    """Extract the images of a body according to its Content-Type."""
    if not body:
        raise _invalid_body("the body is empty")
    media_type, options = parse_options_header(content_type)
    if media_type == b"multipart/form-data":
        uploads = _parse_multipart(body, options.get(b"boundary", b""), limits)
    elif media_type == b"application/json":
        uploads = _parse_json(body, limits)
    elif media_type.startswith(b"image/") or media_type in (b"application/octet-stream", b""):
        uploads = [Upload("image", bytes(body))]
    else:
        message = f"content type {content_type[:60]!r} is not supported"
        raise RequestError(415, "unsupported_media_type", message, BODY_HINT)
    if not uploads:
        raise _invalid_body("no image in the body")
    return uploads


class _MultipartReader:
    """Callbacks for the streaming multipart parser. Every part with a file name is an image."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.uploads: list[Upload] = []
        self.complete = False
        self._header_name, self._header_value, self._content = bytearray(), bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": lambda data, start, end: self._content.extend(data[start:end]),
            "on_part_end": self._end_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_end": self._end_body,
        }

    def _begin_part(self) -> None:
        self._content.clear()
        self._headers.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        field_name = options.get(b"name", b"").decode("utf-8", "replace")
        file_name = options.get(b"filename")
        if file_name is None:
            hint = "Pass parameters in the query string: ?top=3"
            raise _invalid_body(f"the form field {field_name[:40]!r} is not a file", hint)
        if len(self.uploads) == self.limits.max_images:
            raise _too_many_images(self.limits)
        self.uploads.append(Upload(file_name.decode("utf-8", "replace")[:200], bytes(self._content)))

    def _end_body(self) -> None:
        self.complete = True


def _parse_multipart(body: bytearray, boundary: bytes, limits: Limits) -> list[Upload]:
    if not boundary:
        hint = "Let the HTTP library set the Content-Type header"
        raise _invalid_body("multipart/form-data without a boundary", hint)
    reader = _MultipartReader(limits)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(bytes(body))
        parser.finalize()
    except ValueError as error:
        raise _invalid_body("malformed multipart body", "Let the HTTP library encode it") from error
    if not reader.complete:
        raise _invalid_body("the multipart body is truncated")
    return reader.uploads


def _parse_json(body: bytearray, limits: Limits) -> list[Upload]:
    try:
        content = parse_json(body)
    except ValueError as error:
        raise _invalid_body(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _invalid_body("the JSON body is not an object")
    if unknown_keys := sorted(content.keys() - {"images"}):
        raise _invalid_body(f"unknown key in the JSON body: {unknown_keys[0][:40]!r}")
    images = content.get("images")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise _invalid_body("'images' must be a list of base64 strings")
    if len(images) > limits.max_images:
        raise _too_many_images(limits)
    uploads = []
    for number, text in enumerate(images, start=1):
        try:
            uploads.append(Upload(f"image {number}", base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError) as error:
            raise _invalid_body(f"image {number} is not valid base64") from error
    return uploads


def decode_upload(upload: Upload, preprocessing: Preprocessing, limits: Limits) -> Tensor:
    """Decode, resize and crop one image exactly as `vitral predict` does: (C, H, W), uint8 for photographs.

    The size in the header is checked before any pixel is decoded.
    """
    try:
        header = read_format(upload.content, layout=preprocessing.layout, channels=preprocessing.channels)
        max_pixels = limits.max_megapixels * 1_000_000
        if header.width * header.height > max_pixels:
            size = f"{header.width}×{header.height} pixels"
            raise ImageError("image_too_large", f"{size}, more than {limits.max_megapixels} megapixels")
        if header.num_bytes > 3 * max_pixels:
            size = f"{header.channels} channels of {header.width}×{header.height} pixels"
            raise ImageError(
                "image_too_large", f"{size}, more bytes than an RGB image of {limits.max_megapixels} megapixels"
            )
        return preprocessing.load(upload.content)
    except ImageTooLargeError as error:
        raise ImageError("image_too_large", f"more than {limits.max_megapixels} megapixels") from error
    except ImageDecodeError as error:
        raise ImageError("unreadable_image", error.what.removeprefix("the image: ")) from error
    except MemoryError as error:
        raise ImageError("image_too_large", "not enough memory to decode it") from error
