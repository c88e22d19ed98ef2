"""The pixel format of a dataset: how many channels its images have and of which type, before anything is decoded.

Photographs (8-bit grey or RGB, also mixed) need no scan: a sample of the headers decides. If one of the sampled files
is something else, the headers of all files are read, and files that differ are reported by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitral.data.decode import ImageDecodeError, read_format
from vitral.data.files.listing import DatasetListing
from vitral.data.files.location import ImageLocation
from vitral.data.files.packed import is_packed, read_index
from vitral.data.files.remote import is_url
from vitral.data.pixels import ArrayLayout, PixelFormat, to_channels_first
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError, truncate_list
from vitral.utils.text import count_text

MAX_SAMPLE = 64  # headers that are read of a folder of photographs
MAX_REMOTE_SAMPLE = 4
PHOTO = PixelFormat(3)


@dataclass(frozen=True, kw_only=True)
class DetectedPixels:
    """The pixel format of a dataset, and what was converted."""

    format: PixelFormat
    note: str | None = None  # for display


def detect_pixels(locations: Sequence[ImageLocation], name: str, layout: ArrayLayout = "auto") -> DetectedPixels:
    """The pixel format of the files of a dataset. Raises VitralError that names files if they differ.

    Unreadable files are left to the decoder. 16-bit files among photographs are converted to 8 bits.
    """

    def read(location: ImageLocation) -> PixelFormat | None:
        try:
            file_format = read_format(location.read(), str(location), layout=layout)
        except (OSError, VitralError) as error:
            if "ambiguous" in str(error):
                raise
            return None
        return PixelFormat(file_format.channels, file_format.dtype, layout, file_format.names)

    is_remote = bool(locations) and is_url(locations[0].path)
    count = min(len(locations), MAX_REMOTE_SAMPLE if is_remote else MAX_SAMPLE)
    sample = [locations[row] for row in np.linspace(0, len(locations) - 1, count).round().astype(int)] if count else []
    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        formats = list(pool.map(read, sample))
        if all(file_format is None or file_format.is_photo for file_format in formats):
            return DetectedPixels(format=PHOTO)
        if not is_remote:
            sample, formats = list(locations), list(pool.map(read, locations))
    return _one_format([str(location) for location in sample], formats, name)


def check_pixel_format(locations: Sequence[ImageLocation], name: str, expected: PixelFormat) -> None:
    """Raise VitralError if a model that expects this format cannot read the files."""
    detected = detect_pixels(locations, name, expected.layout).format
    is_converted = expected.is_photo and detected.dtype != "float32" and detected.channels in (1, 3)
    if not is_converted and (detected.channels, detected.dtype) != (expected.channels, expected.dtype):
        raise VitralError(
            f"the labelled images {name} have {describe_format(detected)}; the model has images with {expected}",
            "Name labelled images with the same channels and type",
        )


def detect_listing_pixels(listing: DatasetListing, layout: ArrayLayout = "auto") -> DetectedPixels:
    """The pixel format of all splits of a listed dataset."""
    return detect_pixels(listing.locations, listing.name, layout)


def packed_pixels(folder: Path) -> DetectedPixels:
    """The pixel format of a packed folder."""
    stored = read_index(folder).stored.pixel_format if is_packed(folder) else PHOTO
    return DetectedPixels(format=PHOTO if stored.is_photo else stored)


def detect_item_pixels(images: Sequence[Any], layout: ArrayLayout = "auto") -> DetectedPixels:
    """The pixel format of images of a Python sequence, whatever `decode_pixels` accepts."""
    names = [f"item {index}" for index in range(len(images))]
    formats: list[PixelFormat | None] = []
    for name, image in zip(names, images, strict=True):
        try:
            formats.append(_value_format(image, name, layout))
        except ImageDecodeError as error:
            if "ambiguous" in error.what:
                raise
            formats.append(None)
    return _one_format(names, formats, "the sequence")


def _value_format(image: Any, name: str, layout: ArrayLayout) -> PixelFormat | None:
    if isinstance(image, Path | str | bytes):
        file_format = read_format(image, name, layout=layout)
        return PixelFormat(file_format.channels, file_format.dtype, layout, file_format.names)
    if isinstance(image, Image.Image):
        return PixelFormat(1, "uint16", layout) if image.mode.startswith("I;16") else PHOTO
    is_tensor = type(image).__module__.startswith("torch")
    array = np.asarray(image)
    looks_like_photo = array.ndim == 2 or (array.ndim == 3 and bool({array.shape[0], array.shape[2]} & {1, 3, 4}))
    if looks_like_photo and array.dtype != np.uint16:  # integers from 0 to 255 and floats from 0 to 1
        return PHOTO
    channels_first: ArrayLayout = "chw" if is_tensor else layout
    pixels = to_channels_first(array, name, layout=channels_first)
    return PixelFormat(pixels.channels, pixels.dtype, layout)


def _one_format(names: Sequence[str], formats: Sequence[PixelFormat | None], dataset: str) -> DetectedPixels:
    files: defaultdict[PixelFormat, list[str]] = defaultdict(list)
    for name, file_format in zip(names, formats, strict=True):
        if file_format is not None:
            files[PHOTO if file_format.is_photo else file_format].append(name)
    if len(files) <= 1:
        return DetectedPixels(format=next(iter(files), PHOTO))
    if PHOTO in files and all(each.channels in (1, 3) for each in files):
        others = [name for each, members in files.items() if each != PHOTO for name in members]
        return DetectedPixels(format=PHOTO, note=_conversion_note(others, len(names)))
    raise mixed_formats_error(dataset, files)


def _conversion_note(others: Sequence[str], count: int) -> str:
    verb = "has" if len(others) == 1 else "have"
    return (
        f"{len(others):,} of {count:,} files {verb} more than 8 bits per channel and are converted to 8 bits, because "
        f"the others have 8: {truncate_list([Path(name).name for name in others], 3)}"
    )


def describe_format(pixel_format: PixelFormat) -> str:
    """`5 channels, 16-bit named blue, green, …`."""
    names = f" named {', '.join(pixel_format.names)}" if pixel_format.names else ""
    return "8-bit grey or RGB" if pixel_format.is_photo else f"{pixel_format}{names}"


def describe_groups(files: Mapping[PixelFormat, Sequence[str]]) -> str:
    """`380 files with 5 channels, 16-bit (a.tif, …); 2 files with 4 channels, 16-bit (b.tif, …)`, largest first."""
    groups = []
    for pixel_format, members in sorted(files.items(), key=lambda item: len(item[1]), reverse=True):
        files_text = f"{count_text(len(members), 'file')} with {describe_format(pixel_format)}"
        groups.append(f"{files_text} ({truncate_list([Path(name).name for name in members], 3)})")
    return "; ".join(groups)


def mixed_formats_error(dataset: str, files: Mapping[PixelFormat, Sequence[str]]) -> VitralError:
    return VitralError(
        f"{dataset} mixes images of different channels or types: {describe_groups(files)}",
        "Save all images with the same channels and type, or leave files out with --exclude",
    )
