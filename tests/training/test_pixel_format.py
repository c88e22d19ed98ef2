"""Training on images with other channels than RGB, from files to predictions; nothing is converted silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import vitral
from support.common import skip_figures
from vitral import weights
from vitral.api import export
from vitral.data.files.fingerprints import fingerprint_files
from vitral.data.files.location import ImageLocation
from vitral.data.pixels import PixelFormat
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.onnx_runtime import OnnxModel
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.runs.model_io import ModelConfig
from vitral.serve.limits import Limits
from vitral.serve.request_parsing import ImageError, Upload, decode_upload
from vitral.training.pixel_format import with_pixel_format
from vitral.training.setup import resolve_recipe, setup_training

Array = np.ndarray[Any, Any]
TINY: dict[str, Any] = {
    "model.image_size": (16, 16), "model.patch_size": 8, "model.width": 16, "model.depth": 1, "model.heads": 2,
    "batch_size": 8, "precision": "fp32", "threads": 1, "data.crop": 1.0,
}  # fmt: skip
SaveFn = Callable[[Path, Array], None]


def make_pixels(label: int, index: int, channels: int = 5) -> Array:
    """12-bit values in 16 bits, as cameras write them; channel 4 depends on the class."""
    pixels = np.random.default_rng(index).integers(0, 4096, (channels, 16, 16), dtype=np.uint16)
    pixels[min(3, channels - 1)] = pixels[min(3, channels - 1)] // 4 + 3000 * label
    return pixels


def save_pages(path: Path, pixels_CHW: Array) -> None:
    with tifffile.TiffWriter(path.with_suffix(".tif")) as writer:
        for page in pixels_CHW:
            writer.write(page, photometric="minisblack", contiguous=False)


def save_npy(path: Path, pixels_CHW: Array) -> None:
    np.save(path.with_suffix(".npy"), pixels_CHW.transpose(1, 2, 0))


def save_png(path: Path, pixels_HW: Array) -> None:
    Image.fromarray(pixels_HW).save(path.with_suffix(".png"))


def save_folder(root: Path, save: SaveFn = save_pages, count: int = 12, channels: int = 5) -> Path:
    for label, name in enumerate(("dry", "wet")):
        (root / name).mkdir(parents=True)
        for index in range(count):
            save(root / name / f"{index:02}", make_pixels(label, 100 * label + index, channels))
    return root


def prepare(data: Path | str, **overrides: Any) -> Any:
    recipe = resolve_recipe(str(data), "folder-scratch").with_overrides({**TINY, **overrides})
    return setup_training(recipe)


def test_folder_of_16_bit_tiff_is_trained_and_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    data = save_folder(tmp_path / "fields")
    model = vitral.train(str(data), epochs=4, out=tmp_path / "run", **TINY)
    preprocessing = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["preprocessing"]
    assert (preprocessing["channels"], preprocessing["dtype"]) == (5, "uint16")
    assert model.predict(data / "wet" / "00.tif").best.name == "wet"
    array = make_pixels(1, 100)
    assert model.predict(array).best == model.predict(data / "wet" / "00.tif").best
    assert [each.best for each in model.predict(array[None])] == [model.predict(array).best]
    Image.new("RGB", (16, 16)).save(tmp_path / "rgb.png")
    with pytest.raises(VitralError, match=r"rgb\.png: 3 channels; the model expects 5"):
        model.predict(tmp_path / "rgb.png")
    assert 'dtype = "uint16"' in (tmp_path / "run" / "recipe.toml").read_text()


@pytest.mark.slow
def test_reports_explanations_and_exports_of_16_bit_channels(tmp_path: Path) -> None:
    data = save_folder(tmp_path / "fields")
    model = vitral.train(str(data), epochs=2, out=tmp_path / "run", **TINY)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "channels 1, 2 and 3 as red, green and blue of 5, stretched" in report
    assert model.explain(data / "wet" / "00.tif").image.size == (16, 16)
    example = tmp_path / "run" / "figures" / "example.npy"
    assert model.predict(example).best.name in model.classes
    np.save(tmp_path / "larger.npy", make_pixels(1, 5).repeat(3, axis=1).repeat(2, axis=2))
    for preprocessing in (False, True):
        file = tmp_path / f"{preprocessing}.onnx"
        export(tmp_path / "run", out=file, preprocessing=preprocessing, images=24)
        onnx = OnnxModel(file)
        assert onnx.session.get_inputs()[0].type == "tensor(uint16)"
        for image in (example, data / "wet" / "00.tif", tmp_path / "larger.npy"):
            expected = model.predict(image).best
            assert onnx.predict(image).best.name == expected.name
            assert onnx.predict(image).best.probability == pytest.approx(expected.probability, abs=2e-3)


def test_statistics_are_those_of_the_training_files_and_all_readers_agree(tmp_path: Path) -> None:
    tiff = prepare(save_folder(tmp_path / "tiff"))
    npy = prepare(save_folder(tmp_path / "npy", save_npy))
    streamed = prepare(tmp_path / "tiff", **{"data.pack": 0.0})
    items = [(make_pixels(label, 100 * label + index), label) for label in (0, 1) for index in range(12)]
    sequence = setup_training(resolve_recipe("photos", "folder-scratch").with_overrides(TINY), items=items)
    pixels = tiff.dataset.train.images
    assert pixels.dtype == torch.uint16
    values = pixels.numpy().astype(np.float64) / 65535
    assert np.allclose(tiff.preprocessing.mean, values.mean(axis=(0, 2, 3)), rtol=1e-5)
    assert np.allclose(tiff.preprocessing.std, values.std(axis=(0, 2, 3)), rtol=1e-5)
    expected = {make_pixels(label, 100 * label + index).tobytes() for label in (0, 1) for index in range(12)}
    for each in (tiff, npy, streamed, sequence):
        read = [image for split in (each.dataset.train, each.dataset.validation) for image in split.images[:]]
        assert {image.numpy().tobytes() for image in read} == expected
        assert each.preprocessing.dtype == "uint16"


def test_float_arrays_are_used_as_they_are(tmp_path: Path) -> None:
    data = save_folder(tmp_path / "heights", lambda path, pixels: save_npy(path, pixels / 100 - 20))
    trained = prepare(data)
    images = trained.dataset.train.images
    assert images.dtype == torch.float32
    assert np.allclose(trained.preprocessing.mean, images.double().mean(dim=(0, 2, 3)), rtol=1e-4)


def test_mixed_channels_and_types_are_errors_that_name_the_files(tmp_path: Path) -> None:
    data = save_folder(tmp_path / "fields")
    save_pages(data / "wet" / "odd", make_pixels(1, 500, channels=4))
    with pytest.raises(VitralError, match=r"24 files with 5 channels, 16-bit .*; 1 file with 4 .*odd.tif") as caught:
        prepare(data)
    assert "--exclude" in caught.value.hint
    (data / "wet" / "odd.tif").unlink()
    Image.new("RGB", (16, 16)).save(data / "wet" / "rgb.png")
    with pytest.raises(VitralError, match=r"1 file with 8-bit grey or RGB \(rgb.png\)"):
        prepare(data)


def test_16_bit_files_among_photographs_are_converted_and_named(tmp_path: Path) -> None:
    data = save_folder(tmp_path / "scans", lambda path, pixels: save_png(path, (pixels[0] // 16).astype(np.uint8)))
    Image.fromarray(make_pixels(0, 7)[0]).save(data / "dry" / "deep.png")
    trained = prepare(data)
    assert trained.preprocessing.dtype == "uint8"
    assert trained.notes[0].startswith("1 of 25 files has more than 8 bits")
    assert "deep.png" in trained.notes[0]
    kept = prepare(save_folder(tmp_path / "deep", lambda path, pixels: save_png(path, pixels[0])))
    assert (kept.preprocessing.dtype, kept.preprocessing.channels) == ("uint16", 1)
    converted = prepare(tmp_path / "deep", **{"data.dtype": "uint8"})
    assert (converted.preprocessing.dtype, converted.preprocessing.channels) == ("uint8", 3)


def test_fine_tuning_measures_statistics_inflates_the_projection_and_says_so(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    model = ViT(config)
    weights.write((model, model_config), tmp_path / "rgb.safetensors", to="timm")
    recipe = resolve_recipe(str(save_folder(tmp_path / "fields")), None, str(tmp_path / "rgb.safetensors"))
    trained = setup_training(recipe.with_overrides({"augment.jitter": 0.3}))
    assert trained.preprocessing.mean[0] == pytest.approx(2047 / 65535, rel=0.05)
    images = trained.preprocessing.normalise(trained.dataset.train.images[:])
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.05
    photo_std = 0.226 / 0.5  # of ImageNet's photographs for a checkpoint that divides by 0.5
    assert images.std(dim=(0, 2, 3)).tolist() == pytest.approx([photo_std] * 5, rel=0.05)
    kernels = model.patch_embedding.project.weight.unflatten(1, (3, -1))
    assert trained.initial_weights is not None
    inflated = trained.initial_weights["patch_embedding.project.weight"].unflatten(1, (5, -1))
    assert torch.allclose(inflated, kernels[:, [0, 1, 2, 0, 1]] * 0.6)
    notes = "\n".join(trained.notes)
    for text in (
        "images with 5 channels, 16-bit",
        "mean and standard deviation are measured",
        "jitter) is off",
        "patch kernels adapted from 3 to 5 channels: repeated and scaled by 3/5",
    ):
        assert text in notes


def test_channels_that_contradict_the_recipe_are_errors_with_both_numbers() -> None:
    recipe = get_recipe("folder-scratch").with_overrides({"model.channels": 4})
    with pytest.raises(VitralError, match="images have 5 channels; the recipe's model expects 4"):
        with_pixel_format(recipe, PixelFormat(5, "uint16"))
    named = get_recipe("folder-scratch").with_overrides({"data.channel_names": ("red", "nir")})
    with pytest.raises(VitralError, match="2 names; the images have 5 channels"):
        with_pixel_format(named, PixelFormat(5, "uint16"))
    adapted, notes = with_pixel_format(get_recipe("folder-scratch"), PixelFormat(2, "uint8", names=("red", "nir")))
    assert adapted.data.channel_names == ("red", "nir")
    assert notes[0] == "images with 2 channels, 8-bit: red, nir"


def test_photographs_leave_the_recipe_as_it_is() -> None:
    recipe = get_recipe("folder-scratch")
    adapted, notes = with_pixel_format(recipe, PixelFormat(3))
    assert adapted == recipe.with_overrides({"data.dtype": "uint8"})
    assert notes == ()


def test_a_packed_folder_keeps_16_bits(tmp_path: Path) -> None:
    from vitral.training.setup import pack_dataset

    recipe = resolve_recipe(str(save_folder(tmp_path / "fields")), "folder-scratch").with_overrides(TINY)
    pack, packed = pack_dataset(recipe, tmp_path / "pack")
    trained = prepare(pack)
    assert trained.preprocessing.dtype == "uint16"
    assert torch.equal(trained.dataset.train.images[:], packed.train.images[:])


def test_a_copy_in_another_file_format_has_the_same_fingerprint(tmp_path: Path) -> None:
    for index, save in enumerate((save_pages, save_npy, save_pages)):
        save(tmp_path / f"{index}", make_pixels(0, index // 2))
    files = [tmp_path / "0.tif", tmp_path / "1.npy", tmp_path / "2.tif"]
    hashes = fingerprint_files([ImageLocation(str(file)) for file in files]).pixel_hashes
    assert hashes[0] == hashes[1] != hashes[2]


def test_uploads_of_arrays_and_tiff_are_decoded_within_the_limits(tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=(16, 16), channels=5, mean=(0.1,) * 5, std=(0.1,) * 5, dtype="uint16")
    save_pages(tmp_path / "a", make_pixels(0, 0))
    save_npy(tmp_path / "a", make_pixels(0, 0))
    for file in ("a.tif", "a.npy"):
        upload = Upload(file, (tmp_path / file).read_bytes())
        assert np.array_equal(decode_upload(upload, preprocessing, Limits()).numpy(), make_pixels(0, 0))
    np.save(tmp_path / "large.npy", np.zeros((5, 800, 800), np.uint16))
    with pytest.raises(ImageError, match="5 channels of 800×800 pixels"):
        decode_upload(Upload("large", (tmp_path / "large.npy").read_bytes()), preprocessing, Limits(max_megapixels=1))
    np.save(tmp_path / "four.npy", make_pixels(0, 0, 4))
    with pytest.raises(ImageError, match="4 channels; the model expects 5"):
        decode_upload(Upload("four", (tmp_path / "four.npy").read_bytes()), preprocessing, Limits())
