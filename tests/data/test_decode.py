"""Image decoding: formats, orientation, colour modes, corrupt files and arrays."""

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

from vitral.data import decode
from vitral.data.decode import ImageDecodeError, ImageTooLargeError, decode_image, read_header

Array = np.ndarray[Any, Any]


def gradient(H: int = 12, W: int = 20) -> Array:
    """uint8 (H, W, 3): smooth, and different in each corner and channel."""
    y, x = np.mgrid[:H, :W]
    return np.stack([30 + 200 * x // W, 30 + 200 * y // H, 220 - 100 * x // W - 60 * y // H], axis=-1).astype(np.uint8)


def encode(image: Image.Image, format: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **settings)
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
def test_every_format_decodes_to_the_encoded_rgb(
    tmp_path: Path, format: str, settings: dict[str, Any], tolerance: int
) -> None:
    content = encode(Image.fromarray(gradient()), format, **settings)
    file = tmp_path / f"a.{format.lower()}"
    file.write_bytes(content)
    for source in (content, file, str(file)):
        image = decode_image(source)
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image).astype(int) - gradient()).max() <= tolerance


def test_grayscale_stays_grayscale() -> None:
    gray = gradient()[..., 0]
    for format in ("PNG", "BMP", "TIFF"):
        image = decode_image(encode(Image.fromarray(gray), format))
        assert image.mode == "L"
        assert np.array_equal(np.asarray(image), gray)
    assert decode_image(encode(Image.fromarray(gray), "JPEG")).mode == "L"


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation_is_decoded(format: str) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "blue", "lime")]
    image = decode_image(encode(frames[0], format, save_all=True, append_images=frames[1:]))
    red, green, blue = np.asarray(image.convert("RGB"))[3, 3]
    assert red > 250
    assert max(green, blue) < 5


def test_first_image_of_a_multi_picture_jpeg_is_decoded() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    image = decode_image(encode(frames[0], "MPO", save_all=True, append_images=frames[1:]))
    assert np.asarray(image)[8, 8, 0] > 250


# How a camera stores an upright image for each orientation (EXIF 2.3, tag 0x0112).
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
def test_every_exif_orientation_is_made_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](gradient(16, 32))))
    lossless = {"lossless": True} if format == "WEBP" else {"quality": 98} if format == "JPEG" else {}
    content = encode(stored, format, exif=exif, **lossless)
    for source in (content, Image.open(io.BytesIO(content))):
        image = decode_image(source)
        assert image.size == (32, 16)
        assert np.abs(np.asarray(image).astype(int) - gradient(16, 32)).max() <= (8 if format == "JPEG" else 0)


def test_invalid_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert np.array_equal(np.asarray(decode_image(encode(Image.fromarray(gradient()), "PNG", exif=exif))), gradient())


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_is_converted_to_rgb(format: str) -> None:
    for cmyk, rgb in (((0, 0, 0, 0), (255, 255, 255)), ((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0))):
        image = decode_image(encode(Image.new("CMYK", (8, 8), cmyk), format))
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image)[4, 4].astype(int) - rgb).max() <= 3


def test_palette_is_converted_to_rgb() -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 200, 100, 50])
    indexed.putdata([1, 0])
    for format in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.asarray(decode_image(encode(indexed, format))).tolist() == [[[200, 100, 50], [10, 20, 30]]]


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_transparent_palette_colour_becomes_white(format: str) -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 200, 100, 50])
    indexed.putdata([1, 0])
    content = encode(indexed, format, transparency=0)
    assert np.asarray(decode_image(content)).tolist() == [[[200, 100, 50], [255, 255, 255]]]


def test_translucent_palette_is_composited_over_white() -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([0, 0, 0, 200, 100, 50])
    indexed.putdata([0, 1])
    content = encode(indexed, "PNG", transparency=bytes([128, 255]))
    assert np.asarray(decode_image(content)).tolist() == [[[127, 127, 127], [200, 100, 50]]]


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_alpha_is_composited_over_white(format: str) -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128], [0, 0, 0, 51]]], dtype=np.uint8)
    lossless = {"lossless": True} if format == "WEBP" else {}
    image = decode_image(encode(Image.fromarray(rgba), format, **lossless))
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image) - expected).max() <= 1


def test_gray_with_alpha_is_composited_over_white() -> None:
    la = np.array([[[0, 255], [0, 0], [100, 128]]], dtype=np.uint8)
    image = decode_image(encode(Image.fromarray(la, "LA"), "PNG"))
    expected = [255 * (1 - a / 255) + value * a / 255 for value, a in la[0].tolist()]
    assert np.abs(np.asarray(image.convert("L"))[0] - expected).max() <= 1


def test_transparent_gray_or_rgb_value_becomes_white() -> None:
    gray = decode_image(encode(Image.fromarray(np.array([[0, 90]], dtype=np.uint8)), "PNG", transparency=90))
    assert np.asarray(gray.convert("L")).tolist() == [[0, 255]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert np.asarray(decode_image(encode(colour, "PNG", transparency=(4, 5, 6)))).tolist() == [[[1, 2, 3], [255] * 3]]


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
def test_1_bit_images_become_black_and_white(format: str) -> None:
    bits = np.array([[True, False, True], [False, False, True]])
    image = decode_image(encode(Image.fromarray(bits), format))
    assert np.asarray(image.convert("L")).tolist() == (bits * 255).tolist()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_values_are_divided_by_257(format: str) -> None:
    values = np.array([[0, 1, 128, 129, 256, 257, 32767, 32768, 65406, 65535]], dtype=np.uint16)
    image = decode_image(encode(Image.fromarray(values), format))
    assert image.mode == "L"
    assert np.asarray(image).tolist() == np.round(values / 257).astype(int).tolist()


def test_dark_16_bit_image_stays_dark() -> None:
    image = decode_image(encode(Image.fromarray(np.full((2, 2), 200, dtype=np.uint16)), "PNG"))
    assert np.asarray(image).max() == 1


@pytest.mark.parametrize(
    ("values", "max_value"),
    [
        (np.array([[0, 10, 255]], dtype=np.int32), 255),
        (np.array([[0, 1000, 65535]], dtype=np.int32), 65535),
        (np.array([[0.0, 0.25, 1.0]], dtype=np.float32), 1),
        (np.array([[0.0, 100.5, 255.0]], dtype=np.float32), 255),
        (np.array([[0.0, 3000.0, 65535.0]], dtype=np.float32), 65535),
    ],
)
def test_32_bit_integers_and_floats_are_scaled_by_their_range(values: Array, max_value: float) -> None:
    image = decode_image(encode(Image.fromarray(values), "TIFF"))
    assert image.mode == "L"
    assert np.abs(np.asarray(image) - values / max_value * 255).max() <= 0.5


def test_non_finite_pixels_become_black() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.0, -3.0]], dtype=np.float32)
    assert np.asarray(decode_image(encode(Image.fromarray(values), "TIFF"))).tolist() == [[0, 0, 0, 128, 255, 0]]


def test_pillow_image_is_converted_and_left_unchanged() -> None:
    rgba = Image.new("RGBA", (3, 3), (0, 0, 0, 0))
    assert np.asarray(decode_image(rgba)).min() == 255
    assert rgba.mode == "RGBA"
    assert np.asarray(decode_image(Image.fromarray(np.full((2, 2), 32768, dtype=np.uint16)))).max() == 128


def test_truncated_pillow_image_is_an_error() -> None:
    content = encode(Image.fromarray(gradient(64, 64)), "PNG")
    with pytest.raises(ImageDecodeError, match="the image: corrupt"):
        decode_image(Image.open(io.BytesIO(content[: len(content) // 2])))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_truncated_file_is_an_error_with_its_name(tmp_path: Path, format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = tmp_path / "half.img"
    content = encode(Image.fromarray(noise), format)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageDecodeError, match=r"half\.img: (corrupt or truncated|not an image)"):
        decode_image(file)


@pytest.mark.parametrize("content", [b"", b"hello, this is a text\n" * 20, b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_other_content_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "text.png"
    file.write_bytes(content)
    for source, name in ((file, "text.png"), (str(file), "text.png"), (content, "the image")):
        reason = "(not an image|corrupt)" if content else "empty file"
        with pytest.raises(ImageDecodeError, match=f"{name}: {reason}") as caught:
            decode_image(source)
        assert "\n" not in caught.value.what


def test_formats_that_start_external_programs_are_not_decoded() -> None:
    postscript = encode(Image.new("RGB", (4, 4)), "EPS")
    with pytest.raises(ImageDecodeError, match="not an image"):
        decode_image(postscript)


def test_folder_and_missing_file_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ImageDecodeError, match="a folder without images"):
        decode_image(tmp_path)
    with pytest.raises(ImageDecodeError, match="no such file"):
        decode_image(tmp_path / "gone.png")
    with pytest.raises(ImageDecodeError):
        decode_image("with\0null.png")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "locked.png"
    file.write_bytes(encode(Image.new("L", (2, 2)), "PNG"))
    file.chmod(0)
    with pytest.raises(ImageDecodeError, match="permission denied"):
        decode_image(file)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes with a false size in its header."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [11_000, 30_000])
def test_decompression_bomb_is_rejected_before_decoding(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageTooLargeError, match="more than the limit of 100 megapixels"):
        decode_image(bomb(side, side))


def test_images_up_to_the_pixel_limit_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 240)
    assert decode_image(encode(Image.fromarray(gradient(12, 20)), "PNG")).size == (20, 12)
    with pytest.raises(ImageDecodeError, match="21×12 pixels"):
        decode_image(encode(Image.fromarray(gradient(12, 21)), "PNG"))


INTACT = {
    format: encode(Image.fromarray(gradient(24, 24)), format, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    for format in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
}


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from(sorted(INTACT)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.floats(0.2, 1),
    early=st.booleans(),
)
def test_corrupt_file_decodes_or_raises_image_decode_error(
    format: str, changes: list[tuple[float, int]], keep: float, early: bool
) -> None:
    content = bytearray(INTACT[format])
    for position, value in changes:
        content[int(position * (min(64, len(content)) if early else len(content)))] = value
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImageDecodeError):
        patch.setattr(decode, "MAX_PIXELS", 1_000_000)  # a corrupt header may claim any size
        assert decode_image(bytes(content[: int(len(content) * keep) + 1])).mode in ("L", "RGB")


def test_corrupt_metadata_does_not_prevent_decoding() -> None:
    for exif in (
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff",
        b"nonsense",
    ):
        image = decode_image(encode(Image.fromarray(gradient()), "PNG", exif=exif))
        assert np.array_equal(np.asarray(image), gradient())


def test_path_may_contain_unicode_and_spaces(tmp_path: Path) -> None:
    file = tmp_path / "mein Foto – 猫 (1).png"
    Image.fromarray(gradient()).save(file)
    assert decode_image(file).size == (20, 12)


def test_heic_files_and_urls_have_specific_errors(tmp_path: Path) -> None:
    heic = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"
    (tmp_path / "IMG_1.jpg").write_bytes(heic)
    for source in (heic, tmp_path / "IMG_1.jpg"):
        with pytest.raises(ImageDecodeError, match="HEIC, AVIF or video, which is not supported"):
            decode_image(source)
    for url in ("https://example.org/a.jpg", Path("https://example.org/a.jpg")):
        with pytest.raises(ImageDecodeError, match=r"example\.org/a\.jpg: a URL, not a file"):
            decode_image(url)


def test_folder_is_an_error(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    Image.new("L", (4, 4)).save(full / "a.png")
    with pytest.raises(ImageDecodeError, match="empty: a folder without images"):
        decode_image(empty)
    with pytest.raises(ImageDecodeError, match="full: a folder, not an image"):
        decode_image(full)


def test_named_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for read in (decode_image, read_header):
        with pytest.raises(ImageDecodeError, match=r"pipe\.jpg: a named pipe, not a file"):
            read(tmp_path / "pipe.jpg")


def test_dangling_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to("gone.jpg")
    with pytest.raises(ImageDecodeError, match=r"a\.jpg: dangling link to gone\.jpg"):
        decode_image(tmp_path / "a.jpg")


def test_reduced_decoding_has_the_same_pixel_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode(Image.fromarray(gradient(400, 640)), "JPEG")
    monkeypatch.setattr(decode, "MAX_PIXELS", 640 * 400 - 1)
    for reduced in (False, True):
        with pytest.raises(ImageTooLargeError, match="640×400 pixels"):
            decode_image(content, min_size=(40, 60), allow_reduced_jpeg=reduced)


def test_header_is_read_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode(Image.new("L", (20, 12)), "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert read_header(content) == (20, 12, "L", 1)
    assert read_header(bomb(11_000, 11_000))[:2] == (11_000, 11_000)
    with pytest.raises(ImageTooLargeError):
        read_header(bomb(30_000, 30_000))
    with pytest.raises(ImageDecodeError, match="not an image"):
        read_header(b"text")


def test_large_jpeg_may_be_decoded_at_reduced_size() -> None:
    content = encode(Image.fromarray(gradient(400, 640)), "JPEG", quality=98)
    assert decode_image(content, min_size=(40, 60)).size == (640, 400)
    reduced = decode_image(content, min_size=(40, 60), allow_reduced_jpeg=True)
    assert 60 <= min(reduced.size) < 400
    assert decode_image(content, min_size=(300, 300), allow_reduced_jpeg=True).size == (640, 400)


def test_errors_use_the_given_name() -> None:
    with pytest.raises(ImageDecodeError, match=r"a\.tar at byte 512: not an image"):
        decode_image(b"text", name="a.tar at byte 512")
