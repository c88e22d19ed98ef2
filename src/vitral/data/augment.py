"""Augmentation of whole batches on the device, one random draw an image: no Python per image.

Shapes:  B images   C channels   H, W pixels   K classes
Every random number comes from the generator that is handed in, so that a run can be repeated and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitral.data.autoaugment import Operate, Policy, jitter
from vitral.data.preprocess import Preprocessing

Border = Literal["edge", "black"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How training images are varied. Zeros leave them as they are."""

    crop: float = 0.0  # 0.4: a random part of 40 to 100 % of the area, scaled to the model's size; 0: the middle
    shift: int = 0  # up to so many pixels, up, down and sideways
    flip: bool = False  # left and right exchanged in half of the images
    rotate: float = 0.0  # up to so many degrees, either way
    scale: float = 0.0  # 0.1: between 0.9 and 1.1 times the size
    border: Border = "edge"  # what comes in from outside when an image is moved
    policy: Policy = field(default_factory=Policy)  # RandAugment, TrivialAugment
    jitter: float = 0.0  # 0.3: brightness, contrast and colour, each times 0.7 to 1.3
    erase: float = 0.0  # share of images that lose a random rectangle (arXiv 1708.04896)
    mixup: float = 0.0  # α of the Beta distribution that blends two images (arXiv 1710.09412)
    cutmix: float = 0.0  # α of the Beta distribution that pastes a rectangle of another image (arXiv 1905.04899)
    switch: float = 0.5  # with mixup and cutmix both: the share of images that get cutmix
    mixed: float = 1.0  # share of images that mixup or cutmix falls on
    unmixed: float = 0.0  # 0.1: no mixing in the last tenth of the run
    repeat: int = 1  # so many differently varied copies of an image in its batch, for fewer others (arXiv 1902.05509)

    def __post_init__(self) -> None:
        for name in (
            "crop",
            "shift",
            "rotate",
            "scale",
            "jitter",
            "erase",
            "mixup",
            "cutmix",
            "switch",
            "mixed",
            "unmixed",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"augment.{name} must be a number and not negative, not {getattr(self, name)}")
        if self.shift != int(self.shift):
            raise ValueError(f"augment.shift must be a whole number of pixels, not {self.shift}")
        if self.repeat < 1:
            raise ValueError(f"augment.repeat must be at least 1, not {self.repeat}")
        if self.scale >= 1:
            raise ValueError(f"augment.scale must be below 1, not {self.scale}")
        for name in ("erase", "crop", "jitter", "switch", "mixed", "unmixed"):
            if getattr(self, name) > 1:
                raise ValueError(f"augment.{name} must be at most 1, not {getattr(self, name)}")
        if self.border not in get_args(Border):
            raise ValueError(f"augment.border must be one of {', '.join(get_args(Border))}, not {self.border!r}")

    def move(
        self,
        images_BCHW: Tensor,
        generator: Generator,
        size: tuple[int, int] | None = None,
        operate: Operate | None = None,
    ) -> Tensor:
        """Before normalising: crop, shift, mirror, rotate, resize, then colours. What stays whole stays uint8."""
        if self.crop:
            images_BCHW = random_crop(
                images_BCHW, self.crop, size or (images_BCHW.shape[2], images_BCHW.shape[3]), generator
            )
        if self.rotate or self.scale:
            images_BCHW = affine(images_BCHW.float(), self, generator)
        elif self.shift or self.flip:
            images_BCHW = shift_and_flip(images_BCHW, self, generator)
        if not self.coloured:
            return images_BCHW
        if images_BCHW.dtype != torch.uint8:
            images_BCHW = images_BCHW.round().clamp(0, 255).to(torch.uint8)
        return self.colour(images_BCHW, generator, operate)

    @property
    def coloured(self) -> bool:
        return self.policy.name != "none" or self.jitter > 0

    def colour(self, images_BCHW: Tensor, generator: Generator, operate: Operate | None = None) -> Tensor:
        """The policy and jitter: uint8 → uint8."""
        images_BCHW = self.policy(images_BCHW, generator, operate)
        return jitter(images_BCHW, self.jitter, generator, operate) if self.jitter else images_BCHW

    def mix(
        self, images_BCHW: Tensor, targets_BK: Tensor, generator: Generator, mixing: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """After normalising: erase, then blend with other images; targets are rows of class probabilities.

        Coins decide for each image which of them, and whether: on the device, which never waits for Python. Where
        `mixing` is false, none is blended.
        """
        if self.erase:
            images_BCHW = erase(images_BCHW, self.erase, generator)
        if not (self.mixup or self.cutmix):
            return images_BCHW, targets_BK
        coin, other = torch.rand(2, len(images_BCHW), generator=generator, device=images_BCHW.device)
        if self.mixup and self.cutmix:
            blended = mixup(images_BCHW, targets_BK, self.mixup, generator)
            mixed = choose(coin < self.switch, cutmix(images_BCHW, targets_BK, self.cutmix, generator), blended)
        elif self.mixup:
            mixed = mixup(images_BCHW, targets_BK, self.mixup, generator)
        else:
            mixed = cutmix(images_BCHW, targets_BK, self.cutmix, generator)
        chosen = other < self.mixed if mixing is None else (other < self.mixed) & mixing
        return mixed if self.mixed == 1 and mixing is None else choose(chosen, mixed, (images_BCHW, targets_BK))


Examples = tuple[Tensor, Tensor]  # images, B C H W, and their targets, B K
Vary = Callable[[Tensor, Tensor, Generator, Tensor | None], Examples]  # the last four arguments of `varied`


def varied(
    augment: Augment,
    preprocessing: Preprocessing,
    classes: int,
    images_BCHW: Tensor,
    labels_B: Tensor,
    generator: Generator,
    mixing: Tensor | None = None,
    operate: Operate | None = None,
) -> Examples:
    """uint8 images with their labels → what the model sees, and what it should answer."""
    targets_BK = F.one_hot(labels_B, classes).float()
    images = preprocessing.normalise(augment.move(images_BCHW, generator, preprocessing.image_size, operate))
    return augment.mix(images, targets_BK, generator, mixing)


def choose(coin_B: Tensor, heads: Examples, tails: Examples) -> Examples:
    """Image by image, with its target."""
    return torch.where(coin_B[:, None, None, None], heads[0], tails[0]), torch.where(
        coin_B[:, None], heads[1], tails[1]
    )


def random_crop(images_BCHW: Tensor, least: float, size: tuple[int, int], generator: Generator) -> Tensor:
    """A random part of each image, of `least` to all of its area and 3:4 to 4:3 of its shape, scaled to `size`."""
    B = images_BCHW.shape[0]
    draw = torch.rand(4, B, generator=generator, device=images_BCHW.device)
    area = least + draw[0] * (1 - least)
    ratio = torch.exp((draw[1] * 2 - 1) * math.log(4 / 3))
    height, width = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    down, right = (1 - height) * (draw[2] * 2 - 1), (1 - width) * (draw[3] * 2 - 1)  # affine_grid spans [-1, 1]
    zero = torch.zeros_like(area)
    x_row, y_row = torch.stack([width, zero, right], dim=1), torch.stack([zero, height, down], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), [B, images_BCHW.shape[1], *size], align_corners=False)
    return F.grid_sample(images_BCHW.float(), grid, padding_mode="border", align_corners=False)


def shift_and_flip(images_BCHW: Tensor, augment: Augment, generator: Generator) -> Tensor:
    """Move each image by whole pixels, and mirror half of them, in one gather."""
    B, C, H, W = images_BCHW.shape
    device = images_BCHW.device
    down, right = torch.randint(-augment.shift, augment.shift + 1, (2, B, 1), generator=generator, device=device)
    rows = torch.arange(H, device=device) - down  # B H, where each row comes from
    columns = torch.arange(W, device=device) - right
    if augment.flip:
        mirrored = torch.rand(B, 1, generator=generator, device=device) < 0.5
        columns = torch.where(mirrored, W - 1 - columns, columns)
    from_BN = (rows.clamp(0, H - 1)[:, :, None] * W + columns.clamp(0, W - 1)[:, None, :]).flatten(1)
    moved = images_BCHW.flatten(2).gather(2, from_BN[:, None].expand(-1, C, -1)).view_as(images_BCHW)
    if augment.border == "edge":
        return moved
    inside = ((rows >= 0) & (rows < H))[:, None, :, None] & ((columns >= 0) & (columns < W))[:, None, None, :]
    return moved * inside


def affine(images_BCHW: Tensor, augment: Augment, generator: Generator) -> Tensor:
    """Rotate, resize, shift and mirror each image in one bilinear resampling."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    angle, size, down, right = torch.rand(4, B, generator=generator, device=device) * 2 - 1
    angle, size = angle * math.radians(augment.rotate), 1 + size * augment.scale
    down, right = down * augment.shift * 2 / H, right * augment.shift * 2 / W  # affine_grid spans [-1, 1]
    mirror = torch.ones(B, device=device)
    if augment.flip:
        mirror = 1 - 2 * (torch.rand(B, generator=generator, device=device) < 0.5).float()
    cos, sin = angle.cos() / size, angle.sin() / size
    # Where output pixel (x, y) is read from; H/W keeps a rotation a rotation in images that are not square.
    x_row = torch.stack([mirror * cos, -mirror * sin * (H / W), -mirror * right], dim=1)
    y_row = torch.stack([sin * (W / H), cos, -down], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), list(images_BCHW.shape), align_corners=False)
    padding = "border" if augment.border == "edge" else "zeros"
    return F.grid_sample(images_BCHW, grid, padding_mode=padding, align_corners=False)


def erase(images_BCHW: Tensor, share: float, generator: Generator) -> Tensor:
    """Replace a rectangle of 2 to 33 % of the area by normal noise, in `share` of the images."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    draw = torch.rand(5, B, generator=generator, device=device)
    area = 0.02 + draw[0] * (1 / 3 - 0.02)
    ratio = torch.exp((draw[1] * 2 - 1) * math.log(3.3))  # height over width, from 0.3 to 3.3
    box = _boxes((area * ratio).sqrt(), (area / ratio).sqrt(), draw[2], draw[3], H, W)
    box = box & (draw[4] < share)[:, None, None]
    noise = torch.randn(images_BCHW.shape, generator=generator, device=device, dtype=images_BCHW.dtype)
    return torch.where(box[:, None], noise, images_BCHW)


def mixup(images_BCHW: Tensor, targets_BK: Tensor, alpha: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """λ of each image and 1 - λ of another; the targets blend alike."""
    share = _beta(alpha, len(images_BCHW), generator, images_BCHW.device)
    images = torch.lerp(images_BCHW.roll(1, 0), images_BCHW, share[:, None, None, None].to(images_BCHW.dtype))
    return images, torch.lerp(targets_BK.roll(1, 0), targets_BK, share[:, None].to(targets_BK.dtype))


def cutmix(images_BCHW: Tensor, targets_BK: Tensor, alpha: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """A rectangle of another image in each image; the targets blend by the area that was really replaced."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    side = (1 - _beta(alpha, B, generator, device)).sqrt()
    top, left = torch.rand(2, B, generator=generator, device=device)
    box = _boxes(side, side, top, left, H, W)
    kept = 1 - box.float().mean(dim=(1, 2))
    images = torch.where(box[:, None], images_BCHW.roll(1, 0), images_BCHW)
    return images, torch.lerp(targets_BK.roll(1, 0), targets_BK, kept[:, None].to(targets_BK.dtype))


def _boxes(height_B: Tensor, width_B: Tensor, top_B: Tensor, left_B: Tensor, H: int, W: int) -> Tensor:
    """B H W: true inside a rectangle. Sizes are shares of the image, places shares of the room that is left."""
    heights, widths = (height_B * H).round().clamp(max=H), (width_B * W).round().clamp(max=W)
    tops, lefts = ((H - heights + 1) * top_B).floor(), ((W - widths + 1) * left_B).floor()
    y, x = torch.arange(H, device=top_B.device), torch.arange(W, device=top_B.device)
    rows = (y >= tops[:, None]) & (y < (tops + heights)[:, None])
    columns = (x >= lefts[:, None]) & (x < (lefts + widths)[:, None])
    return rows[:, :, None] & columns[:, None, :]


def _beta(alpha: float, count: int, generator: Generator, device: torch.device) -> Tensor:
    """Draws of Beta(α, α): the share of the first of two Gamma variables."""
    first, second = gammas(alpha, count, generator, device)
    return (first / (first + second)).float()


def gammas(alpha: float, count: int, generator: Generator, device: torch.device) -> Tensor:
    """Two for each image; for a small α they need 64 bits."""
    concentration = torch.full((2, count), alpha, device=device, dtype=torch.float64)
    return torch._standard_gamma(concentration, generator=generator)
