"""Images are recognised by fingerprints after copying, saving again, resizing and recompressing; others are not."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.random_classes import save_random_image
from vitral.data.datasets import load_builtin_dataset
from vitral.data.decode import decode_image
from vitral.data.files import fingerprints as module
from vitral.data.files.duplicates import CopyMatches, find_copies
from vitral.data.files.fingerprints import (
    FingerprintFormatError,
    ImageFingerprints,
    concatenate,
    fingerprint_files,
    fingerprint_tensor,
    load_fingerprints,
)
from vitral.data.files.location import ImageLocation
from vitral.errors import VitralError


def fingerprints(*files: Path) -> ImageFingerprints:
    return fingerprint_files([ImageLocation(str(file)) for file in files])


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return [save_random_image(tmp_path / f"{seed}.jpg", seed) for seed in range(12)]


def found(matches: CopyMatches) -> tuple[list[bool], list[bool]]:
    return matches.exact.tolist(), matches.near.tolist()


def test_copies_are_exact_near_or_neither(photos: list[Path], tmp_path: Path) -> None:
    reference = fingerprints(*photos)
    shutil.copy(photos[0], tmp_path / "copy.jpeg")
    with Image.open(photos[1]) as image:
        image.save(tmp_path / "lossless.png")
    with Image.open(photos[2]) as image:
        image.resize((90, 70)).save(tmp_path / "small.jpg", quality=40)
    save_random_image(tmp_path / "other.jpg", 99)
    (tmp_path / "broken.jpg").write_text("not an image")
    names = ("copy.jpeg", "lossless.png", "small.jpg", "other.jpg", "broken.jpg", "missing.jpg")
    matches = find_copies(fingerprints(*(tmp_path / name for name in names)), reference)
    assert found(matches) == ([True, True, False, False, False, False], [False, False, True, False, False, False])
    assert matches.near_checked


def test_exported_tensors_are_recognised_by_their_pixels(tmp_path: Path) -> None:
    images = load_builtin_dataset("digits").train.images[:6]
    for row, image in enumerate(images[:3]):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{row}.png")
        Image.fromarray(image[0].numpy()).convert("RGB").save(tmp_path / f"{row}-rgb.png")
    exported = fingerprints(*sorted(tmp_path.glob("*.png")))
    assert find_copies(exported, fingerprint_tensor(images, with_thumbnails=False)).exact.all()
    assert not find_copies(exported, fingerprint_tensor(images[3:], with_thumbnails=False)).any.any()


def test_one_coloured_pixel_tells_a_colour_image_from_the_grey_one() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    colour = np.stack([grey] * 3, axis=2)
    images = [grey, colour, colour.copy(), colour.copy()]
    images[2][1, 1, 1] ^= 1
    images[3][8, 8, 1] ^= 1
    fingerprints = module.empty_fingerprints(4)
    for row, image in enumerate(images):
        module.fingerprint_image(fingerprints, row, Image.fromarray(image))
    hashes = fingerprints.pixel_hashes.tolist()
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_images_similar_by_nature_are_not_copies() -> None:
    digits = load_builtin_dataset("digits")
    train, test = fingerprint_tensor(digits.train.images[:]), fingerprint_tensor(digits.test.images[:])
    assert find_copies(test, train).any.sum() == 0


def test_recompressed_copies_of_images_similar_by_nature_are_found(tmp_path: Path) -> None:
    images = load_builtin_dataset("digits").train.images[:400]
    for row in range(20):
        enlarged = Image.fromarray(images[row, 0].numpy()).resize((64, 64), Image.Resampling.BILINEAR)
        enlarged.save(tmp_path / f"{row}.jpg", quality=90)
    copies = fingerprints(*tmp_path.glob("*.jpg"))
    assert find_copies(copies, fingerprint_tensor(images)).near.sum() >= 19


def test_only_new_and_changed_files_are_read_again(photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    read = ImageLocation.read

    def counted(location: ImageLocation) -> Path | bytes:
        reads.append(location.path)
        return read(location)

    monkeypatch.setattr(ImageLocation, "read", counted)
    first = fingerprints(*photos[:6])
    assert len(reads) == 6
    save_random_image(photos[0], 77)
    fingerprints(photos[7])
    second = fingerprints(*reversed(photos[:6]))
    assert reads[6:] == [str(photos[7]), str(photos[0])]
    assert (second.file_hashes[::-1] == first.file_hashes).tolist() == [False, True, True, True, True, True]


def test_large_sets_are_hashed_without_decoding(photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_THUMBNAILS", 5)
    large = fingerprints(*photos)
    assert large.thumbnails is None
    matches = find_copies(fingerprints(*photos[:4]), large)
    assert matches.exact.all()
    assert not matches.near_checked


def test_saved_fingerprints_are_read_back(photos: list[Path], tmp_path: Path) -> None:
    original = fingerprints(*photos)
    original.save(tmp_path / "images.npz")
    loaded = load_fingerprints(tmp_path / "images.npz")
    assert find_copies(loaded, original).exact.all()
    assert loaded.thumbnails is not None
    assert (loaded.thumbnails == original.thumbnails).all()
    assert concatenate([loaded, original.without_thumbnails()]).thumbnails is None


def damaged_files() -> dict[str, bytes]:
    def npz(**arrays: object) -> bytes:
        content = io.BytesIO()
        np.savez(content, **{"format": module.FORMAT} | arrays)  # type: ignore[arg-type]
        return content.getvalue()

    hashes = np.zeros(3, dtype=np.uint64)
    return {
        "empty": b"",
        "text": b"not a zip file",
        "truncated": npz(file_hashes=hashes, pixel_hashes=hashes)[:-40],
        "format is text": npz(format="three", file_hashes=hashes, pixel_hashes=hashes),
        "several formats": npz(format=[3, 3], file_hashes=hashes, pixel_hashes=hashes),
        "missing array": npz(file_hashes=hashes),
        "pickled": npz(file_hashes=hashes, pixel_hashes=np.array([{}, 1, 2], dtype=object)),
        "lengths differ": npz(file_hashes=hashes, pixel_hashes=hashes[:2]),
        "wrong type": npz(file_hashes=hashes.astype(float), pixel_hashes=hashes),
        "wrong thumbnails": npz(file_hashes=hashes, pixel_hashes=hashes, thumbnails=np.zeros((3, 2, 2), np.uint8)),
    }


@pytest.mark.parametrize("kind", damaged_files())
def test_damaged_file_is_refused_with_its_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "images.npz").write_bytes(damaged_files()[kind])
    with pytest.raises(VitralError, match=r"images\.npz is damaged"):
        load_fingerprints(tmp_path / "images.npz")


def test_fingerprints_of_another_format_are_refused_not_compared(photos: list[Path], tmp_path: Path) -> None:
    stored = fingerprints(*photos)
    arrays = {"file_hashes": stored.file_hashes, "pixel_hashes": stored.pixel_hashes, "thumbnails": stored.thumbnails}
    formats: dict[str, tuple[dict[str, Any], str]] = {
        "older": ({"format": np.array(module.FORMAT - 1)}, "Train again with this version"),
        "unnumbered": ({}, "Train again with this version"),
        "newer": ({"format": np.array(module.FORMAT + 1)}, "Update to that version"),
    }
    for name, (format_number, hint) in formats.items():
        np.savez(tmp_path / f"{name}.npz", **arrays, **format_number)  # type: ignore[arg-type]
        with pytest.raises(
            FingerprintFormatError, match=rf"{name}\.npz was written by an? (older|newer) version"
        ) as error:
            load_fingerprints(tmp_path / f"{name}.npz")
        assert error.value.hint == hint


def test_copies_of_large_jpegs_are_found_at_any_decoded_size(tmp_path: Path) -> None:
    """Training decodes large JPEG files at a reduced size, evaluation perhaps not."""
    sizes = (1, 2, 8)
    files = [save_random_image(tmp_path / f"{seed}.jpg", seed, (511, 386), quality=90) for seed in range(4)]
    decoded = {size: module.empty_fingerprints(len(files)) for size in sizes}
    for row, file in enumerate(files):
        for size in sizes:
            side = 386 // size
            image = decode_image(file, min_size=(side, side), allow_reduced_jpeg=True)
            assert image.height == -(-386 // size)
            module.fingerprint_image(decoded[size], row, image)
    for reference in sizes:
        for size in sizes:
            matches = find_copies(decoded[size], decoded[reference])
            assert matches.any.all()
            assert matches.exact.all() == (size == reference)
    others = [save_random_image(tmp_path / f"{seed}.jpg", seed, (511, 386)) for seed in range(10, 14)]
    assert not find_copies(fingerprints(*others), decoded[8]).any.any()


def test_decompressed_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    hashes = np.zeros(200, dtype=np.uint64)
    ImageFingerprints(file_hashes=hashes, pixel_hashes=hashes, thumbnails=None).save(tmp_path / "images.npz")
    with pytest.raises(VitralError, match="too large"):
        load_fingerprints(tmp_path / "images.npz")
