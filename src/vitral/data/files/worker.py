"""A decoding worker process: reads requests from sockets, decodes images into a shared buffer, replies with the errors.

    python -m vitral.data.files.worker FD OFFSET N C H W OPTIONS SOCKET [SOCKET ...]

    → ready
    ← {"rows": [7, 8], "locations": [["a.jpg", 0, -1], ["shard.tar", 1536, 20481]], "sizes": null}
    → {"errors": {"8": "shard.tar at byte 1536: corrupt or truncated (…)"}}

One thread serves each socket: decoding and resizing release the GIL. The process ends when its sockets are closed, so a
killed training run leaves no workers behind. It imports torch only to resize many large images (`torch_resize`), so
that it starts quickly otherwise.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.data.decode import decode_pixels
from vitral.data.files.remote import is_url, read_range
from vitral.data.geometry import Geometry, Resize, Size, input_geometry
from vitral.data.pixels import ArrayLayout, PixelFormat, PixelType
from vitral.data.resize_crop import resize_and_crop, write_row
from vitral.errors import VitralError


class DecodeOptions(NamedTuple):
    """How images are decoded and resized."""

    interpolation: str
    crop: float = 1.0
    resize: Resize = "crop"
    torch_resize: bool = False
    allow_reduced_jpeg: bool = True
    dtype: PixelType = "uint8"
    layout: ArrayLayout = "auto"
    channel_names: tuple[str, ...] = ()


def read_location(path: str, offset: int, size: int) -> Path | bytes:
    """A whole file as a path; a part of a local or remote shard as bytes."""
    if size < 0:
        return Path(path)
    if is_url(path):
        return read_range(path, offset, size)
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(size)


def decode_into(
    target: np.ndarray[Any, Any],
    rows: Sequence[int],
    locations: Sequence[tuple[str, int, int]],
    options: DecodeOptions,
    sizes: Sequence[Size] | None = None,
) -> dict[int, str]:
    """Decode each image into its row of `target` (N, C, H, W). Returns the error messages, by row.

    `sizes` are those that the images are resized to, if they differ (variable_images.py).
    """
    channels, height, width = target.shape[1:]
    pixel_format = PixelFormat(channels, options.dtype, options.layout, tuple(options.channel_names))
    errors: dict[int, str] = {}
    for position, (row, (path, offset, length)) in enumerate(zip(rows, locations, strict=True)):
        name = path if length < 0 else f"{path} at byte {offset}"
        try:
            image = decode_pixels(
                read_location(path, offset, length),
                pixel_format,
                min_size=(height, width),
                allow_reduced_jpeg=options.allow_reduced_jpeg,
                name=name,
            )
            if sizes is None:
                geometry = input_geometry(
                    image.height, image.width, (height, width), options.resize, crop=options.crop, patch_size=1
                )
            else:
                size = sizes[position][0], sizes[position][1]
                geometry = Geometry(size, 0, 0, size)
            pixels = resize_and_crop(image, geometry, channels, options.interpolation, use_torch=options.torch_resize)
            if sizes is None:
                target[row] = pixels
            else:
                write_row(target[row], pixels)
        except VitralError as error:
            errors[row] = error.what
        except OSError as error:
            errors[row] = f"{name}: {error.strerror or error}"
    return errors


def serve_requests(connection: socket.socket, target: np.ndarray[Any, Any], options: DecodeOptions) -> None:
    """Decode what one socket requests, until it is closed."""
    with connection, connection.makefile("rw") as stream:
        stream.write("ready\n")
        stream.flush()
        for line in stream:
            request = json.loads(line)
            errors = decode_into(target, request["rows"], request["locations"], options, request["sizes"])
            stream.write(json.dumps({"errors": errors}) + "\n")
            stream.flush()


def main(args: Sequence[str]) -> None:
    fd, offset, *shape = map(int, args[:6])
    options = DecodeOptions(**json.loads(args[6]))
    target = np.frombuffer(mmap.mmap(fd, 0), dtype=options.dtype, offset=offset).reshape(shape)
    connections = [socket.socket(fileno=int(number)) for number in args[7:]]
    if options.torch_resize:
        import torch.nn.functional  # noqa: F401
    for connection in connections:
        threading.Thread(target=serve_requests, args=(connection, target, options)).start()


if __name__ == "__main__":
    main(sys.argv[1:])
