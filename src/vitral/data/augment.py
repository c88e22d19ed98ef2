"""Data augmentation of whole batches on the device, with independent random draws per image.

Shapes:  B images   C channels   H, W pixels   K classes
All random numbers come from the generator passed in, so that a run can be repeated and resumed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitral.data.autoaugment import AutoAugmentPolicy, color_jitter
from vitral.data.image_ops import ApplyOpsFn
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError

Border = Literal["edge", "black"]
CROP_CHUNK = 4  # crops that a CPU resizes at a time, so that intermediates stay in its cache


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images. The defaults leave images unchanged."""

    crop: float = 0.0  # random resized crop with at least this fraction of the area; 0: central crop
    shift: int = 0  # random translation by up to this many pixels in each direction
    flip: bool = False  # horizontal flip with probability 0.5
    rotate: float = 0.0  # random rotation by up to this many degrees in either direction
    scale: float = 0.0  # random scaling; 0.1: between 0.9x and 1.1x
    border: Border = "edge"  # fill for pixels from outside the image when it is moved
    policy: AutoAugmentPolicy = field(default_factory=AutoAugmentPolicy)  # RandAugment or TrivialAugment
    jitter: float = 0.0  # colour jitter; 0.3: brightness, contrast and saturation each times 0.7 to 1.3
    erase: float = 0.0  # probability of random erasing (arXiv 1708.04896)
    mixup: float = 0.0  # mixup alpha (arXiv 1710.09412); 0: off
    cutmix: float = 0.0  # CutMix alpha (arXiv 1905.04899); 0: off
    cutmix_prob: float = 0.5  # probability of CutMix instead of mixup if both are on
    mix_prob: float = 1.0  # probability of applying mixup or CutMix to an image
    mix_off_last: float = 0.0  # final fraction of the run without mixup and CutMix; 0.1: the last tenth
    repeat: int = 1  # repeated augmentation: copies of each image per batch (arXiv 1902.05509)

    def __post_init__(self) -> None:
        fractions = ("crop", "jitter", "erase", "cutmix_prob", "mix_prob", "mix_off_last")
        for name in (*fractions, "shift", "rotate", "scale", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"augment.{name} must be a finite number of at least 0, got {getattr(self, name)}")
        for name in fractions:
            if getattr(self, name) > 1:
                raise ValueError(f"augment.{name} must be at most 1, got {getattr(self, name)}")
        if self.shift != int(self.shift):
            raise ValueError(f"augment.shift must be a whole number of pixels, got {self.shift}")
        if self.repeat < 1:
            raise ValueError(f"augment.repeat must be at least 1, got {self.repeat}")
        if self.scale >= 1:
            raise ValueError(f"augment.scale must be below 1, got {self.scale}")
        if self.border not in get_args(Border):
            raise ValueError(f"augment.border must be one of {', '.join(get_args(Border))}, got {self.border!r}")

    def transform(
        self,
        images_BCHW: Tensor,
        generator: Generator,
        size: tuple[int, int] | None = None,
        apply_fn: ApplyOpsFn | None = None,
        pad_color: Sequence[float] | None = None,
    ) -> Tensor:
        """Transforms before normalisation: crop, then shift, flip, rotate and scale, then colours.

        The result is uint8 unless the last transform interpolates. 16-bit images become floats of the same values;
        colours are changed in 8-bit grey and RGB images only. Random crops have `size`, by default that of the images;
        crops of images with `pad_color` around them stay inside the padding.
        """
        is_16_bit = images_BCHW.dtype == torch.uint16
        if is_16_bit:
            images_BCHW = images_BCHW.float()  # exact; torch.uint16 has neither gather nor flip
        is_flipped = False
        if self.crop and pad_color is not None:
            images_BCHW = random_crop_inside_padding(images_BCHW, self.crop, pad_color, generator)
        elif self.crop:
            size = size or (images_BCHW.shape[2], images_BCHW.shape[3])
            is_flipped = self.flip and not (self.shift or self.rotate or self.scale)  # nothing comes in between
            images_BCHW = random_crop(images_BCHW, self.crop, size, generator, flip=is_flipped)
        if self.rotate or self.scale:
            images_BCHW = affine(images_BCHW.float(), self, generator)
        elif self.shift or (self.flip and not is_flipped):
            images_BCHW = shift_and_flip(images_BCHW, self, generator)
        if not self.has_color_ops:
            return images_BCHW
        if is_16_bit or images_BCHW.shape[1] not in (1, 3):
            raise VitralError(
                f"colour augmentation is defined for 8-bit grey and RGB images, got {images_BCHW.shape[1]} channels of "
                f"{16 if is_16_bit else 8} bits",
                "Set --augment.policy.name none and --augment.jitter 0",
            )
        if images_BCHW.dtype != torch.uint8:
            images_BCHW = images_BCHW.round().clamp(0, 255).to(torch.uint8)
        return self.color_transform(images_BCHW, generator, apply_fn)

    @property
    def has_color_ops(self) -> bool:
        return self.policy.name != "none" or self.jitter > 0

    def color_transform(self, images_BCHW: Tensor, generator: Generator, apply_fn: ApplyOpsFn | None = None) -> Tensor:
        """RandAugment or TrivialAugment, then colour jitter: uint8 → uint8."""
        images_BCHW = self.policy(images_BCHW, generator, apply_fn)
        return color_jitter(images_BCHW, self.jitter, generator, apply_fn) if self.jitter else images_BCHW

    def erase_and_mix(
        self, images_BCHW: Tensor, targets_BK: Tensor, generator: Generator, mix_enabled: Tensor | None = None
    ) -> Batch:
        """Transforms after normalisation: random erasing, then mixup or CutMix of images and targets.

        Whether and how an image is mixed is decided per image on the device, without synchronising with the host.
        Nothing is mixed where `mix_enabled` (a scalar or (B,) bool tensor) is false.
        """
        if self.erase:
            images_BCHW = erase(images_BCHW, self.erase, generator)
        if not (self.mixup or self.cutmix):
            return images_BCHW, targets_BK
        method_draw, mix_draw = torch.rand(2, len(images_BCHW), generator=generator, device=images_BCHW.device)
        if self.mixup and self.cutmix:
            blended = mixup(images_BCHW, targets_BK, self.mixup, generator)
            pasted = cutmix(images_BCHW, targets_BK, self.cutmix, generator)
            mixed = select_per_image(method_draw < self.cutmix_prob, pasted, blended)
        elif self.mixup:
            mixed = mixup(images_BCHW, targets_BK, self.mixup, generator)
        else:
            mixed = cutmix(images_BCHW, targets_BK, self.cutmix, generator)
        if self.mix_prob == 1 and mix_enabled is None:
            return mixed
        is_mixed = mix_draw < self.mix_prob
        return select_per_image(
            is_mixed if mix_enabled is None else is_mixed & mix_enabled, mixed, (images_BCHW, targets_BK)
        )


Batch = tuple[Tensor, Tensor]  # normalised images (B, C, H, W) and targets (B, K)
AugmentFn = Callable[[Tensor, Tensor, Generator, Tensor | None], Batch]  # (images, labels, generator, mix_enabled)


def augment_batch(
    augment: AugmentConfig,
    preprocessing: Preprocessing,
    num_classes: int,
    images_BCHW: Tensor,
    labels_B: Tensor,
    generator: Generator,
    mix_enabled: Tensor | None = None,
    apply_fn: ApplyOpsFn | None = None,
) -> Batch:
    """Images (uint8 for photographs) and labels → normalised, augmented images and targets.

    Class indices (B,) become one-hot targets (B, K). Labels (B, K), multi-hot or real values, are targets already.
    `apply_fn` replaces `apply_ops`, for a fused kernel.
    """
    targets_BK = F.one_hot(labels_B, num_classes).float() if labels_B.ndim == 1 else labels_B.float()
    resize = preprocessing.resize
    size = None if resize == "native" else preprocessing.image_size
    pad_color = preprocessing.pad_color if resize == "pad" else None
    images = augment.transform(images_BCHW, generator, size, apply_fn, pad_color)
    images = preprocessing.normalise(images) if images is images_BCHW else preprocessing.normalise_(images)
    return augment.erase_and_mix(images, targets_BK, generator, mix_enabled)


def select_per_image(condition_B: Tensor, if_true: Batch, if_false: Batch) -> Batch:
    """Take each image and its target from `if_true` or `if_false`."""
    images = torch.where(condition_B[:, None, None, None], if_true[0], if_false[0])
    return images, torch.where(condition_B[:, None], if_true[1], if_false[1])


def random_crop(
    images_BCHW: Tensor, min_area: float, size: tuple[int, int], generator: Generator, *, flip: bool = False
) -> Tensor:
    """Random resized crop: `min_area` to all of the area, aspect ratio 3:4 to 4:3, bilinearly resized to `size`.

    With `flip`, crops are flipped horizontally with probability 0.5.
    """
    height, width, down, right = _draw_crops(images_BCHW, min_area, generator)
    if flip:
        _, _, is_flipped = _draw_shifts_and_flips(images_BCHW, 0, generator)
        width = torch.where(is_flipped[:, 0], -width, width)
    return _sample_boxes(images_BCHW, height, width, down, right, size)


def random_crop_inside_padding(
    images_BCHW: Tensor, min_area: float, pad_color: Sequence[float], generator: Generator
) -> Tensor:
    """Random resized crop of the part of each image inside its padding, resized to fill that part again.

    A crop of the whole canvas could show mostly padding, and the padding would no longer be where it is in inference.
    """
    H, W = images_BCHW.shape[2:]
    color = _padding_color(tuple(pad_color), images_BCHW.device)
    top, bottom, left, right = content_boxes(images_BCHW, pad_color)
    center_y, center_x = (top + bottom) / H - 1, (left + right) / W - 1  # affine_grid spans [-1, 1]
    box_height, box_width = (bottom - top) / H, (right - left) / W
    height, width, down, across = _draw_crops(images_BCHW, min_area, generator)
    down, across = center_y * (1 - height) + box_height * down, center_x * (1 - width) + box_width * across
    crops = _sample_boxes(images_BCHW, height, width, down, across, (H, W))
    y, x = torch.arange(H, device=top.device), torch.arange(W, device=top.device)
    rows, columns = (y >= top[:, None]) & (y < bottom[:, None]), (x >= left[:, None]) & (x < right[:, None])
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], crops, color)


def content_boxes(images_BCHW: Tensor, pad_color: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, bottom, left and right (B,) of the part of each image inside its padding; bottom and right are exclusive.

    An image that is all padding has the box of the whole image.
    """
    is_content = (images_BCHW != _padding_color(tuple(pad_color), images_BCHW.device)).any(dim=1)
    return *_first_and_last(is_content.any(dim=2)), *_first_and_last(is_content.any(dim=1))


@cache
def _padding_color(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(1, C, 1, 1). Cached, because a CUDA graph capture must not copy from the host."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def _first_and_last(mask_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first true value of each row, and the index after the last; the whole row if none is true."""
    is_empty, length = ~mask_BN.any(dim=1), mask_BN.shape[1]
    first, after_last = mask_BN.int().argmax(dim=1), length - mask_BN.flip(1).int().argmax(dim=1)
    return torch.where(is_empty, 0, first), torch.where(is_empty, length, after_last)


def _draw_crops(images_BCHW: Tensor, min_area: float, generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Height and width of random crops as fractions of the image, and the offset of their centres in [-1, 1]."""
    draw = torch.rand(4, len(images_BCHW), generator=generator, device=images_BCHW.device)
    area = min_area + draw[0] * (1 - min_area)
    ratio = torch.exp((draw[1] * 2 - 1) * math.log(4 / 3))
    height, width = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return height, width, (1 - height) * (draw[2] * 2 - 1), (1 - width) * (draw[3] * 2 - 1)


def _sample_boxes(
    images_BCHW: Tensor, height: Tensor, width: Tensor, down: Tensor, right: Tensor, size: tuple[int, int]
) -> Tensor:
    """Resize a box of each image bilinearly to `size`: its height and width, and its centre in [-1, 1].

    Boxes of negative width are flipped.
    """
    H, W = size
    y_BH, x_BW = _box_coordinates(height, down, H), _box_coordinates(width, right, W)

    def sample(rows: slice) -> Tensor:
        x, y = x_BW[rows, None].expand(-1, H, -1), y_BH[rows, :, None].expand(-1, -1, W)
        grid = torch.stack([x, y], dim=3)
        return F.grid_sample(images_BCHW[rows].float(), grid, padding_mode="border", align_corners=False)

    B, C = images_BCHW.shape[:2]
    if images_BCHW.device.type != "cpu" or B <= CROP_CHUNK:
        return sample(slice(B))
    crops = torch.empty(B, C, H, W)
    for start in range(0, B, CROP_CHUNK):
        rows = slice(start, start + CROP_CHUNK)
        crops[rows] = sample(rows)
    return crops


def _box_coordinates(extent_B: Tensor, center_B: Tensor, count: int) -> Tensor:
    """(B, count): the centres of `count` equal parts of a box along one axis, where the image spans [-1, 1]."""
    parts = (2 * torch.arange(count, device=extent_B.device) + 1) / count - 1
    return torch.addcmul(center_B[:, None], extent_B[:, None], parts)


def _draw_shifts_and_flips(
    images_BCHW: Tensor, max_shift: int, generator: Generator, *, flip: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Shifts down and to the right in pixels, and whether images are flipped, (B, 1) each."""
    B, device = len(images_BCHW), images_BCHW.device
    down, right = torch.randint(-max_shift, max_shift + 1, (2, B, 1), generator=generator, device=device)
    if not flip:
        return down, right, torch.zeros(B, 1, dtype=torch.bool, device=device)
    return down, right, torch.rand(B, 1, generator=generator, device=device) < 0.5


def shift_and_flip(images_BCHW: Tensor, augment: AugmentConfig, generator: Generator) -> Tensor:
    """Shift by whole pixels and flip horizontally with probability 0.5, in one gather."""
    C, H, W = images_BCHW.shape[1:]
    device = images_BCHW.device
    down, right, is_flipped = _draw_shifts_and_flips(images_BCHW, augment.shift, generator, flip=augment.flip)
    rows = torch.arange(H, device=device) - down  # (B, H): source row of each output row
    columns = torch.arange(W, device=device) - right
    columns = torch.where(is_flipped, W - 1 - columns, columns)
    source_BN = (rows.clamp(0, H - 1)[:, :, None] * W + columns.clamp(0, W - 1)[:, None, :]).flatten(1)
    moved = images_BCHW.flatten(2).gather(2, source_BN[:, None].expand(-1, C, -1)).view_as(images_BCHW)
    if augment.border == "edge":
        return moved
    inside = ((rows >= 0) & (rows < H))[:, None, :, None] & ((columns >= 0) & (columns < W))[:, None, None, :]
    return moved * inside


def affine(images_BCHW: Tensor, augment: AugmentConfig, generator: Generator) -> Tensor:
    """Rotate, scale, shift and flip each image in one bilinear resampling."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    angle, scale, down, right = torch.rand(4, B, generator=generator, device=device) * 2 - 1
    angle, scale = angle * math.radians(augment.rotate), 1 + scale * augment.scale
    down, right = down * augment.shift * 2 / H, right * augment.shift * 2 / W  # affine_grid spans [-1, 1]
    flip_sign = torch.ones(B, device=device)
    if augment.flip:
        flip_sign = 1 - 2 * (torch.rand(B, generator=generator, device=device) < 0.5).float()
    cos, sin = angle.cos() / scale, angle.sin() / scale
    # Source coordinates of output pixel (x, y). The factors H/W and W/H keep rotations rigid in non-square images.
    x_row = torch.stack([flip_sign * cos, -flip_sign * sin * (H / W), -flip_sign * right], dim=1)
    y_row = torch.stack([sin * (W / H), cos, -down], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), list(images_BCHW.shape), align_corners=False)
    padding = "border" if augment.border == "edge" else "zeros"
    return F.grid_sample(images_BCHW, grid, padding_mode=padding, align_corners=False)


def erase(images_BCHW: Tensor, probability: float, generator: Generator) -> Tensor:
    """Random erasing: replace a rectangle of 2 to 33% of the area by normal noise."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    draw = torch.rand(5, B, generator=generator, device=device)
    area = 0.02 + draw[0] * (1 / 3 - 0.02)
    ratio = torch.exp((draw[1] * 2 - 1) * math.log(3.3))  # height over width, from 0.3 to 3.3
    box = _box_masks((area * ratio).sqrt(), (area / ratio).sqrt(), draw[2], draw[3], H, W)
    box = box & (draw[4] < probability)[:, None, None]
    noise = torch.randn(images_BCHW.shape, generator=generator, device=device, dtype=images_BCHW.dtype)
    return torch.where(box[:, None], noise, images_BCHW)


def mixup(images_BCHW: Tensor, targets_BK: Tensor, alpha: float, generator: Generator) -> Batch:
    """λ of each image plus 1 - λ of its neighbour in the batch, and the same blend of the targets."""
    lam = _sample_beta(alpha, len(images_BCHW), generator, images_BCHW.device)
    images = torch.lerp(images_BCHW.roll(1, 0), images_BCHW, lam[:, None, None, None].to(images_BCHW.dtype))
    return images, torch.lerp(targets_BK.roll(1, 0), targets_BK, lam[:, None].to(targets_BK.dtype))


def cutmix(images_BCHW: Tensor, targets_BK: Tensor, alpha: float, generator: Generator) -> Batch:
    """Paste a rectangle of the neighbour in the batch; blend the targets by the area that was replaced."""
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    side = (1 - _sample_beta(alpha, B, generator, device)).sqrt()
    top, left = torch.rand(2, B, generator=generator, device=device)
    box = _box_masks(side, side, top, left, H, W)
    lam = 1 - box.float().mean(dim=(1, 2))
    images = torch.where(box[:, None], images_BCHW.roll(1, 0), images_BCHW)
    return images, torch.lerp(targets_BK.roll(1, 0), targets_BK, lam[:, None].to(targets_BK.dtype))


def _box_masks(height_B: Tensor, width_B: Tensor, top_B: Tensor, left_B: Tensor, H: int, W: int) -> Tensor:
    """(B, H, W), true inside a rectangle. Sizes are fractions of the image, positions fractions of the free space."""
    heights, widths = (height_B * H).round().clamp(max=H), (width_B * W).round().clamp(max=W)
    tops, lefts = ((H - heights + 1) * top_B).floor(), ((W - widths + 1) * left_B).floor()
    y, x = torch.arange(H, device=top_B.device), torch.arange(W, device=top_B.device)
    rows = (y >= tops[:, None]) & (y < (tops + heights)[:, None])
    columns = (x >= lefts[:, None]) & (x < (lefts + widths)[:, None])
    return rows[:, :, None] & columns[:, None, :]


def _sample_beta(alpha: float, count: int, generator: Generator, device: torch.device) -> Tensor:
    """Samples of Beta(α, α): g1 / (g1 + g2) for two Gamma(α) variables."""
    first, second = sample_gammas(alpha, count, generator, device)
    return (first / (first + second)).float()


def sample_gammas(alpha: float, count: int, generator: Generator, device: torch.device) -> Tensor:
    """(2, count) samples of Gamma(α), in fp64: for small α they underflow in fp32."""
    concentration = torch.full((2, count), alpha, device=device, dtype=torch.float64)
    return torch._standard_gamma(concentration, generator=generator)
