"""Other people's shapes of CIFAR → the official binary layout: label byte or bytes, then 3072 bytes (C H W), a record.

Nothing that was fetched is ever run: pickles go through an unpickler that knows plain arrays and no more.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitral.data.registry.download import File, SourceError

if TYPE_CHECKING:
    import numpy as np


def _records(label_columns: Sequence[Any], pixels: Any) -> bytes:
    import numpy as np

    try:
        columns = [np.array(labels, dtype=np.uint8).reshape(-1, 1) for labels in label_columns]
        return np.concatenate([*columns, pixels.reshape(-1, 3072)], axis=1).tobytes()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"labels and pixels do not fit together: {error}") from None


# ── PNG ──────────────────────────────────────────────────────────────────────────────────────────────────────

TRAIN_LABELS, TEST_LABELS = "train_lables.json", "test_lables.json"  # the package spells them so


def cifar10_png_parts(files: Sequence[File]) -> dict[str, int]:
    """What `cifar10_from_png` reads: names, and the most bytes each may have."""
    pictures = {f"{file.name.removesuffix('.bin')}.png": 32 << 20 for file in files}
    return {**pictures, TRAIN_LABELS: 1 << 20, TEST_LABELS: 1 << 20}


def cifar10_from_png(folder: Path, files: Sequence[File], into: Path) -> None:
    """One PNG a batch: a row is an image, its 1024 RGB pixels in reading order (H W C)."""
    import numpy as np
    from PIL import Image

    for file in files:
        batch = file.name.removesuffix(".bin")  # data_batch_1 … data_batch_5, test_batch
        images = file.size // 3073
        try:
            # Opening reads the header only. Pillow's limit against decompression bombs (89 million pixels) stays on,
            # as an error; ours is tighter: exactly the 10 million pixels a batch must have, or nothing is decoded.
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(folder / f"{batch}.png", formats=["PNG"])
            with image:
                if (image.size, image.mode) != ((1024, images), "RGB"):
                    raise SourceError(f"{batch}.png is {image.mode} {image.size}, not {images} rows of 1024 RGB pixels")
                pixels = np.asarray(image).reshape(images, 1024, 3).transpose(0, 2, 1)  # n (h w) c -> n c (h w)
            if batch == "test_batch":
                labels = json.loads((folder / TEST_LABELS).read_bytes())
            else:
                first = images * (int(batch.removeprefix("data_batch_")) - 1)
                labels = json.loads((folder / TRAIN_LABELS).read_bytes())[first : first + images]
        except SourceError:
            raise
        except Exception as error:  # a damaged image may raise nearly anything
            raise SourceError(f"{batch} of the package cannot be read: {error}") from None
        (into / file.name).write_bytes(_records([labels], pixels))


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────────────


def cifar_from_pickles(folder: Path, files: Sequence[File], into: Path, *, labels: Sequence[str]) -> None:
    """CIFAR's Python version: <name> for each <name>.bin; `labels` are a record's columns, as the pickle names them."""
    for file in files:
        batch = read_pickled_batch(folder / file.name.removesuffix(".bin"), limit=2 * file.size)
        (into / file.name).write_bytes(_records([batch.get(label) for label in labels], batch.get("data")))


def read_pickled_batch(path: Path, *, limit: int) -> dict[str, Any]:
    """A CIFAR batch of the Python version: 'data' as an array, label lists; no code of the pickle's choosing runs."""
    if path.stat().st_size > limit:
        raise SourceError(f"{path.name} has more than {limit:,} bytes")
    try:
        with path.open("rb") as file:
            batch = _PlainUnpickler(file, encoding="bytes").load()
        named = {key.decode() if isinstance(key, bytes) else str(key): value for key, value in batch.items()}
    except (SourceError, OSError):
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise SourceError(f"{path.name} is not a CIFAR batch: {error}") from None
    return {key: value.pixels if isinstance(value, _Array) else value for key, value in named.items()}


class _Array:
    """Stands in for numpy's `_reconstruct` and `ndarray` while unpickling: holds the state, calls nothing."""

    __slots__ = ("pixels",)

    def __init__(self, *_: object) -> None:
        self.pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        import numpy as np

        _version, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _UInt8):
            raise SourceError("pickled array is not of bytes")
        self.pixels = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _UInt8:
    """Stands in for numpy's `dtype` while unpickling, and is 'u1' or nothing."""

    __slots__ = ()

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise SourceError(f"pickled array is of {kind!r}, not of bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Lists, strings and arrays of bytes. Any other name a pickle asks for is refused, not looked up."""

    _known: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,  # as NumPy 1 wrote it, the official files among them
        ("numpy._core.multiarray", "_reconstruct"): _Array,  # as NumPy 2 does
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _UInt8,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self._known:
            raise SourceError(f"the pickle asks for {module}.{name}; only plain arrays are read")
        return self._known[module, name]
