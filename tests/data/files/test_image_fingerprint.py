"""A file has one fingerprint, whether it is computed on its own or while the file is decoded for a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.photos import PREPROCESSING, save_class_folders
from support.random_classes import save_random_image
from vitral.data.datasets import Dataset
from vitral.data.files import decode_process, file_dataset, image_fingerprint, pack_writer
from vitral.data.files.decode_pool import DecodeWorkers
from vitral.data.files.decode_process import DecodeOptions, RowFile, decode_into
from vitral.data.files.duplicates import correlation
from vitral.data.files.file_dataset import ReadOptions, list_images, read_listing
from vitral.data.files.fingerprints import FORMAT, CachedFingerprints, ImageFingerprints, fingerprint_files
from vitral.data.files.image_fingerprint import Fingerprint, fingerprint_pixels, hash_bytes
from vitral.data.files.location import ImageLocation
from vitral.data.files.pack_writer import PackWriter
from vitral.data.lazy_images import iter_batches
from vitral.data.pixels import ChannelImage
from vitral.data.registry.cache import cache_dir

SHAPE = (3, 20, 30)


def jpeg(size: tuple[int, int] = (120, 90), mode: str = "RGB", **options: object) -> Callable[[Path], Path]:
    return lambda folder: save_random_image(folder / "image.jpg", 1, size, mode, **options)


def rotated(folder: Path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = 6
    return save_random_image(folder / "rotated.jpg", 1, exif=exif)


def array(folder: Path, shape: tuple[int, ...], dtype: str, name: str) -> Path:
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    if name.endswith(".npy"):
        np.save(folder / name, values)
    else:
        Image.fromarray(values).save(folder / name)
    return folder / name


FILES: dict[str, Callable[[Path], Path]] = {
    "jpeg, decoded in full by both": jpeg((50, 40)),
    "jpeg, reduced for the model": jpeg((120, 90)),
    "large jpeg, reduced for both alike": jpeg((1000, 1100), quality=100),
    "large jpeg, reduced differently": jpeg((230, 250), quality=100),
    "grey jpeg": jpeg((50, 40), "L"),
    "cmyk jpeg": jpeg((50, 40), "CMYK"),
    "rotated by exif": rotated,
    "png with transparency": lambda folder: save_random_image(folder / "image.png", 1, mode="RGBA"),
    "large png": lambda folder: save_random_image(folder / "image.png", 1, (300, 300)),
    "16-bit png": lambda folder: array(folder, (40, 50), "uint16", "image.png"),
    "tiff": lambda folder: array(folder, (40, 50, 3), "uint8", "image.tif"),
    "npy": lambda folder: array(folder, (40, 50, 3), "uint8", "image.npy"),
}


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("kind", FILES)
def test_fingerprints_of_a_file_match_while_decoding_and_on_its_own(
    kind: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal, if the file is decoded at the same size. At a reduced size only the pixel hash tells the pixels apart."""
    monkeypatch.setattr(image_fingerprint, "MAX_FULL_DECODE", 20_000)
    file = FILES[kind](tmp_path)
    assert (file.stat().st_size > 20_000) == kind.startswith("large")
    options = DecodeOptions("bilinear", allow_reduced_jpeg=split == "train", fingerprints=True)
    with (tmp_path / "rows").open("w+b") as rows:
        decoded = decode_into(RowFile(rows.fileno(), SHAPE), [0], [ImageLocation(str(file))], options)
    alone = fingerprint_files([ImageLocation(str(file))])
    assert not decoded.errors
    together = Fingerprint.from_hex(decoded.fingerprints[0])
    assert together.file_hash == alone.file_hashes[0] != 0
    is_reduced_on_its_own = kind.startswith("large jpeg")
    is_reduced_while_decoding = split == "train" and kind in (*REDUCED_FOR_MODEL, "large jpeg, reduced for both alike")
    assert alone.thumbnails is not None
    if is_reduced_while_decoding == is_reduced_on_its_own:
        assert together.pixel_hash == alone.pixel_hashes[0]
        assert np.array_equal(together.thumbnail, alone.thumbnails[0])
    else:
        assert together.pixel_hash not in (0, alone.pixel_hashes[0])
        pair = torch.from_numpy(np.stack([together.thumbnail, alone.thumbnails[0]])).float()
        assert correlation(pair[:1, None], pair[1:, None]) > 0.99


REDUCED_FOR_MODEL = ("jpeg, reduced for the model", "large jpeg, reduced differently", "rotated by exif")


SAME_PIXELS = [kind for kind in FILES if kind not in ("16-bit png", "tiff", "npy")]


@pytest.mark.parametrize("kind", SAME_PIXELS)
def test_file_is_not_decoded_twice_if_the_model_gets_its_pixels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fingerprint, "decode_native", lambda *_, **__: pytest.fail("decoded twice"))
    options = DecodeOptions("bilinear", fingerprints=True)
    with (tmp_path / "rows").open("w+b") as rows:
        location = ImageLocation(str(FILES[kind](tmp_path)))
        assert 0 in decode_into(RowFile(rows.fileno(), SHAPE), [0], [location], options).fingerprints


def test_very_large_jpeg_is_decoded_again_at_reduced_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaging and hashing all pixels of 12 megapixels takes longer."""
    monkeypatch.setattr(image_fingerprint, "MAX_FULL_DECODE", 20_000)
    monkeypatch.setattr(image_fingerprint, "MAX_SHARED_PIXELS", 500_000)
    file = FILES["large jpeg, reduced for both alike"](tmp_path)
    options = DecodeOptions("bilinear", allow_reduced_jpeg=False, fingerprints=True)
    with (tmp_path / "rows").open("w+b") as rows:
        decoded = decode_into(RowFile(rows.fileno(), SHAPE), [0], [ImageLocation(str(file))], options)
    assert (
        Fingerprint.from_hex(decoded.fingerprints[0]).pixel_hash
        == fingerprint_files([ImageLocation(str(file))]).pixel_hashes[0]
    )


def test_stored_pixels_do_not_depend_on_whether_fingerprints_are_computed(tmp_path: Path) -> None:
    modes = {"rgb": "RGB", "grey": "L", "cmyk": "CMYK"}
    files = [save_random_image(tmp_path / f"{name}.jpg", 1, (320, 270), mode) for name, mode in modes.items()]
    for shape in ((3, 128, 128), (1, 128, 128)):
        stored = []
        for fingerprints in (False, True):
            options = DecodeOptions("bilinear", torch_resize=True, checksums=True, fingerprints=fingerprints)
            with (tmp_path / "rows").open("w+b") as rows:
                locations = [ImageLocation(str(file)) for file in files]
                stored.append(decode_into(RowFile(rows.fileno(), shape), range(3), locations, options))
        assert not stored[0].errors
        assert stored[0].checksums == stored[1].checksums
        assert len(stored[1].fingerprints) == 3


def test_definition_of_fingerprints_changes_only_with_the_format() -> None:
    """If this fails, raise FORMAT: stored fingerprints are compared with new ones."""
    assert FORMAT == 3
    colour = (np.arange(20 * 30 * 3).reshape(20, 30, 3) * 7 % 251).astype(np.uint8)
    large = (np.arange(200 * 300 * 3).reshape(200, 300, 3) * 7 % 251).astype(np.uint8)
    assert hash_bytes(b"image") == HASHES[0]
    assert hash_bytes(bytes(range(256)) * 100) == HASHES[1]
    assert fingerprint_pixels(Image.fromarray(colour))[0] == HASHES[2]
    assert fingerprint_pixels(Image.fromarray(colour[:, :, 0]))[0] == HASHES[3]
    assert fingerprint_pixels(Image.fromarray(colour[:, :, [0, 0, 0]]))[0] == HASHES[3]
    assert fingerprint_pixels(Image.fromarray(large))[0] == HASHES[4]
    assert fingerprint_pixels(ChannelImage(colour.transpose(2, 0, 1).astype(np.uint16)))[0] == HASHES[5]
    ramp = np.broadcast_to(np.arange(0, 256, 2, dtype=np.uint8)[None, :, None], (128, 128, 3))
    thumbnail = fingerprint_pixels(Image.fromarray(np.ascontiguousarray(ramp)))[1]
    assert thumbnail[3, 1:-1].tolist() == pytest.approx(list(range(23, 240, 16)), abs=1)


HASHES = (
    6928719167686846848,
    6561517553666825143,
    13803114403108152727,
    14649681051531033164,
    14305897215262376175,
    11566069768322054024,
)


@pytest.mark.parametrize("length", [1, 100, 5000, 60_000])
def test_every_byte_changes_the_hash(length: int) -> None:
    content = bytearray(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))
    hashes = {hash_bytes(bytes(content)), hash_bytes(bytes(content) + b"\0")}
    for position in {0, length // 3, length // 2 + 1, length - 1} & set(range(length)):
        content[position] ^= 1
        hashes.add(hash_bytes(bytes(content)))
        content[position] ^= 1
    assert len(hashes) == 2 + len({0, length // 3, length // 2 + 1, length - 1} & set(range(length)))
    assert hash_bytes(bytes(content)) in hashes


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 12), ("val", 3)):
        save_class_folders(tmp_path / "photos" / split, ("ants", "bees"), count, first_seed=100 * count)
    return tmp_path / "photos"


def load(photos: Path, *, fingerprints: bool = True) -> Dataset:
    options = ReadOptions(workers=2)
    return read_listing(list_images(photos, 0.0), PREPROCESSING, options, fingerprints=fingerprints)


def locations_of(dataset: Dataset) -> list[ImageLocation]:
    return [*(dataset.train.locations or ()), *(dataset.validation.locations or ())]


def without_cache(locations: list[ImageLocation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFingerprints:
    with monkeypatch.context() as patch:
        patch.setenv("VITRAL_HOME", str(tmp_path / "other-home"))
        return fingerprint_files(locations)


def assert_equal(first: ImageFingerprints, second: ImageFingerprints) -> None:
    assert np.array_equal(first.file_hashes, second.file_hashes)
    assert np.array_equal(first.pixel_hashes, second.pixel_hashes)
    assert first.thumbnails is not None
    assert second.thumbnails is not None
    assert np.array_equal(first.thumbnails, second.thumbnails)


@pytest.mark.parametrize("decoder", ["threads", pytest.param("processes", marks=pytest.mark.slow), "during the epoch"])
def test_packing_caches_the_fingerprints_of_its_files(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    if decoder == "processes":
        monkeypatch.setattr(pack_writer, "MIN_FILES_FOR_WORKERS", 0)
        monkeypatch.setattr(pack_writer, "MAX_THREADS", 0)
        monkeypatch.setattr(DecodeWorkers, "__init__", start_and_wait)
    if decoder == "during the epoch":
        monkeypatch.setattr(file_dataset, "MIN_BYTES_TO_DEFER", 0)
    dataset = load(photos)
    if decoder == "during the epoch":
        _ = list(iter_batches(dataset.train.images, [torch.arange(24)]))
    expected = without_cache(locations_of(dataset), tmp_path, monkeypatch)
    monkeypatch.setattr(ImageLocation, "read", lambda *_: pytest.fail("read again"))
    assert_equal(fingerprint_files(locations_of(dataset)), expected)


def start_and_wait(self: DecodeWorkers, *args: Any, **kwargs: Any) -> None:
    START(self, *args, **kwargs)
    self.wait_until_ready()


START = DecodeWorkers.__init__


def test_cached_fingerprints_are_not_computed_again_while_packing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations = locations_of(load(photos, fingerprints=False))
    fingerprint_files(locations)
    shutil.rmtree(cache_dir() / "packed")
    monkeypatch.setattr(decode_process, "fingerprint_decoded", lambda *_: pytest.fail("computed again"))
    load(photos)


def test_rows_that_an_ended_process_has_packed_get_their_fingerprints_later(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PackWriter, "decode_all", decode_a_few_and_fail)
        patch.setattr(CachedFingerprints, "save", lambda _: None)  # as if the process was killed
        with pytest.raises(KeyboardInterrupt):
            load(photos)
    dataset = load(photos)
    expected = without_cache(locations_of(dataset), tmp_path, monkeypatch)
    assert_equal(fingerprint_files(locations_of(dataset)), expected)


def decode_a_few_and_fail(self: PackWriter, _: object) -> None:
    for future in self.decode(range(5)):
        future.result()
    raise KeyboardInterrupt


def test_file_that_changes_while_it_is_packed_is_read_again(photos: Path, tmp_path: Path) -> None:
    file = next((photos / "train" / "ants").glob("*.jpg"))
    location = ImageLocation(str(file))
    cached = CachedFingerprints([location])
    save_random_image(file, 5)
    cached.fill(0, Fingerprint(1, 2, np.zeros((16, 16), dtype=np.uint8)))
    cached.save()
    assert fingerprint_files([location]).file_hashes[0] == hash_bytes(file.read_bytes())


def test_unreadable_image_has_no_fingerprint(photos: Path) -> None:
    file = next((photos / "train" / "ants").glob("*.jpg"))
    file.write_bytes(file.read_bytes()[:300])
    options = ReadOptions(unreadable=0.1)
    dataset = read_listing(list_images(photos, 0.0), PREPROCESSING, options, fingerprints=True)
    rows = [location.path == str(file) for location in dataset.train.locations or ()]
    stored = fingerprint_files(list(dataset.train.locations or ()))
    assert (stored.pixel_hashes == 0).tolist() == rows


def test_pipe_in_a_list_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    assert fingerprint_files([ImageLocation(str(tmp_path / "pipe.jpg"))]).file_hashes.tolist() == [0]
