"""Augmented views of unlabelled images: multi-crop with colour jitter, blur and solarisation, in batches on the device.

Multi-crop is from SwAV (arXiv 2006.09882, section 3.2), the probabilities from BYOL (arXiv 2006.07733, appendix B), and
both together from DINO (arXiv 2104.14294, section 3.1 and its code). Every parameter of every view of every image is
an independent draw. All random numbers come from the generator passed in, so that a run can be repeated and resumed
exactly; nothing synchronises with the host or has a shape that depends on data, so that a CUDA graph can contain it.

Shapes:  B images   G global and L local views per image   V views   C channels   H, W pixels   h, w pixels of a view
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from vitral.data.augment import content_boxes
from vitral.data.preprocess import Preprocessing
from vitral.ssl.colors import ColorDraws, adjust_brightness_and_contrast, adjust_colors, shift_hue, solarize
from vitral.ssl.crops import Boxes, Size, blur_matrix, blur_radius, blur_taps, crop_boxes, resample, resample_matrices

PROBABILITIES = (
    "flip", "jitter_prob", "grayscale", "blur_first", "blur_second", "blur_local", "solarize_first",
    "solarize_second", "solarize_local",
)  # fmt: skip
JITTER_STRENGTHS = ("brightness", "contrast", "saturation", "hue")
NUM_DRAWS = 14  # per view, see `_Draws`


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """Views of each image for self-supervised learning. The defaults are DINO's, for photographs of 224 pixels.

    Saturation, hue, greyscale and solarisation change 8-bit RGB images only; others keep their colours.
    """

    global_views: int = 2  # large crops per image, of the model's image size
    local_views: int = 8  # small crops per image; 0: none
    local_size: float = 0.43  # side of local views as a fraction of the image size, rounded to whole patches
    global_min_area: float = 0.25  # smallest fraction of the image's area in a global view
    global_max_area: float = 1.0  # largest fraction of the image's area in a global view
    local_min_area: float = 0.05  # smallest fraction of the image's area in a local view
    local_max_area: float = 0.25  # largest fraction of the image's area in a local view
    max_ratio: float = 4 / 3  # crops are stretched by up to this factor in either direction
    flip: float = 0.5  # probability of a horizontal flip
    jitter_prob: float = 0.8  # probability of colour jitter: brightness, contrast, saturation and hue together
    brightness: float = 0.4  # brightness jitter; 0.4: times 0.6 to 1.4
    contrast: float = 0.4  # contrast jitter; 0.4: times 0.6 to 1.4
    saturation: float = 0.2  # saturation jitter; 0.2: times 0.8 to 1.2
    hue: float = 0.1  # hue jitter; 0.1: rotated by up to a tenth of a turn in either direction
    grayscale: float = 0.2  # probability of greyscale
    blur_first: float = 1.0  # probability of Gaussian blur in the first global view
    blur_second: float = 0.1  # probability of Gaussian blur in the other global views
    blur_local: float = 0.5  # probability of Gaussian blur in local views
    blur_min_sigma: float = 0.1  # smallest standard deviation of the blur, in pixels
    blur_max_sigma: float = 2.0  # largest standard deviation of the blur, in pixels
    solarize_first: float = 0.0  # probability of solarisation in the first global view
    solarize_second: float = 0.2  # probability of solarisation in the other global views
    solarize_local: float = 0.0  # probability of solarisation in local views

    def __post_init__(self) -> None:
        if self.global_views < 1:
            raise ValueError(f"views.global_views must be at least 1, got {self.global_views}")
        if self.local_views < 0:
            raise ValueError(f"views.local_views must be at least 0, got {self.local_views}")
        for name in PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"views.{name} must be a probability from 0 to 1, got {getattr(self, name)}")
        for name in JITTER_STRENGTHS:
            limit = 0.5 if name == "hue" else 1
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"views.{name} must be from 0 to {limit}, got {getattr(self, name)}")
        if not 0 < self.local_size <= 1:
            raise ValueError(f"views.local_size must be above 0 and at most 1, got {self.local_size}")
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(f"views.max_ratio must be a finite number of at least 1, got {self.max_ratio}")
        for kind in ("global", "local"):
            low, high = getattr(self, f"{kind}_min_area"), getattr(self, f"{kind}_max_area")
            if not 0 < low <= 1:
                raise ValueError(f"views.{kind}_min_area must be above 0 and at most 1, got {low}")
            if not low <= high <= 1:
                raise ValueError(f"views.{kind}_max_area must be from {kind}_min_area ({low}) to 1, got {high}")
        if not 0 < self.blur_min_sigma < math.inf:
            raise ValueError(f"views.blur_min_sigma must be above 0 and finite, got {self.blur_min_sigma}")
        if not self.blur_min_sigma <= self.blur_max_sigma < math.inf:
            raise ValueError(
                f"views.blur_max_sigma must be finite and at least blur_min_sigma ({self.blur_min_sigma}), "
                f"got {self.blur_max_sigma}"
            )

    def local_image_size(self, image_size: Size, patch_size: int) -> Size:
        """Height and width of local views: `local_size` of the image size, in whole patches, at least one."""
        height, width = (max(1, round(side * self.local_size / patch_size)) * patch_size for side in image_size)
        return height, width


class Views(NamedTuple):
    """Normalised views in fp32. `local_views` has L = 0 if the configuration has none."""

    global_views: Tensor  # (B, G, C, H, W)
    local_views: Tensor  # (B, L, C, h, w)


class ViewConstants(NamedTuple):
    """Tensors that are the same in every step. Cached, because a CUDA graph capture must not copy from the host."""

    global_taps: tuple[Tensor, Tensor]  # of the blur along rows and columns, see `blur_taps`
    local_taps: tuple[Tensor, Tensor]
    mean: Tensor
    std: Tensor


RenderFn = Callable[[ViewConfig, Preprocessing, Tensor, Boxes, Tensor, ViewConstants], Views]


@torch.no_grad()
def make_views(
    config: ViewConfig,
    preprocessing: Preprocessing,
    images_BCHW: Tensor,
    generator: Generator,
    *,
    patch_size: int,
    render_fn: RenderFn | None = None,
) -> Views:
    """Images, not normalised → global and local views, normalised.

    Global views have the size of the model, or with native resizing that of the batch; local views are a fraction of
    it. Crops of padded images stay inside the padding. `render_fn` replaces `render_views`, for a compiled version.
    """
    if images_BCHW.dtype == torch.uint16:
        images_BCHW = images_BCHW.float()  # exact; few operations support torch.uint16
    is_native, device = preprocessing.resize == "native", images_BCHW.device
    size: Size = (images_BCHW.shape[2], images_BCHW.shape[3]) if is_native else preprocessing.image_size
    constants = view_constants(preprocessing, size, config.local_image_size(size, patch_size), device)
    draws = draw_views(config, len(images_BCHW), generator, device)
    content = image_content(images_BCHW, preprocessing)
    with torch.autocast(device.type, enabled=False):  # bf16 would round pixels
        return (render_fn or render_views)(config, preprocessing, images_BCHW, content, draws, constants)


def view_constants(preprocessing: Preprocessing, size: Size, local_size: Size, device: torch.device) -> ViewConstants:
    """The constants of views of these sizes."""
    global_taps, local_taps = (
        (
            blur_taps(height, blur_radius((height, width)), device),
            blur_taps(width, blur_radius((height, width)), device),
        )
        for height, width in (size, local_size)
    )
    return ViewConstants(global_taps, local_taps, *preprocessing.mean_and_std(device))


def draw_views(config: ViewConfig, num_images: int, generator: Generator, device: torch.device) -> Tensor:
    """(14, B, G + L): all random numbers of the views, in one call."""
    num_views = config.global_views + config.local_views
    return torch.rand(NUM_DRAWS, num_images, num_views, generator=generator, device=device)


def render_views(
    config: ViewConfig,
    preprocessing: Preprocessing,
    images_BCHW: Tensor,
    content: Boxes,
    draws_14BV: Tensor,
    constants: ViewConstants,
) -> Views:
    """The views that the draws determine. Uses neither a generator nor a cache, so that torch.compile can fuse it."""
    global_draws, local_draws = draws_14BV.split([config.global_views, config.local_views], dim=2)
    global_kind, local_kind = _view_kinds(config, constants)
    arguments = (config, preprocessing, images_BCHW, content, constants)
    return Views(_render_kind(global_kind, global_draws, *arguments), _render_kind(local_kind, local_draws, *arguments))


class _ViewKind(NamedTuple):
    """What differs between global and local views. Probabilities are those of the first and of the other views."""

    taps: tuple[Tensor, Tensor]
    min_area: float
    max_area: float
    blur: tuple[float, float]
    solarize: tuple[float, float]

    @property
    def size(self) -> Size:
        rows, columns = self.taps
        return rows.shape[1], columns.shape[1]


def _view_kinds(config: ViewConfig, constants: ViewConstants) -> tuple[_ViewKind, _ViewKind]:
    blur, local_blur = (config.blur_first, config.blur_second), (config.blur_local,) * 2
    solarize, local_solarize = (config.solarize_first, config.solarize_second), (config.solarize_local,) * 2
    return (
        _ViewKind(constants.global_taps, config.global_min_area, config.global_max_area, blur, solarize),
        _ViewKind(constants.local_taps, config.local_min_area, config.local_max_area, local_blur, local_solarize),
    )


class _Draws(NamedTuple):
    """Uniform draws from 0 to 1 for each view, (B, V) each. All are drawn whether the configuration needs them or not,
    so that a parameter does not change the others."""

    area: Tensor
    ratio: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor
    jitter: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    grayscale: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor


def _render_kind(
    kind: _ViewKind,
    draws_14BV: Tensor,
    config: ViewConfig,
    preprocessing: Preprocessing,
    images_BCHW: Tensor,
    content: Boxes,
    constants: ViewConstants,
) -> Tensor:
    """(B, V, C, h, w): crop, flip, resize and blur, then colours, then normalisation."""
    B, C, H, W = images_BCHW.shape
    if draws_14BV.shape[2] == 0:
        return torch.zeros(B, 0, C, *kind.size, device=images_BCHW.device)
    draws = _Draws(*draws_14BV)
    boxes = crop_boxes(draws_14BV[:4], content, kind.min_area, kind.max_area, config.max_ratio, kind.size)
    limits = content if preprocessing.resize == "pad" else None
    rows, columns = resample_matrices(boxes, draws.flip < config.flip, (H, W), kind.size, limits)
    if max(kind.blur) > 0:
        sigma = config.blur_min_sigma + draws.sigma * (config.blur_max_sigma - config.blur_min_sigma)
        is_blurred = draws.blur < _per_view(kind.blur, draws.blur)
        rows = blur_matrix(sigma, is_blurred, kind.taps[0]) @ rows
        columns = blur_matrix(sigma, is_blurred, kind.taps[1]) @ columns
    views = resample(images_BCHW, rows, columns, _matmul_dtype(images_BCHW)).float()
    views = _adjust_tones(kind, draws, config, preprocessing, views)
    return (views - constants.mean) / constants.std


def _adjust_tones(
    kind: _ViewKind, draws: _Draws, config: ViewConfig, preprocessing: Preprocessing, views: Tensor
) -> Tensor:
    """Colour jitter, greyscale and solarisation, as far as they are defined for these pixels."""
    is_rgb = preprocessing.channels == 3 and preprocessing.dtype == "uint8"
    has_jitter = config.jitter_prob > 0 and max(getattr(config, name) for name in JITTER_STRENGTHS) > 0
    colors = _color_draws(config, draws)
    if is_rgb and has_jitter and config.hue > 0:
        views = shift_hue(views, colors.hue)
    if is_rgb and (has_jitter or config.grayscale > 0):
        views = adjust_colors(views, colors)
    elif not is_rgb and has_jitter:
        views = adjust_brightness_and_contrast(views, colors)
    if preprocessing.dtype != "float32" and has_jitter:  # the range of other values is unknown
        views = views.clamp(0, preprocessing.pixel_scale)
    if is_rgb and max(kind.solarize) > 0:
        is_solarized = draws.solarize < _per_view(kind.solarize, draws.solarize)
        views = solarize(views, is_solarized, preprocessing.pixel_scale)
    return views


def _color_draws(config: ViewConfig, draws: _Draws) -> ColorDraws:
    """Jitter strengths: uniform around no change for views that are jittered, and none for others."""
    is_jittered = draws.jitter < config.jitter_prob
    brightness, contrast, saturation, hue = (
        torch.where(is_jittered, (2 * getattr(draws, name) - 1) * getattr(config, name), 0.0)
        for name in JITTER_STRENGTHS
    )
    saturation = torch.where(draws.grayscale < config.grayscale, 0.0, 1 + saturation)
    return ColorDraws(1 + brightness, 1 + contrast, saturation, hue)


def _per_view(values: tuple[float, float], draws_BV: Tensor) -> Tensor:
    """(V,): one value for the first view and another one for all others, computed on the device."""
    return torch.where(torch.arange(draws_BV.shape[1], device=draws_BV.device) == 0, *values)


def image_content(images_BCHW: Tensor, preprocessing: Preprocessing) -> Boxes:
    """(B, 1) each: the part of each image inside its padding, or all of it."""
    B, _, H, W = images_BCHW.shape
    if preprocessing.resize == "pad":
        top, bottom, left, right = (
            edge[:, None].float() for edge in content_boxes(images_BCHW, preprocessing.pad_color)
        )
        return Boxes(top, left, bottom - top, right - left)
    zero = torch.zeros(B, 1, device=images_BCHW.device)
    return Boxes(zero, zero, torch.full_like(zero, H), torch.full_like(zero, W))


def _matmul_dtype(images_BCHW: Tensor) -> torch.dtype:
    """fp16 for 8-bit images on a GPU: it holds their values exactly, and results are within 0.3 of 255 of fp32."""
    is_8_bit = images_BCHW.dtype == torch.uint8
    return torch.float16 if is_8_bit and images_BCHW.device.type != "cpu" else torch.float32
