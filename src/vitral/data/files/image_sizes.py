"""The sizes that images of files are resized to if they differ, from the headers of the files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vitral.data.decode import ImageDecodeError, read_upright_size
from vitral.data.files.location import ImageLocation
from vitral.data.geometry import Size, bucket_sizes, nearest_bucket
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError


def stored_size(height: int, width: int, stored: Preprocessing, *, is_train: bool) -> Size:
    """The size that an image is stored at: without the padding, and for native training in its bucket."""
    if is_train and stored.resize == "native":
        return nearest_bucket(height, width, bucket_sizes(stored.image_size, stored.patch_size))
    return stored.geometry(height, width).resized


def read_stored_sizes(
    locations: Sequence[ImageLocation], stored: Preprocessing, *, is_train: bool
) -> list[Size] | None:
    """The size of each stored image; None if all have that of `stored`. An unreadable file counts as square."""
    if not stored.has_variable_sizes:
        return None

    def size_of(location: ImageLocation) -> Size:
        try:
            height, width = read_upright_size(location.read(), stored.pixel_format)
        except (ImageDecodeError, VitralError, OSError):
            height, width = 1, 1  # reported when it is decoded
        return stored_size(height, width, stored, is_train=is_train)

    with ThreadPoolExecutor(max(2, available_cpus()), thread_name_prefix="sizes") as pool:
        return list(pool.map(size_of, locations))
