"""Augmentation in one pass against the operations it stands for: in Triton's interpreter, number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from support.triton_interpreter import a_gpu, interpreted
from vitral.data.augment import Augment, varied
from vitral.data.autoaugment import MOVING, OPERATIONS, Policy, apply
from vitral.data.preprocess import Preprocessing
from vitral.kernels.augment import op as own
from vitral.kernels.self_check import share_off
from vitral.recipes.builtin import RECIPES
from vitral.training.trainer import vary_of

pytestmark = interpreted
GPU = a_gpu(precision="fp32")


def seen_as(size: tuple[int, int], channels: int = 3) -> Preprocessing:
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]
    return Preprocessing(image_size=size, channels=channels, mean=mean, std=std)


@settings(max_examples=30, deadline=None)
@given(
    shift=st.integers(0, 4),
    flip=st.booleans(),
    border=st.sampled_from(("edge", "black")),
    cutmix=st.sampled_from((0.0, 0.2, 1.0)),
    mixed=st.sampled_from((0.4, 1.0)),
    mixing=st.sampled_from((None, True, False)),
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    channels=st.sampled_from((1, 3)),
    B=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_the_same_draws_give_the_same_images_and_targets(
    shift: int, flip: bool, border: Any, cutmix: float, mixed: float, mixing: bool | None, size: tuple[int, int],
    channels: int, B: int, seed: int,
) -> None:  # fmt: skip
    augment = Augment(shift=shift, flip=flip, border=border, cutmix=cutmix, mixed=mixed)
    seen, draws = seen_as(size, channels), Generator().manual_seed(seed)
    images = torch.randint(0, 256, (B, channels, *size), generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, 7, (B,), generator=draws)
    on = None if mixing is None else torch.tensor(mixing)
    before = draws.get_state()
    wanted = varied(augment, seen, 7, images, labels, draws, on)
    after = draws.get_state()
    found = own.vary(augment, own.table(seen, GPU), 7, images, labels, draws.set_state(before), on)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], atol=1e-6, rtol=0)
    assert torch.equal(draws.get_state(), after)  # what is drawn next is the same, too


@pytest.mark.parametrize("name", ["cifar10-94", "cifar10-97", "cifar10-patch"])
def test_the_recipes_against_the_clock_get_it(name: str) -> None:
    recipe = RECIPES[name]()
    assert own.known(recipe.augment)
    small = replace(recipe, augment=replace(recipe.augment, shift=1))
    assert vary_of(small, seen_as((4, 4)), GPU, print) is not None
    assert vary_of(small, seen_as((4, 4)), replace(GPU, fused=False), print) is None


@pytest.mark.parametrize(
    "changes",
    [{"mixup": 0.2}, {"erase": 0.1}, {"crop": 0.5}, {"rotate": 5.0}, {"scale": 0.1}],
    ids=str,
)
def test_what_it_does_not_know_is_left_to_the_operations(changes: dict[str, Any]) -> None:
    augment = Augment(flip=True, cutmix=1.0, **changes)
    assert own.vary_of(augment, seen_as((4, 4)), 5, GPU) is None


ARGUMENTS = {
    "posterize": (0, 8),
    "solarize": (0, 384),
    "solarize_add": (0, 110),
    "cutout": (0, 9),
    "rotate": (-135, 135),
}
ARGUMENTS |= dict.fromkeys(("brightness", "contrast", "color", "sharpness"), (0, 2))
ARGUMENTS |= dict.fromkeys(("translate_x", "translate_y"), (-30, 30)) | dict.fromkeys(("shear_x", "shear_y"), (-1, 1))
WHOLE = ("posterize", "solarize", "solarize_add", "cutout")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(OPERATIONS),
    strength=st.floats(0, 1, width=32),
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    channels=st.sampled_from((1, 3)),
    levels=st.sampled_from(((0, 256), (40, 90), (77, 78), (0, 2))),
    placed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_operation_is_that_of_the_policy(
    name: str, strength: float, size: tuple[int, int], channels: int, levels: tuple[int, int], placed: bool, seed: int
) -> None:
    """To the last value, but for pixels that are read between others: those may be rounded the other way."""
    draws = Generator().manual_seed(seed)
    images = torch.randint(*levels, (2, channels, *size), generator=draws, dtype=torch.uint8)
    low, high = ARGUMENTS.get(name, (0, 1))
    argument = torch.full((2,), low + (high - low) * strength)
    asked = torch.full((2,), OPERATIONS.index(name)), argument.floor() if name in WHOLE else argument
    place = torch.rand(2, 2, generator=draws) if placed else None
    wanted, found = apply(images, *asked, place), own.operate(images, *asked, place)
    assert (wanted.int() - found.int()).abs().max() <= (1 if name in MOVING else 0)


POLICIES = [
    Policy(name="randaugment", layers=1, magnitude=7, increasing=True, probability=0.5),
    Policy(name="randaugment", layers=2, magnitude=9, spread=0.5, increasing=True, probability=0.5),
    Policy(name="randaugment", magnitude=15),
    Policy(name="trivialaugment"),
]


CHANGES: list[dict[str, Any]] = [{"shift": 2, "flip": True, "cutmix": 1.0, "mixed": 0.5}, {}, {"jitter": 0.3}]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        pytest.param(policy, changes, marks=[pytest.mark.slow] if policy is not POLICIES[0] and changes else [])
        for policy in POLICIES
        for changes in CHANGES
    ],
    ids=str,
)
def test_colours_between_a_move_and_a_mix_come_from_the_same_draws(policy: Policy, changes: dict[str, Any]) -> None:
    augment, seen, draws = Augment(policy=policy, **changes), seen_as((9, 11)), Generator().manual_seed(3)
    images = torch.randint(0, 256, (24, 3, 9, 11), generator=draws, dtype=torch.uint8)
    labels, before = torch.randint(0, 7, (24,), generator=draws), draws.get_state()
    wanted = varied(augment, seen, 7, images, labels, draws)
    after = draws.get_state()
    kernels = own.vary_of(augment, seen, 7, GPU, print)
    assert kernels is not None
    found = kernels(images, labels, draws.set_state(before), None)
    assert torch.equal(draws.get_state(), after)
    assert share_off(found[0], wanted[0]) < own.SELDOM
    torch.testing.assert_close(found[1], wanted[1], atol=1e-6, rtol=0)


def test_colours_are_a_kernel_also_where_the_rest_is_not() -> None:
    augment, seen = Augment(crop=0.5, erase=0.2, policy=POLICIES[1]), seen_as((12, 12))
    images, labels = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 5
    kernels = own.vary_of(augment, seen, 5, GPU, print)
    assert kernels is not None
    found, wanted = kernels(images, labels, Generator(), None), varied(augment, seen, 5, images, labels, Generator())
    assert share_off(found[0], wanted[0]) < own.SELDOM
    assert not own.known(augment)


@pytest.mark.parametrize(
    ("layers", "magnitude", "increasing"),
    [
        (4, 10, True),
        pytest.param(2, 10, False, marks=pytest.mark.slow),
        pytest.param(3, 30, False, marks=pytest.mark.slow),
    ],
)
def test_what_many_layers_make_of_one_rounding_speaks_against_no_kernel(
    layers: int, magnitude: float, increasing: bool
) -> None:
    policy = Policy(name="randaugment", layers=layers, magnitude=magnitude, increasing=increasing)
    augment, said = Augment(flip=True, policy=policy, jitter=0.4), list[str]()
    assert own.vary_of(augment, seen_as((12, 12)), 5, GPU, said.append) is not None
    assert said == []


@pytest.mark.parametrize("changes", [{"flip": True}, {"crop": 0.5}], ids=str)
def test_the_kernel_without_a_place_which_jitter_takes_is_tried_too(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = own.operate, list[str]()

    def lies(images: Tensor, operation: Tensor, argument: Tensor, place: Tensor | None = None) -> Tensor:
        return torch.zeros_like(images) if place is None else real(images, operation, argument, place)

    monkeypatch.setattr(own, "operate", lies)
    assert own.vary_of(Augment(jitter=0.3, **changes), seen_as((8, 8)), 5, GPU, said.append) is None
    assert "step by step" in said[0]


def test_channels_that_the_kernel_does_not_know_are_left_to_the_operations() -> None:
    seen, said = Preprocessing(image_size=(8, 8), channels=4, mean=(0.5,) * 4, std=(0.2,) * 4), list[str]()
    assert own.vary_of(Augment(flip=True, jitter=0.2), seen, 5, GPU, said.append) is None
    assert said == ["images' colours are varied step by step: its kernels know images of one or three channels"]


def test_a_kernel_that_fails_or_lies_is_not_taken_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    augment, real, said = Augment(flip=True), own.vary, []
    monkeypatch.setattr(own, "vary", lambda *given: [one.flip(0) for one in real(*given)])
    assert own.vary_of(augment, seen_as((4, 4)), 5, GPU, said.append) is None

    def fails(*given: object) -> None:
        raise KeyError("out of shared memory")

    monkeypatch.setattr(own, "vary", fails)
    assert own.vary_of(augment, seen_as((4, 4)), 5, GPU, said.append) is None
    assert [sentence.partition("its kernels ")[2][:8] for sentence in said] == ["are off ", "fail her"]
