"""RandAugment, TrivialAugment, jitter: operations against Pillow, spaces against the libraries they come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from torch import Generator, Tensor

from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import (
    AutoAugmentPolicy,
    augreg_space,
    color_jitter,
    increasing_space,
    trivialaugment_space,
)
from vitral.data.image_ops import OPS, apply_ops, update_where

DEIT = AutoAugmentPolicy(
    name="randaugment", num_ops=2, magnitude=9, magnitude_std=0.5, increasing=True, probability=0.5
)
AUGREG = AutoAugmentPolicy(name="randaugment", num_ops=2, magnitude=15)
TRIVIAL = AutoAugmentPolicy(name="trivialaugment")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def photographs(B: int = 6, C: int = 3, H: int = 37, W: int = 52) -> Tensor:
    """Blurred noise of different ranges: values that neighbours share, histograms with holes; the last one is flat."""
    draws = np.random.default_rng(0)
    pictures = []
    for index in range(B):
        small = draws.integers(0, 256, (H // 4, W // 4, C), dtype=np.uint8)
        large = [np.asarray(Image.fromarray(small[..., c]).resize((W, H), Image.Resampling.BICUBIC)) for c in range(C)]
        low, high = (0, 255) if index == 0 else sorted(draws.integers(0, 256, 2))
        pictures.append(torch.from_numpy(np.stack(large) * ((high - low) / 255) + low).to(torch.uint8))
    pictures[-1].fill_(77)
    return torch.stack(pictures)


def picture(image_CHW: Tensor) -> Image.Image:
    array = image_CHW.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def pixels(of: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(of)).reshape(of.height, of.width, -1).permute(2, 0, 1)


def affine(one: Image.Image, data: tuple[float, ...]) -> Image.Image:
    gray = (128,) * 3 if one.mode == "RGB" else 128
    return one.transform(one.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=gray)


def add_below_the_middle(one: Image.Image, amount: float) -> Image.Image:
    values = np.array(one).astype(int)
    return Image.fromarray(np.where(values < 128, np.minimum(values + int(amount), 255), values).astype(np.uint8))


VALUES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda one, _: one,
    "brightness": lambda one, factor: ImageEnhance.Brightness(one).enhance(factor),
    "contrast": lambda one, factor: ImageEnhance.Contrast(one).enhance(factor),
    "color": lambda one, factor: ImageEnhance.Color(one).enhance(factor),
    "sharpness": lambda one, factor: ImageEnhance.Sharpness(one).enhance(factor),
    "posterize": lambda one, bits: ImageOps.posterize(one, int(bits)),
    "solarize": lambda one, threshold: ImageOps.solarize(one, int(threshold)),
    "solarize_add": add_below_the_middle,
    "invert": lambda one, _: ImageOps.invert(one),
    "autocontrast": lambda one, _: ImageOps.autocontrast(one),
    "equalize": lambda one, _: ImageOps.equalize(one),
}
FACTORS = (0.0, 0.1, 0.55, 1.0, 1.37, 1.9, 3.7)
ARGUMENTS: dict[str, tuple[float, ...]] = dict.fromkeys(("brightness", "contrast", "color", "sharpness"), FACTORS)
ARGUMENTS |= {"posterize": (1, 2, 4, 7, 8), "solarize": (0, 1, 100, 255, 256, 384), "solarize_add": (0, 33, 110, 200)}


def done(images: Tensor, name: str, argument: float) -> Tensor:
    B = len(images)
    return apply_ops(images, torch.full((B,), OPS.index(name)), torch.full((B,), float(argument)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", VALUES)
def test_what_changes_values_is_exactly_pillows(name: str, channels: int) -> None:
    images = photographs(C=channels)
    for argument in ARGUMENTS.get(name, (0,)):
        wanted = torch.stack([pixels(VALUES[name](picture(image), argument)) for image in images])
        found = done(images, name, argument)
        assert (found.int() - wanted.int()).abs().max() == 0, argument
    assert torch.equal(images, photographs(C=channels)), "images must not be changed in place"


MOVES: dict[str, tuple[Callable[[Image.Image, float], Image.Image], tuple[float, ...]]] = {
    "shear_x": (lambda one, by: affine(one, (1, by, 0, 0, 1, 0)), (0.3, -0.99, 0.05)),
    "shear_y": (lambda one, by: affine(one, (1, 0, 0, by, 1, 0)), (0.3, -0.3)),
    "translate_x": (lambda one, by: affine(one, (1, 0, by, 0, 1, 0)), (7, -11.4, 60)),
    "translate_y": (lambda one, by: affine(one, (1, 0, 0, 0, 1, by)), (7, -11.4)),
    "rotate": (lambda one, by: one.rotate(by, Image.Resampling.BILINEAR, fillcolor=(128,) * 3), (30, -17.5, 135)),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_pixels_moves_them_as_pillow_does(name: str) -> None:
    """Within 1 of 255: Pillow cuts fractions off, here they are rounded. At the border they fade differently."""
    reference, arguments = MOVES[name]
    images = photographs()
    ones = Image.fromarray(np.pad(np.full((33, 48, 3), 200, dtype=np.uint8), ((2, 2), (2, 2), (0, 0))))
    for argument in arguments:
        wanted = torch.stack([pixels(reference(picture(image), argument)) for image in images])
        found = done(images, name, argument)
        inside = pixels(reference(ones, argument))[0] == 200
        outside = done(torch.full_like(images, 0), name, argument)[0, 0] == 128
        difference = (found.int() - wanted.int()).abs()[..., inside]
        assert difference.numel() == 0 or difference.max() <= 1
        assert (found[..., outside] == 128).all()
        assert (inside | outside).float().mean() > 0.75


def test_cutout_is_a_gray_square_around_its_place() -> None:
    images = photographs(6)
    places = torch.tensor([[0.0, 0.5, 0.99, 0.3, 0.5, 0.5], [0.0, 0.5, 0.99, 0.8, 0.5, 0.5]])
    half = torch.tensor([5.0, 5, 5, 5, 0, 100])
    found = apply_ops(images, torch.full((6,), OPS.index("cutout")), half, places)
    for image, was, h, (down, right) in zip(found, images, half.int().tolist(), places.T.tolist(), strict=True):
        y, x = int(down * 37), int(right * 52)
        wanted = was.clone()
        wanted[:, max(y - h, 0) : y + h, max(x - h, 0) : x + h] = 128
        assert torch.equal(image, wanted)


def test_each_image_gets_its_own_operation_whatever_stands_beside_it() -> None:
    names = [name for name in OPS if name != "cutout"]
    images = photographs(len(names))
    arguments = torch.linspace(0.5, 4, len(names))
    together = apply_ops(images, torch.tensor([OPS.index(name) for name in names]), arguments)
    for image, name, argument, found in zip(images, names, arguments.tolist(), together, strict=True):
        assert torch.equal(done(image[None], name, argument)[0], found), name


def test_a_gpu_that_computes_all_and_keeps_some_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other branch of `change`, which a CPU never takes by itself."""
    from vitral.data import autoaugment as policy

    images = torch.cat([photographs(12)] * 2)
    one = [chosen(images, seeded(3)) for chosen in (DEIT, AUGREG, TRIVIAL)]

    class Elsewhere:
        type = "gpu"

    def on_gpu(images: Tensor, which: Tensor, how: Callable[..., Tensor], *values: Tensor) -> None:
        class Pretending(torch.Tensor):
            @property
            def device(self) -> Any:  # type: ignore[override]
                return Elsewhere()

        real = images.as_subclass(Pretending)
        update_where(real, which, lambda part, *v: how(part.as_subclass(torch.Tensor), *v), *values)

    monkeypatch.setattr(policy, "change", on_gpu)
    monkeypatch.setattr(policy, "AT_ONCE", 5)
    monkeypatch.setattr(policy, "APART", (policy.LOOKUP_OPS,))
    other = [chosen(images, seeded(3)) for chosen in (DEIT, AUGREG, TRIVIAL)]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ── the spaces ─────────────────────────────────────────────────────────────────────────────────────────────────

TIMM = {
    "AutoContrast": "autocontrast", "Equalize": "equalize", "Invert": "invert", "Rotate": "rotate",
    "PosterizeIncreasing": "posterize", "SolarizeIncreasing": "solarize", "SolarizeAdd": "solarize_add",
    "ColorIncreasing": "color", "ContrastIncreasing": "contrast", "BrightnessIncreasing": "brightness",
    "SharpnessIncreasing": "sharpness", "ShearX": "shear_x", "ShearY": "shear_y", "TranslateXRel": "translate_x",
    "TranslateYRel": "translate_y",
}  # fmt: skip
PLAIN = {
    "Rotate": "rotate", "Posterize": "posterize", "SolarizeAdd": "solarize_add", "Color": "color", "ShearX": "shear_x",
}  # fmt: skip


def test_the_increasing_space_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.references import timm

    theirs = timm.data.auto_augment
    assert set(theirs._RAND_INCREASING_TRANSFORMS) == set(TIMM)
    for level in (0.0, 2.5, 5.0, 8.0, 9.0, 9.7, 10.0):
        for coin in (0.0, 1.0):
            monkeypatch.setattr(random, "random", lambda coin=coin: coin)
            sign = torch.tensor([theirs._randomly_negate(1.0)])
            ours = increasing_space(torch.tensor([level / 10]), sign, (100, 200))
            assert set(ours) == set(TIMM.values())
            for name, mine in TIMM.items():
                to_argument = theirs.LEVEL_TO_ARG[name]
                if to_argument is None:
                    continue
                (wanted,) = to_argument(level, {})
                wanted *= {"translate_x": 200, "translate_y": 100}.get(mine, 1)
                assert ours[mine].item() == pytest.approx(wanted, abs=1e-4), (name, level)


def test_the_space_that_does_not_increase_is_timms_too_where_timm_has_it() -> None:
    """timm's names without "Increasing" follow the same TensorFlow code as big_vision."""
    from support.references import timm

    theirs = timm.data.auto_augment.LEVEL_TO_ARG
    for level in (0.0, 5.0, 10.0):
        ours = augreg_space(torch.tensor([level / 10]), torch.ones(1), (224, 224))
        for name, mine in PLAIN.items():
            assert abs(ours[mine].item()) == pytest.approx(abs(theirs[name](level, {})[0]), abs=1e-4), (name, level)
    strong = augreg_space(torch.tensor([2.0]), torch.ones(1), (224, 224))
    assert {name: strong[name].item() for name in ("rotate", "translate_x", "cutout", "posterize", "color")} == {
        "rotate": 60, "translate_x": pytest.approx(200), "cutout": 80, "posterize": 8, "color": pytest.approx(3.7),
    }  # fmt: skip
    assert len(strong) == 16


def test_the_wide_space_is_torchvisions() -> None:
    from support import references as references

    theirs = references.torchvision.transforms.TrivialAugmentWide()._augmentation_space(31)
    names = {
        "Identity": "identity", "ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x",
        "TranslateY": "translate_y", "Rotate": "rotate", "Brightness": "brightness", "Color": "color",
        "Contrast": "contrast", "Sharpness": "sharpness", "Posterize": "posterize", "Solarize": "solarize",
        "AutoContrast": "autocontrast", "Equalize": "equalize",
    }  # fmt: skip
    assert set(theirs) == set(names)
    m = torch.arange(31) / 30
    up, down = trivialaugment_space(m, torch.ones(31)), trivialaugment_space(m, -torch.ones(31))
    assert set(up) == set(names.values())
    for name, mine in names.items():
        magnitudes, signed = theirs[name]
        if magnitudes.ndim == 0:
            continue
        exact = 1.0 if mine.startswith("translate") else 1e-4  # whole pixels there, of which one is 15.999 in fp32
        if mine.startswith("translate"):
            magnitudes = magnitudes.int()
        around = 1 if mine in ("brightness", "color", "contrast", "sharpness") else 0
        torch.testing.assert_close(up[mine], around + magnitudes.float(), rtol=0, atol=exact)
        if signed:
            torch.testing.assert_close(down[mine], around - magnitudes.float(), rtol=0, atol=exact)


# ── the draws ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chosen", [DEIT, AUGREG, TRIVIAL], ids=["deit", "augreg", "trivial"])
def test_images_stay_images_draws_differ_and_repeat_with_the_generator(chosen: AutoAugmentPolicy) -> None:
    images = photographs(1).expand(48, -1, -1, -1)
    found = chosen(images, seeded(7))
    assert found.dtype == torch.uint8
    assert found.shape == images.shape
    assert torch.equal(found, chosen(images, seeded(7)))
    assert not torch.equal(found, chosen(images, seeded(8)))
    assert len({one.numpy().tobytes() for one in found}) > (25 if chosen is AUGREG else 20)


@pytest.mark.parametrize("chosen", [DEIT, AUGREG, TRIVIAL], ids=["deit", "augreg", "trivial"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 2, 7), (2, 4, 9, 2), (5, 3, 8, 8)])
def test_images_of_any_shape_keep_it(chosen: AutoAugmentPolicy, shape: tuple[int, ...]) -> None:
    images = torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)
    for seed in range(20):
        assert chosen(images, seeded(seed)).shape == shape


def drawn(chosen: AutoAugmentPolicy, monkeypatch: pytest.MonkeyPatch, B: int = 4000) -> tuple[Tensor, Tensor]:
    """Operations and arguments of one layer."""
    from vitral.data import autoaugment as policy

    calls: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(policy, "apply", lambda images, op, argument, place: calls.append((op, argument)) or images)  # type: ignore[func-returns-value]
    chosen(torch.zeros(B, 1, 2, 2, dtype=torch.uint8), seeded(5))
    assert len(calls) == (1 if chosen.name == "trivialaugment" else chosen.num_ops)
    return calls[0]


def test_operations_are_drawn_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, count in ((AUGREG, 16), (TRIVIAL, 14)):
        operation, _ = drawn(chosen, monkeypatch)
        counts = torch.bincount(operation, minlength=len(OPS))
        assert (counts > 0).sum() == count
        assert stats.chisquare(counts[counts > 0].numpy()).pvalue > 0.01


def test_probability_spread_and_bounds_of_the_magnitude_are_the_asked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, argument = drawn(DEIT, monkeypatch)
    share = (operation == 0).float().mean()
    assert abs(share - 0.5) < 0.03
    turned = argument[operation == OPS.index("rotate")]
    levels = turned.abs() / 3
    assert abs((turned > 0).float().mean() - 0.5) < 0.15
    assert levels.max() <= 10
    assert abs(levels.mean() - 9) < 0.15
    assert 0.35 < levels.std() < 0.6  # a normal of deviation 0.5, cut at 10


def test_a_batch_in_parts_of_the_device_draws_as_a_whole() -> None:
    images = photographs(30)
    assert torch.equal(AUGREG(images, seeded(2)), AUGREG(images, seeded(2)))
    one = AUGREG(images, generator := seeded(2))
    assert not torch.equal(AUGREG(images, generator), one), "the generator must move on"


# ── jitter, and all of it in Augment ───────────────────────────────────────────────────────────────────────────


def test_jitter_is_pillows_three_enhancers_with_factors_in_the_asked_range(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photographs(40)
    factors: list[Tensor] = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *n, **how: factors.append(rand(*n, **how)) or factors[-1])  # type: ignore[func-returns-value]
    found = color_jitter(images, 0.3, seeded(1))
    monkeypatch.undo()
    for index, (image, after) in enumerate(zip(images, found, strict=True)):
        one = picture(image)
        for kind, draws in zip(
            (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True
        ):
            one = kind(one).enhance((1 + 0.3 * (draws[index] * 2 - 1)).item())
        assert (pixels(one).int() - after.int()).abs().max() <= 1
    assert all(1 + 0.3 * (f.min() * 2 - 1) >= 0.7 and f.std() > 0.2 for f in factors)


@pytest.mark.parametrize("before", [{}, {"crop": 0.3}, {"shift": 2, "flip": True}, {"rotate": 10.0, "scale": 0.1}])
def test_colours_come_after_moving_and_are_done_on_whole_values(before: dict[str, Any]) -> None:
    images = photographs(16)
    plain, generator = AugmentConfig(**before), seeded(3)
    moved = plain.transform(images, generator)
    whole = moved.float().round().clamp(0, 255).to(torch.uint8)
    wanted = color_jitter(AUGREG(whole, generator), 0.2, generator)
    found = AugmentConfig(**before, policy=AUGREG, jitter=0.2).transform(images, seeded(3))
    assert torch.equal(found, wanted)
    assert found.dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", "auto"), ("layers", 0), ("magnitude", -1), ("magnitude", 31), ("spread", -1), ("probability", 1.1)],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"augment\.policy\.{name} .*{value}"):
        AutoAugmentPolicy(**{name: value})
