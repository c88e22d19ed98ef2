"""Files of every kind, whole and broken, made here with Pillow."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitral.data import decode as module
from vitral.data.decode import NotAnImage, decode, image_files

Array = np.ndarray[Any, Any]


def photograph(H: int = 12, W: int = 20) -> Array:
    """H W 3, smooth, and different in each corner and channel."""
    y, x = np.mgrid[:H, :W]
    return np.stack([30 + 200 * x // W, 30 + 200 * y // H, 220 - 100 * x // W - 60 * y // H], axis=-1).astype(np.uint8)


def encoded(picture: Image.Image, format: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format", "settings", "tolerance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 12),
        ("JPEG", {"quality": 98, "subsampling": 0}, 6),
        ("JPEG", {"quality": 98, "subsampling": 0, "progressive": True}, 6),
        ("GIF", {}, 12),
    ],
)
def test_each_format_comes_out_as_the_rgb_that_went_in(
    tmp_path: Path, format: str, settings: dict[str, Any], tolerance: int
) -> None:
    content = encoded(Image.fromarray(photograph()), format, **settings)
    file = tmp_path / f"a.{format.lower()}"
    file.write_bytes(content)
    for source in (content, file, str(file)):
        picture = decode(source)
        assert picture.mode == "RGB"
        assert np.abs(np.asarray(picture).astype(int) - photograph()).max() <= tolerance


def test_grayscale_stays_grayscale() -> None:
    gray = photograph()[..., 0]
    for format in ("PNG", "BMP", "TIFF"):
        picture = decode(encoded(Image.fromarray(gray), format))
        assert picture.mode == "L"
        assert np.array_equal(np.asarray(picture), gray)
    assert decode(encoded(Image.fromarray(gray), "JPEG")).mode == "L"


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_read(format: str) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "blue", "lime")]
    picture = decode(encoded(frames[0], format, save_all=True, append_images=frames[1:]))
    red, green, blue = np.asarray(picture.convert("RGB"))[3, 3]
    assert red > 250
    assert max(green, blue) < 5


def test_a_phones_jpeg_with_several_pictures_inside_is_read() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    picture = decode(encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]))
    assert np.asarray(picture)[8, 8, 0] > 250


# What a camera held that way stores of the upright picture, and so what has to be undone (EXIF 2.3, tag 0x0112).
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_comes_out_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](photograph(16, 32))))
    lossless = {"lossless": True} if format == "WEBP" else {"quality": 98} if format == "JPEG" else {}
    content = encoded(stored, format, exif=exif, **lossless)
    for source in (content, Image.open(io.BytesIO(content))):
        picture = decode(source)
        assert picture.size == (32, 16)
        assert np.abs(np.asarray(picture).astype(int) - photograph(16, 32)).max() <= (8 if format == "JPEG" else 0)


def test_an_orientation_that_does_not_exist_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert np.array_equal(np.asarray(decode(encoded(Image.fromarray(photograph()), "PNG", exif=exif))), photograph())


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_becomes_the_rgb_of_its_inks(format: str) -> None:
    for cmyk, rgb in (((0, 0, 0, 0), (255, 255, 255)), ((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0))):
        picture = decode(encoded(Image.new("CMYK", (8, 8), cmyk), format))
        assert picture.mode == "RGB"
        assert np.abs(np.asarray(picture)[4, 4].astype(int) - rgb).max() <= 3


def test_a_palette_becomes_its_colours() -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 200, 100, 50])
    indexed.putdata([1, 0])
    for format in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.asarray(decode(encoded(indexed, format))).tolist() == [[[200, 100, 50], [10, 20, 30]]]


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_the_transparent_colour_of_a_palette_becomes_white(format: str) -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 200, 100, 50])
    indexed.putdata([1, 0])
    content = encoded(indexed, format, transparency=0)
    assert np.asarray(decode(content)).tolist() == [[[200, 100, 50], [255, 255, 255]]]


def test_a_palette_of_half_transparent_colours_is_laid_over_white() -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([0, 0, 0, 200, 100, 50])
    indexed.putdata([0, 1])
    content = encoded(indexed, "PNG", transparency=bytes([128, 255]))
    assert np.asarray(decode(content)).tolist() == [[[127, 127, 127], [200, 100, 50]]]


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_alpha_is_laid_over_white(format: str) -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128], [0, 0, 0, 51]]], dtype=np.uint8)
    lossless = {"lossless": True} if format == "WEBP" else {}
    picture = decode(encoded(Image.fromarray(rgba), format, **lossless))
    alpha = rgba[..., 3:] / 255
    wanted = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert picture.mode == "RGB"
    assert np.abs(np.asarray(picture) - wanted).max() <= 1


def test_gray_with_alpha_is_laid_over_white() -> None:
    la = np.array([[[0, 255], [0, 0], [100, 128]]], dtype=np.uint8)
    picture = decode(encoded(Image.fromarray(la, "LA"), "PNG"))
    wanted = [255 * (1 - a / 255) + value * a / 255 for value, a in la[0].tolist()]
    assert np.abs(np.asarray(picture.convert("L"))[0] - wanted).max() <= 1


def test_a_transparent_gray_and_a_transparent_rgb_value_become_white() -> None:
    gray = decode(encoded(Image.fromarray(np.array([[0, 90]], dtype=np.uint8)), "PNG", transparency=90))
    assert np.asarray(gray.convert("L")).tolist() == [[0, 255]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert np.asarray(decode(encoded(colour, "PNG", transparency=(4, 5, 6)))).tolist() == [[[1, 2, 3], [255] * 3]]


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
def test_one_bit_pictures_are_black_and_white(format: str) -> None:
    bits = np.array([[True, False, True], [False, False, True]])
    picture = decode(encoded(Image.fromarray(bits), format))
    assert np.asarray(picture.convert("L")).tolist() == (bits * 255).tolist()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_divided_by_257(format: str) -> None:
    values = np.array([[0, 1, 128, 129, 256, 257, 32767, 32768, 65406, 65535]], dtype=np.uint16)
    picture = decode(encoded(Image.fromarray(values), format))
    assert picture.mode == "L"
    assert np.asarray(picture).tolist() == np.round(values / 257).astype(int).tolist()


def test_a_dark_sixteen_bit_picture_stays_dark() -> None:
    picture = decode(encoded(Image.fromarray(np.full((2, 2), 200, dtype=np.uint16)), "PNG"))
    assert np.asarray(picture).max() == 1


@pytest.mark.parametrize(
    ("values", "top"),
    [
        (np.array([[0, 10, 255]], dtype=np.int32), 255),
        (np.array([[0, 1000, 65535]], dtype=np.int32), 65535),
        (np.array([[0.0, 0.25, 1.0]], dtype=np.float32), 1),
        (np.array([[0.0, 100.5, 255.0]], dtype=np.float32), 255),
        (np.array([[0.0, 3000.0, 65535.0]], dtype=np.float32), 65535),
    ],
)
def test_32_bit_whole_and_floating_pictures_are_scaled_by_the_range_they_use(values: Array, top: float) -> None:
    picture = decode(encoded(Image.fromarray(values), "TIFF"))
    assert picture.mode == "L"
    assert np.abs(np.asarray(picture) - values / top * 255).max() <= 0.5


def test_pixels_that_are_no_numbers_are_black_and_do_not_spoil_the_others() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.0, -3.0]], dtype=np.float32)
    assert np.asarray(decode(encoded(Image.fromarray(values), "TIFF"))).tolist() == [[0, 0, 0, 128, 255, 0]]


def test_a_picture_that_pillow_opened_comes_out_like_its_file_and_is_left_as_it_was() -> None:
    rgba = Image.new("RGBA", (3, 3), (0, 0, 0, 0))
    assert np.asarray(decode(rgba)).min() == 255
    assert rgba.mode == "RGBA"
    assert np.asarray(decode(Image.fromarray(np.full((2, 2), 32768, dtype=np.uint16)))).max() == 128


def test_a_picture_that_pillow_opened_lazily_and_that_is_broken_is_an_error() -> None:
    content = encoded(Image.fromarray(photograph(64, 64)), "PNG")
    with pytest.raises(NotAnImage, match="the image: broken"):
        decode(Image.open(io.BytesIO(content[: len(content) // 2])))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_truncated_file_is_named_and_called_broken(tmp_path: Path, format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = tmp_path / "half.img"
    content = encoded(Image.fromarray(noise), format)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(NotAnImage, match=r"half\.img: (broken or truncated|not an image)"):
        decode(file)


@pytest.mark.parametrize("content", [b"", b"hello, this is a text\n" * 20, b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_what_is_no_image_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "text.png"
    file.write_bytes(content)
    for source, name in ((file, "text.png"), (str(file), "text.png"), (content, "the image")):
        said = "(not an image|broken)" if content else "an empty file"
        with pytest.raises(NotAnImage, match=f"{name}: {said}") as caught:
            decode(source)
        assert "\n" not in caught.value.what


def test_formats_that_pillow_opens_with_the_help_of_other_programs_are_not_read() -> None:
    postscript = encoded(Image.new("RGB", (4, 4)), "EPS")
    with pytest.raises(NotAnImage, match="not an image"):
        decode(postscript)


def test_a_folder_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotAnImage, match="a folder without images"):
        decode(tmp_path)
    with pytest.raises(NotAnImage, match="no such file"):
        decode(tmp_path / "gone.png")
    with pytest.raises(NotAnImage):
        decode("with\0null.png")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_says_so(tmp_path: Path) -> None:
    file = tmp_path / "locked.png"
    file.write_bytes(encoded(Image.new("L", (2, 2)), "PNG"))
    file.chmod(0)
    with pytest.raises(NotAnImage, match="no permission"):
        decode(file)


def bomb(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes that declares a size it does not have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [11_000, 30_000])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(NotAnImage, match=r"more than vitral reads|more pixels than vitral reads"):
        decode(bomb(side, side))


def test_pictures_up_to_the_limit_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 240)
    assert decode(encoded(Image.fromarray(photograph(12, 20)), "PNG")).size == (20, 12)
    with pytest.raises(NotAnImage, match="21×12 pixels"):
        decode(encoded(Image.fromarray(photograph(12, 21)), "PNG"))


WHOLE = {
    format: encoded(Image.fromarray(photograph(24, 24)), format, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    for format in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
}


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from(sorted(WHOLE)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.floats(0.2, 1),
    early=st.booleans(),
)
def test_a_damaged_file_is_a_picture_or_a_clear_error_and_nothing_else(
    format: str, changes: list[tuple[float, int]], keep: float, early: bool
) -> None:
    content = bytearray(WHOLE[format])
    for place, value in changes:
        content[int(place * (min(64, len(content)) if early else len(content)))] = value
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(NotAnImage):
        patch.setattr(module, "MOST_PIXELS", 1_000_000)  # damage may make a small picture a large one
        assert decode(bytes(content[: int(len(content) * keep) + 1])).mode in ("L", "RGB")


def test_damage_to_metadata_alone_does_not_cost_the_picture() -> None:
    for exif in (
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff",
        b"nonsense",
    ):
        picture = decode(encoded(Image.fromarray(photograph()), "PNG", exif=exif))
        assert np.array_equal(np.asarray(picture), photograph())


def lay_out(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_hidden_files_folders_and_checkpoints_are_passed_over_and_the_order_is_stable(tmp_path: Path) -> None:
    seen = ["a/2.JPG", "a/b/deep.tiff", "b.png", "c d/ünï códe 猫.webp", "z.Gif"]
    unseen = [
        ".hidden.png",
        ".git/x.png",
        "a/.ipynb_checkpoints/2-checkpoint.jpg",
        "__MACOSX/._2.jpg",
        "a/notes.txt",
        "a/jpg",
        "labels.csv",
    ]
    lay_out(tmp_path, *reversed(seen), *unseen)
    (tmp_path / "folder.png").mkdir()
    found = image_files([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == seen
    assert image_files([tmp_path]) == found


def test_a_hidden_folder_that_was_asked_for_is_searched(tmp_path: Path) -> None:
    lay_out(tmp_path, ".cache/photos/a.png")
    assert image_files([tmp_path / ".cache"]) == [tmp_path / ".cache/photos/a.png"]


def test_files_are_taken_as_given_whatever_they_are_called(tmp_path: Path) -> None:
    lay_out(tmp_path, "folder/1.png", "folder/0.png", "photo.unknown")
    given_paths = [tmp_path / "photo.unknown", tmp_path / "missing.png", tmp_path / "folder", tmp_path / "folder/1.png"]
    assert [path.name for path in image_files(given_paths)] == [
        "photo.unknown",
        "missing.png",
        "0.png",
        "1.png",
        "1.png",
    ]


def test_names_with_unicode_and_spaces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mein Foto – 猫 (1).png"
    Image.fromarray(photograph()).save(file)
    assert decode(file).size == (20, 12)


def test_what_telephones_write_and_addresses_are_called_what_they_are(tmp_path: Path) -> None:
    heic = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"
    (tmp_path / "IMG_1.jpg").write_bytes(heic)
    for source in (heic, tmp_path / "IMG_1.jpg"):
        with pytest.raises(NotAnImage, match="HEIC, AVIF or a film, not an image that vitral reads; save it as JPEG"):
            decode(source)
    for source in ("https://example.org/a.jpg", Path("https://example.org/a.jpg")):
        with pytest.raises(NotAnImage, match=r"example\.org/a\.jpg: an address, not a file"):
            decode(source)


def test_a_folder_without_images_among_others_is_told_and_alone_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "full" / "a.png")
    empty, full = tmp_path / "empty", tmp_path / "full"
    assert image_files([full, empty, full / "a.png"]) == [full / "a.png", empty, full / "a.png"]
    assert image_files([empty]) == image_files([empty, empty]) == []
    with pytest.raises(NotAnImage, match="empty: a folder without images"):
        decode(empty)
    with pytest.raises(NotAnImage, match="full: a folder, not an image"):
        decode(full)
