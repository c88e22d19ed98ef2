"""Conversion of other CIFAR distributions to the official binary format.

A record of that format is one or two label bytes, then 3072 bytes (C, H, W).

Nothing that was downloaded is executed: pickles are read by an unpickler that only supports byte arrays.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.errors import FetchError

if TYPE_CHECKING:
    import numpy as np


def _to_records(label_columns: Sequence[Any], pixels: Any) -> bytes:
    import numpy as np

    try:
        columns = [np.array(labels, dtype=np.uint8).reshape(-1, 1) for labels in label_columns]
        return np.concatenate([*columns, pixels.reshape(-1, 3072)], axis=1).tobytes()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise FetchError(f"labels and pixels do not match: {error}") from None


# ── PNG ──────────────────────────────────────────────────────────────────────────────────────────────────────

TRAIN_LABELS, TEST_LABELS = "train_lables.json", "test_lables.json"  # sic: the package's spelling


def cifar10_png_members(files: Sequence[ChecksummedFile]) -> dict[str, int]:
    """Names of the files that `cifar10_from_png` reads, and their size limits in bytes."""
    images = {f"{file.name.removesuffix('.bin')}.png": 32 << 20 for file in files}
    return {**images, TRAIN_LABELS: 1 << 20, TEST_LABELS: 1 << 20}


def cifar10_from_png(folder: Path, files: Sequence[ChecksummedFile], into: Path) -> None:
    """Convert one PNG per batch. Each row of a PNG is an image: its 1024 RGB pixels in reading order (H, W, C)."""
    import numpy as np
    from PIL import Image

    for file in files:
        batch = file.name.removesuffix(".bin")  # data_batch_1 … data_batch_5, test_batch
        num_images = file.size // 3073
        try:
            # Opening reads only the header. Pillow's own limit against decompression bombs (89 million pixels) stays
            # active as an error; the size check below is tighter and comes before anything is decoded.
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(folder / f"{batch}.png", formats=["PNG"])
            with image:
                if (image.size, image.mode) != ((1024, num_images), "RGB"):
                    raise FetchError(
                        f"{batch}.png is {image.mode} {image.size}, expected {num_images} rows of 1024 RGB pixels"
                    )
                pixels = np.asarray(image).reshape(num_images, 1024, 3).transpose(0, 2, 1)  # n (h w) c -> n c (h w)
            if batch == "test_batch":
                labels = json.loads((folder / TEST_LABELS).read_bytes())
            else:
                first = num_images * (int(batch.removeprefix("data_batch_")) - 1)
                labels = json.loads((folder / TRAIN_LABELS).read_bytes())[first : first + num_images]
        except FetchError:
            raise
        except Exception as error:  # a corrupt image may raise nearly anything
            raise FetchError(f"cannot read {batch} of the package: {error}") from None
        (into / file.name).write_bytes(_to_records([labels], pixels))


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────────────


def cifar_from_pickles(
    folder: Path, files: Sequence[ChecksummedFile], into: Path, *, label_keys: Sequence[str]
) -> None:
    """Convert CIFAR's Python version: <name> for each <name>.bin. `label_keys` are the label columns of a record."""
    for file in files:
        batch = read_pickled_batch(folder / file.name.removesuffix(".bin"), limit=2 * file.size)
        (into / file.name).write_bytes(_to_records([batch.get(key) for key in label_keys], batch.get("data")))


def read_pickled_batch(path: Path, *, limit: int) -> dict[str, Any]:
    """Read a batch of CIFAR's Python version, 'data' as an array and lists of labels, without executing code."""
    if path.stat().st_size > limit:
        raise FetchError(f"{path.name} has more than {limit:,} bytes")
    try:
        with path.open("rb") as file:
            batch = _RestrictedUnpickler(file, encoding="bytes").load()
        items = {key.decode() if isinstance(key, bytes) else str(key): value for key, value in batch.items()}
    except (FetchError, OSError):
        raise
    except Exception as error:  # a corrupt pickle may raise nearly anything
        raise FetchError(f"{path.name} is not a CIFAR batch: {error}") from None
    return {key: value.pixels if isinstance(value, _PickledArray) else value for key, value in items.items()}


class _PickledArray:
    """Replaces numpy's `_reconstruct` and `ndarray` while unpickling: only stores the state."""

    __slots__ = ("pixels",)

    def __init__(self, *_: object) -> None:
        self.pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        import numpy as np

        _version, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _PickledUInt8):
            raise FetchError("pickled array does not contain bytes")
        self.pixels = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _PickledUInt8:
    """Replaces numpy's `dtype` while unpickling, and accepts only 'u1'."""

    __slots__ = ()

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise FetchError(f"pickled array has dtype {kind!r}, expected bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _RestrictedUnpickler(pickle.Unpickler):
    """Supports lists, strings and byte arrays. Any other global that a pickle refers to is an error."""

    _allowed: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,  # written by NumPy 1, as in the official files
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,  # written by NumPy 2
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledUInt8,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self._allowed:
            raise FetchError(f"the pickle refers to {module}.{name}; only plain arrays are supported")
        return self._allowed[module, name]
