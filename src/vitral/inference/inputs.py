"""What `Predictor.predict` accepts: one image, a batch, several images, or a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitral.data.datasets import Dataset, Split
from vitral.data.decode import SUPPORTED_FORMATS
from vitral.data.files.walk import SkipFn, find_images, ignore_skipped
from vitral.errors import VitralError

ImageInput = str | Path | bytes | Image.Image | np.ndarray[Any, Any] | Tensor  # arrays: see data.decode.decode_image
ACCEPTED = "Pass a path, a folder, bytes, a Pillow image, an array or tensor, a batch of them, or a list"
CHANNEL_COUNTS = (1, 3, 4)


def is_single_image(images: object, channels: int = 3) -> bool:
    """Whether `images` is one image rather than several. Raises a VitralError for what is neither.

    An array of three axes is an image if one of them has `channels` values, those of the model, or 1, 3 or 4.
    """
    if isinstance(images, str | Path):
        return not Path(images).is_dir()
    if isinstance(images, bytes | Image.Image):
        return True
    if isinstance(images, np.ndarray | Tensor):
        _check_shape(images, channels)
        return images.ndim != 4
    if isinstance(images, Split | Dataset):
        raise VitralError(
            "expected images, got a labelled dataset",
            "Use model.evaluate(split) for its accuracy, or model.predict(split.images[:100]) for predictions",
        )
    if isinstance(images, Iterable) and not isinstance(images, Mapping):
        return False
    raise VitralError(f"expected images, got {_describe(images)}", ACCEPTED)


def iter_inputs(images: Any, on_skip: SkipFn = ignore_skipped, channels: int = 3) -> Iterator[ImageInput]:
    """Yield the images of a folder, a batch or an iterable. A folder in an iterable yields its images."""
    if isinstance(images, str | Path):
        files = find_images([Path(images)], on_skip)
        if not files:
            raise VitralError(f"no images in {images}", SUPPORTED_FORMATS)
        yield from files
        return
    for position, item in enumerate(images):
        if isinstance(item, tuple | list):
            raise VitralError(
                f"expected images, but item {position} is a {type(item).__name__} of {len(item)} values",
                "Pass the images without labels: model.predict([image for image, label in items])",
            )
        if not is_single_image(item, channels):
            if not isinstance(item, str | Path):
                raise VitralError(
                    f"expected images, but item {position} is {_describe(item)}",
                    "Pass one batch at a time: model.predict(batch); of a DataLoader: model.predict(batch[0])",
                )
            yield from iter_inputs(item, on_skip, channels)
        else:
            yield item


def _check_shape(array: np.ndarray[Any, Any] | Tensor, channels: int) -> None:
    shape = tuple(array.shape)
    has_channels = len(shape) != 3 or bool({shape[0], shape[2]} & {*CHANNEL_COUNTS, channels})
    if 2 <= len(shape) <= 4 and has_channels:
        return
    hint = "An image is (H, W), (H, W, C) or (C, H, W); a batch is (B, H, W, C) or (B, C, H, W)"
    if len(shape) == 3:
        hint = f"A batch of {shape[0]} grey images has a channel axis: model.predict(images[:, None])"
    raise VitralError(f"expected an image or a batch, got {_describe(array)}", hint)


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"an array of shape {'×'.join(map(str, shape)) or '()'}"
    return f"{value!r}" if value is None or isinstance(value, bool | int | float) else f"a {type(value).__name__}"
