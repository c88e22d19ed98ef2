"""Images with any number of channels, 16-bit and float images: decoded exactly, converted never silently."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vitral.data import decode, npy
from vitral.data.augment import AugmentConfig
from vitral.data.decode import ImageDecodeError, ImageTooLargeError, decode_native, decode_pixels, read_format
from vitral.data.lazy_images import ConcatImages
from vitral.data.pixels import ChannelImage, PixelFormat, channel_axis, display_note, display_pixels
from vitral.data.preprocess import Preprocessing, channel_stats, to_model_input
from vitral.errors import VitralError

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def random_pixels(*shape: int, dtype: str = "uint16") -> Array:
    if dtype == "float32":
        return RNG.normal(5, 100, shape).astype(np.float32)
    return RNG.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def make_preprocessing(
    channels: int, dtype: Any = "uint16", size: tuple[int, int] = (6, 8), **fields: Any
) -> Preprocessing:
    half = (0.5,) * channels
    return Preprocessing(image_size=size, channels=channels, dtype=dtype, **{"mean": half, "std": half, **fields})


def tiff(pixels_CHW: Array, kind: str, **options: Any) -> bytes:
    """C channels as pages, as interleaved samples or as planes."""
    content = io.BytesIO()
    if kind == "pages":
        with tifffile.TiffWriter(content, **options) as writer:
            for page in pixels_CHW:
                writer.write(page, photometric="minisblack", contiguous=False)
    else:
        pixels = pixels_CHW if kind == "planes" else np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))
        config = "separate" if kind == "planes" else "contig"
        tifffile.imwrite(content, pixels, photometric="minisblack", planarconfig=config, **options)
    return content.getvalue()


def png16(pixels_HWC: Array) -> bytes:
    """A 16-bit PNG as the specification describes it, with the filter "Sub" in every second row."""
    H, W, C = pixels_HWC.shape
    rows = []
    for y, row in enumerate(pixels_HWC.astype(">u2")):
        values = np.frombuffer(row.tobytes(), dtype=np.uint8).reshape(W, 2 * C)
        left = np.concatenate([np.zeros((1, 2 * C), np.uint8), values[:-1]])
        rows.append(bytes([1]) + (values - left).tobytes() if y % 2 else bytes([0]) + values.tobytes())

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", W, H, 16, {1: 0, 2: 4, 3: 2, 4: 6}[C], 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def to_npy(array: Array) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("kind", ["pages", "samples", "planes"])
def test_5_channel_tiff_round_trips_exactly(tmp_path: Path, kind: str, dtype: Any) -> None:
    pixels = random_pixels(5, 6, 8, dtype=dtype)
    for options in ({}, {"bigtiff": True}, {"byteorder": ">"}):
        content = tiff(pixels, kind, **options)
        (tmp_path / "a.tif").write_bytes(content)
        assert read_format(content)[:4] == (8, 6, 5, dtype)
        for source in (content, tmp_path / "a.tif"):
            image = decode_native(source)
            assert isinstance(image, ChannelImage)
            assert image.dtype == dtype
            assert np.array_equal(image.pixels, pixels)
            assert np.array_equal(make_preprocessing(5, dtype).load(source).numpy(), pixels)


def test_pages_that_pillow_compresses_and_previews_are_read() -> None:
    pixels, content = random_pixels(5, 6, 8), io.BytesIO()
    pages = [Image.fromarray(page) for page in pixels]
    pages[0].save(content, "TIFF", save_all=True, append_images=pages[1:], compression="tiff_lzw")
    assert np.array_equal(decode_native(content.getvalue()).pixels, pixels)  # type: ignore[union-attr]
    with tifffile.TiffWriter(content := io.BytesIO()) as writer:
        for page in pixels:
            writer.write(page, photometric="minisblack", contiguous=False)
        writer.write(pixels[0, ::2, ::2], photometric="minisblack", subfiletype=1)
    assert read_format(content.getvalue()).channels == 5


def test_orientation_of_a_tiff_is_applied_to_all_channels() -> None:
    pixels = random_pixels(5, 6, 8)
    content = tiff(pixels, "samples", extratags=[(274, "H", 1, 6, True)])
    assert read_format(content)[:2] == (6, 8)
    assert np.array_equal(decode_native(content).pixels, np.rot90(pixels, -1, (1, 2)))  # type: ignore[union-attr]


def test_channel_names_of_ome_tiff_are_read_and_a_swapped_order_is_an_error() -> None:
    content = io.BytesIO()
    metadata = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP", "RFP"]}}
    tifffile.imwrite(content, random_pixels(3, 6, 8), ome=True, metadata=metadata)
    assert read_format(content.getvalue()).names == ("DAPI", "GFP", "RFP")
    swapped = PixelFormat(3, "uint16", names=("GFP", "DAPI", "RFP"))
    with pytest.raises(ImageDecodeError, match="channels are DAPI, GFP, RFP; the model expects GFP, DAPI, RFP"):
        decode_pixels(content.getvalue(), swapped)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bit_png_keeps_all_bits(channels: int) -> None:
    pixels = random_pixels(7, 9, channels)
    if channels in (2, 4):
        pixels[..., -1] = 65535  # opaque
    image = decode_native(png16(pixels))
    assert isinstance(image, ChannelImage)
    colours = pixels if channels in (1, 3) else pixels[..., :-1]
    assert np.array_equal(image.pixels, colours.transpose(2, 0, 1))
    assert read_format(png16(pixels))[2:4] == (colours.shape[2], "uint16")


def test_alpha_is_composited_over_white_unless_the_model_has_four_channels() -> None:
    pixels = random_pixels(7, 9, 4)
    raw = decode_pixels(png16(pixels), PixelFormat(4, "uint16"))
    assert np.array_equal(raw.pixels, pixels.transpose(2, 0, 1))  # type: ignore[union-attr]
    alpha = pixels[..., 3:] / 65535
    over_white = (pixels[..., :3] * alpha + 65535 * (1 - alpha)).transpose(2, 0, 1)
    assert np.abs(decode_pixels(png16(pixels), PixelFormat(3, "uint16")).pixels - over_white).max() <= 0.5  # type: ignore[union-attr]
    content = io.BytesIO()
    rgba = random_pixels(7, 9, 4, dtype="uint8")
    Image.fromarray(rgba).save(content, "PNG")
    kept = decode_pixels(content.getvalue(), PixelFormat(4))
    assert np.array_equal(kept.pixels, rgba.transpose(2, 0, 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_npy_may_be_channels_first_or_last(dtype: Any) -> None:
    pixels = random_pixels(5, 16, 18, dtype=dtype)
    for array in (pixels, pixels.transpose(1, 2, 0), np.asfortranarray(pixels)):
        assert np.array_equal(decode_native(to_npy(array)).pixels, pixels)  # type: ignore[union-attr]
    assert np.array_equal(decode_native(to_npy(pixels[0])).pixels, pixels[:1])  # type: ignore[union-attr]


def test_other_number_types_in_npy_keep_their_values() -> None:
    for dtype in ("int16", "int32", "float16", "float64", ">u2"):
        values = (np.arange(96) - (0 if dtype == ">u2" else 50)).reshape(2, 6, 8).astype(dtype)
        image = decode_native(to_npy(values), PixelFormat(2))
        assert image.dtype == ("uint16" if dtype == ">u2" else "float32")  # type: ignore[union-attr]
        assert np.array_equal(image.pixels, values)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shape", "channels", "axis"),
    [
        ((5, 64, 64), None, 0),
        ((64, 64, 5), None, 2),
        ((64, 64), None, None),
        ((5, 9, 7), 5, 0),
        ((9, 5, 7), 7, 2),
    ],
)
def test_the_channel_axis_is_the_short_one_or_that_of_the_model(shape: Any, channels: Any, axis: int | None) -> None:
    assert channel_axis(shape, "a.npy", channels) == axis


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((32, 32, 32), None), ((224, 224, 300), None), ((100, 200, 150), None), ((20, 30, 25), None), ((5, 64, 5), 5)],
)
def test_ambiguous_shapes_are_refused_unless_the_layout_is_given(shape: Any, channels: int | None) -> None:
    with pytest.raises(ImageDecodeError, match="ambiguous") as caught:
        channel_axis(shape, "a.npy", channels)
    assert "--data.layout chw" in caught.value.hint
    assert channel_axis(shape, "a.npy", channels, "chw") == 0
    assert channel_axis(shape, "a.npy", channels, "hwc") == 2


def test_faulty_files_are_errors_before_memory_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tiff(random_pixels(5, 64, 64), "samples", compression="deflate")
    for kept in (3, 9, 200, len(good) // 2, len(good) - 20):
        with pytest.raises(ImageDecodeError):
            decode_native(good[:kept])
    looped = tiff(random_pixels(2, 6, 8), "pages")
    first_page = struct.unpack("<I", looped[4:8])[0]
    num_tags = struct.unpack("<H", looped[first_page : first_page + 2])[0]
    next_page = first_page + 2 + 12 * num_tags
    with pytest.raises(ImageDecodeError, match="loop"):
        decode_native(looped[:next_page] + struct.pack("<I", first_page) + looped[next_page + 4 :])
    with pytest.raises(ImageDecodeError, match="Python objects"):
        decode_native(to_npy(np.array([[{}]], dtype=object)))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (5, 10**6, 10**6)})
    with pytest.raises(ImageTooLargeError, match="10,000,000,000,000 bytes"):
        decode_native(header.getvalue())
    with pytest.raises(ImageDecodeError, match="truncated, 300 of 640 bytes"):
        decode_native(to_npy(random_pixels(5, 8, 8))[: 128 + 300])
    with pytest.raises(ImageDecodeError):  # NumPy limits the header
        decode_native(b"\x93NUMPY\x01\x00\xff\xff" + b"{" * 65535)
    for module, name in ((decode, "MAX_BYTES"), (npy, "MAX_BYTES")):
        monkeypatch.setattr(module, name, 1000)
    for content in (tiff(random_pixels(5, 16, 16), "planes"), to_npy(random_pixels(5, 16, 16))):
        with pytest.raises(ImageTooLargeError):
            decode_native(content)


def test_values_that_are_not_pixels_are_refused() -> None:
    with pytest.raises(ImageDecodeError, match="NaN"):
        decode_native(to_npy(np.full((2, 6, 8), np.nan, np.float32)), PixelFormat(2, "float32"))
    with pytest.raises(ImageDecodeError, match="complex64 are not pixels"):
        decode_native(to_npy(np.zeros((2, 6, 8), np.complex64)), PixelFormat(2))


def test_channels_and_types_are_never_converted_silently(tmp_path: Path) -> None:
    Image.fromarray(random_pixels(6, 8, 3, dtype="uint8")).save(tmp_path / "rgb.png")
    (tmp_path / "five.tif").write_bytes(tiff(random_pixels(5, 6, 8), "pages"))
    (tmp_path / "three.npy").write_bytes(to_npy(random_pixels(3, 6, 8)))
    for file, pixel_format, message in (
        ("rgb.png", PixelFormat(5), "3 channels; the model expects 5"),
        ("rgb.png", PixelFormat(3, "uint16"), "8-bit values; the model expects 16-bit values"),
        ("five.tif", PixelFormat(3), "5 channels; the model expects 3"),
        ("five.tif", PixelFormat(5), "16-bit values; the model expects 8-bit values"),
        ("three.npy", PixelFormat(3), "16-bit values; the model expects 8-bit values"),
        ("three.npy", PixelFormat(1, "uint16"), "3 channels; the model expects 1"),
    ):
        with pytest.raises(ImageDecodeError, match=f"{file}: {message}"):
            decode_pixels(tmp_path / file, pixel_format)


def test_three_8_bit_pages_or_an_8_bit_array_are_an_rgb_image() -> None:
    pixels = random_pixels(3, 16, 18, dtype="uint8")
    for content in (tiff(pixels, "pages"), tiff(pixels, "planes"), to_npy(pixels), to_npy(pixels.transpose(1, 2, 0))):
        image = decode_pixels(content, PixelFormat(3))
        assert isinstance(image, Image.Image)
        assert np.array_equal(np.asarray(image), pixels.transpose(1, 2, 0))


def test_16_bit_values_survive_to_the_normalised_input() -> None:
    pixels, mean, std = random_pixels(5, 6, 8), (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1)
    preprocessing = make_preprocessing(5, mean=mean, std=std)
    loaded = preprocessing.load(tiff(pixels, "pages"))
    assert loaded.dtype == torch.uint16
    normalised = AugmentConfig().transform(loaded[None], torch.Generator())
    normalised = preprocessing.normalise(normalised)
    scale = np.float32(65535)
    mean_C, std_C = (np.array(v, np.float32)[:, None, None] * scale for v in (mean, std))
    assert np.array_equal(normalised[0].numpy(), (pixels.astype(np.float32) - mean_C) / std_C)


def test_float_values_are_normalised_as_they_are() -> None:
    pixels = random_pixels(2, 6, 8, dtype="float32")
    preprocessing = make_preprocessing(2, "float32", mean=(5.0, 6.0), std=(100.0, 50.0))
    normalised = preprocessing.normalise(preprocessing.load(pixels)[None])[0].numpy()
    expected = (pixels - np.array([5, 6], np.float32)[:, None, None]) / np.array([100, 50], np.float32)[:, None, None]
    assert np.array_equal(normalised, expected)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_statistics_are_those_of_numpy(dtype: Any) -> None:
    pixels = random_pixels(40, 5, 6, 8, dtype=dtype)
    pixels[:, 4] = pixels[0, 4, 0, 0] // 16 if dtype == "uint16" else 3.5
    values = pixels.astype(np.float64) / (65535 if dtype == "uint16" else 1)
    mean, std = channel_stats(torch.from_numpy(pixels))
    assert np.allclose(mean, values.mean(axis=(0, 2, 3)), rtol=1e-5)
    assert np.allclose(std[:4], values.std(axis=(0, 2, 3))[:4], rtol=1e-5)
    assert std[4] > 0, "a constant channel must not be divided by zero"


def test_resizing_8_bit_channels_equals_resizing_them_as_rgb() -> None:
    photo = Image.fromarray(random_pixels(40, 60, 3, dtype="uint8"))
    rgb = make_preprocessing(3, "uint8", (16, 16), crop=0.9).load(photo)
    repeated = np.concatenate([np.asarray(photo).transpose(2, 0, 1)] * 2)
    assert torch.equal(make_preprocessing(6, "uint8", (16, 16), crop=0.9).load(repeated), torch.cat([rgb, rgb]))


def test_resizing_16_bit_channels_rounds_once() -> None:
    pixels = random_pixels(5, 40, 60)
    small = make_preprocessing(5, size=(10, 15)).load(pixels).numpy()
    channels = [Image.fromarray(channel.astype(np.float32)) for channel in pixels]
    exact = np.stack([np.asarray(channel.resize((15, 10), Image.Resampling.BILINEAR)) for channel in channels])
    assert np.abs(small - exact).max() <= 0.51
    tensor = to_model_input(torch.from_numpy(pixels)[None], make_preprocessing(5, size=(10, 15)))
    assert tensor.dtype == torch.uint16
    assert np.abs(tensor[0].int().numpy() - small.astype(int)).max() <= 1


def test_images_in_memory_of_another_type_are_refused() -> None:
    with pytest.raises(VitralError, match="expected images of type uint16, got uint8"):
        to_model_input(torch.zeros(1, 5, 6, 8, dtype=torch.uint8), make_preprocessing(5))


def test_geometric_augmentation_of_16_bit_channels_moves_the_exact_values() -> None:
    images = torch.from_numpy(random_pixels(8, 5, 6, 8))
    moved = AugmentConfig(flip=True).transform(images, torch.Generator().manual_seed(0))
    flipped = [torch.equal(after, before.float().flip(2)) for before, after in zip(images, moved, strict=True)]
    same = [torch.equal(after, before.float()) for before, after in zip(images, moved, strict=True)]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert any(flipped)
    with pytest.raises(VitralError, match="got 5 channels of 16 bits"):
        AugmentConfig(jitter=0.3).transform(images, torch.Generator())


def test_concatenated_16_bit_sets_keep_their_order() -> None:
    images = torch.from_numpy(random_pixels(9, 2, 3, 3))
    rows = torch.tensor([8, 0, 4, 3, 7])
    (batch,) = ConcatImages([images[:4], images[4:]]).batches([rows])
    assert torch.equal(batch, images[rows])


def test_display_shows_the_first_channels_and_says_so() -> None:
    pixels = np.stack([np.full((2, 2), value, np.uint16) for value in (100, 199, 300, 65535)])
    assert display_pixels(pixels)[0, 0].tolist() == [0, 126, 255]
    assert display_pixels(pixels[:2]).shape == (2, 2)
    assert display_note(3, "uint8") is None
    assert display_note(5, "uint8") == "channels 1, 2 and 3 as red, green and blue of 5"
    assert display_note(2, "uint16") == "channel 1 of 2, stretched to the range of the image"
