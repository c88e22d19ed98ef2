"""Image operations compared with Pillow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from support.op_images import from_pil, smooth_images, to_pil
from vitral.data import image_ops
from vitral.data.image_ops import CPU_LOOKUP_GROUPS, LOOKUP_OPS, OPS, apply_lookup_ops, apply_ops


def pil_affine(image: Image.Image, data: tuple[float, ...]) -> Image.Image:
    gray = (128,) * 3 if image.mode == "RGB" else 128
    return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=gray)


def solarize_add(image: Image.Image, amount: float) -> Image.Image:
    values = np.array(image).astype(int)
    return Image.fromarray(np.where(values < 128, np.minimum(values + int(amount), 255), values).astype(np.uint8))


PIL_VALUE_OPS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, int(threshold)),
    "solarize_add": solarize_add,
    "invert": lambda image, _: ImageOps.invert(image),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
FACTORS = (0.0, 0.1, 0.55, 1.0, 1.37, 1.9, 3.7)
ARGUMENTS: dict[str, tuple[float, ...]] = dict.fromkeys(("brightness", "contrast", "color", "sharpness"), FACTORS)
ARGUMENTS |= {"posterize": (1, 2, 4, 7, 8), "solarize": (0, 1, 100, 255, 256, 384), "solarize_add": (0, 33, 110, 200)}


def apply_op(images: Tensor, name: str, argument: float) -> Tensor:
    B = len(images)
    return apply_ops(images, torch.full((B,), OPS.index(name)), torch.full((B,), float(argument)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PIL_VALUE_OPS)
def test_value_ops_match_pillow_exactly(name: str, channels: int) -> None:
    images = smooth_images(C=channels)
    for argument in ARGUMENTS.get(name, (0,)):
        expected = torch.stack([from_pil(PIL_VALUE_OPS[name](to_pil(image), argument)) for image in images])
        result = apply_op(images, name, argument)
        assert (result.int() - expected.int()).abs().max() == 0, argument
    assert torch.equal(images, smooth_images(C=channels)), "images are not changed in place"


PIL_GEOMETRIC_OPS: dict[str, tuple[Callable[[Image.Image, float], Image.Image], tuple[float, ...]]] = {
    "shear_x": (lambda image, by: pil_affine(image, (1, by, 0, 0, 1, 0)), (0.3, -0.99, 0.05)),
    "shear_y": (lambda image, by: pil_affine(image, (1, 0, 0, by, 1, 0)), (0.3, -0.3)),
    "translate_x": (lambda image, by: pil_affine(image, (1, 0, by, 0, 1, 0)), (7, -11.4, 60)),
    "translate_y": (lambda image, by: pil_affine(image, (1, 0, 0, 0, 1, by)), (7, -11.4)),
    "rotate": (lambda image, by: image.rotate(by, Image.Resampling.BILINEAR, fillcolor=(128,) * 3), (30, -17.5, 135)),
}


@pytest.mark.parametrize("name", PIL_GEOMETRIC_OPS)
def test_geometric_ops_match_pillow_within_1(name: str) -> None:
    """Pillow truncates fractions where apply_ops rounds, and interpolates differently at the border."""
    reference, arguments = PIL_GEOMETRIC_OPS[name]
    images = smooth_images()
    interior = Image.fromarray(np.pad(np.full((33, 48, 3), 200, dtype=np.uint8), ((2, 2), (2, 2), (0, 0))))
    for argument in arguments:
        expected = torch.stack([from_pil(reference(to_pil(image), argument)) for image in images])
        result = apply_op(images, name, argument)
        inside = from_pil(reference(interior, argument))[0] == 200
        outside = apply_op(torch.full_like(images, 0), name, argument)[0, 0] == 128
        difference = (result.int() - expected.int()).abs()[..., inside]
        assert difference.numel() == 0 or difference.max() <= 1
        assert (result[..., outside] == 128).all()
        assert (inside | outside).float().mean() > 0.75


def test_cutout_is_a_gray_square_at_its_position() -> None:
    images = smooth_images(6)
    positions = torch.tensor([[0.0, 0.5, 0.99, 0.3, 0.5, 0.5], [0.0, 0.5, 0.99, 0.8, 0.5, 0.5]])
    half = torch.tensor([5.0, 5, 5, 5, 0, 100])
    result = apply_ops(images, torch.full((6,), OPS.index("cutout")), half, positions)
    for image, before, h, (down, right) in zip(result, images, half.int().tolist(), positions.T.tolist(), strict=True):
        y, x = int(down * 37), int(right * 52)
        expected = before.clone()
        expected[:, max(y - h, 0) : y + h, max(x - h, 0) : x + h] = 128
        assert torch.equal(image, expected)


def test_images_of_a_batch_are_independent() -> None:
    names = [name for name in OPS if name != "cutout"]
    images = smooth_images(len(names))
    arguments = torch.linspace(0.5, 4, len(names))
    together = apply_ops(images, torch.tensor([OPS.index(name) for name in names]), arguments)
    for image, name, argument, result in zip(images, names, arguments.tolist(), together, strict=True):
        assert torch.equal(apply_op(image[None], name, argument)[0], result), name


@pytest.mark.parametrize("count", [1, 24])
def test_gpu_and_cpu_code_paths_agree(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, `update_all` and the undivided table lookup are otherwise never used."""
    monkeypatch.setattr(image_ops, "GPU_CHUNK", 5)
    images = smooth_images(count)
    mask = torch.arange(count) % 3 == 0
    selected, everything = images.clone(), images.clone()
    factor = torch.linspace(0.2, 2, count)
    image_ops.update_selected(selected, mask, lambda values, f: values * f.view(-1, 1, 1, 1) / 2, factor)
    image_ops.update_all(everything, mask, lambda values, f: values * f.view(-1, 1, 1, 1) / 2, factor)
    assert torch.equal(selected, everything)
    assert not torch.equal(selected, images)


def test_lookup_tables_can_be_computed_together_or_in_groups() -> None:
    images = smooth_images(len(LOOKUP_OPS))
    op, argument = torch.tensor([OPS.index(name) for name in LOOKUP_OPS]), torch.linspace(0.5, 4, len(LOOKUP_OPS))
    together = apply_lookup_ops(LOOKUP_OPS, images.float(), op, argument)
    for names in CPU_LOOKUP_GROUPS:
        rows = [LOOKUP_OPS.index(name) for name in names]
        assert torch.equal(apply_lookup_ops(names, images[rows].float(), op[rows], argument[rows]), together[rows])
