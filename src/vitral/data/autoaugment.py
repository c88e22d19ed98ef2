"""RandAugment, TrivialAugment and colour jitter for whole batches on the device: one draw an image, none waited for.

Each image draws its own operation. Taken one by one that would be a loop; here all operations are three steps, and on
a GPU every image goes through each:

    one affine map            shear, translate, rotate
    one table of 256 values   brightness, contrast, posterize, solarize, invert, autocontrast, equalize
    one blend                 colour (with gray), sharpness (with a smoothed image)

Each operation means what Pillow means by it, on 8-bit values, within one of 255.

Shapes:  B images   C channels   H, W pixels   O operations
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "posterize",
    "solarize", "solarize_add", "invert", "autocontrast", "equalize", "color", "sharpness", "cutout",
)  # fmt: skip
MOVING = OPERATIONS[1:6]
LOOKED_UP = OPERATIONS[6:14]
APART = (("brightness", *OPERATIONS[8:12]), ("contrast",), OPERATIONS[12:14])  # only some need to know the whole image
STRENGTHS = 31  # that TrivialAugment draws from
Name = Literal["none", "randaugment", "trivialaugment"]
GRAY = 128  # what comes in from outside, as in AugReg; DeiT takes the mean colour
AT_ONCE, AT_ONCE_CPU = 128, 8  # images: on a GPU bounds the memory, on a CPU keeps what lies between in the cache
Arguments = dict[str, Tensor]  # operation → B: degrees, pixels, a factor, bits, a threshold: see `apply`
Operate = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # `apply`, or a kernel that does the same


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Random operations of a fixed list, on each image its own.

    RandAugment (arXiv 1909.13719) in the two dialects that recipes are written in: magnitudes of big_vision and
    AugReg (not increasing, up to 30, always applied), and timm's, which DeiT uses, "rand-m9-mstd0.5-inc1": increasing,
    magnitude 9, spread 0.5, probability 0.5. TrivialAugment (arXiv 2103.10158) is its wide space and needs no number.
    """

    name: Name = "none"
    layers: int = 2  # RandAugment: operations one after the other
    magnitude: float = 10.0  # RandAugment: how strong, 10 being the end of most scales
    spread: float = 0.0  # RandAugment: standard deviation of the magnitude
    increasing: bool = False  # RandAugment: a larger magnitude is a stronger change, in each operation, and at most 10
    probability: float = 1.0  # RandAugment: with which a drawn operation is really done

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise ValueError(f"augment.policy.name must be one of {', '.join(get_args(Name))}, not {self.name!r}")
        if self.layers < 1:
            raise ValueError(f"augment.policy.layers must be at least 1, not {self.layers}")
        for name, most in (("magnitude", 30), ("spread", 30), ("probability", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"augment.policy.{name} must be from 0 to {most}, not {getattr(self, name)}")

    def __call__(self, images_BCHW: Tensor, generator: Generator, operate: Operate | None = None) -> Tensor:
        """uint8 → uint8."""
        for _ in range(self.layers if self.name == "randaugment" else int(self.name == "trivialaugment")):
            images_BCHW = (operate or apply)(images_BCHW, *self.drawn(images_BCHW, generator))
        return images_BCHW

    def drawn(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """For each image its operation, its argument and a place: what `apply` asks for."""
        B, device, size = len(images_BCHW), images_BCHW.device, (images_BCHW.shape[2], images_BCHW.shape[3])
        coin, which, *place = torch.rand(4, B, generator=generator, device=device)
        column = (coin >= 0.5).long()
        operations, arguments = choices(self, size, device)
        if self.name == "trivialaugment":
            column += 2 * torch.randint(0, STRENGTHS, (B,), generator=generator, device=device)
        else:
            noise = torch.randn(B, generator=generator, device=device)
            if self.spread:  # each image has strengths of its own
                of_images = self.arguments(self.magnitude + self.spread * noise, column * 2.0 - 1, size)
                arguments, column = torch.stack(list(of_images.values())), torch.arange(B, device=device)
        row = (which * len(operations)).long().clamp(max=len(operations) - 1)
        operation = operations[row]
        if self.probability < 1:
            done = torch.rand(B, generator=generator, device=device) < self.probability
            operation = torch.where(done, operation, OPERATIONS.index("identity"))
        return operation, arguments[row, column], torch.stack(place)

    def arguments(self, level_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> Arguments:
        """Of each operation that may be drawn."""
        if self.name == "trivialaugment":
            return trivial(level_B / (STRENGTHS - 1), sign_B)
        if self.increasing:
            return increasing(level_B.clamp(0, 10) / 10, sign_B, size)
        return as_augreg(level_B.clamp(min=0) / 10, sign_B, size)


@cache
def choices(policy: Policy, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """O operations, and their arguments, O × 2·strengths: for each that may be drawn to the left, then to the right.

    Made once, so that a step draws from it with few launches; and kept: a recorded step reads it where it is."""
    levels = torch.arange(float(STRENGTHS)) if policy.name == "trivialaugment" else torch.tensor([policy.magnitude])
    arguments = policy.arguments(levels.repeat_interleave(2), torch.tensor([-1.0, 1.0]).repeat(len(levels)), size)
    operations = torch.tensor([OPERATIONS.index(name) for name in arguments])
    return operations.to(device), torch.stack(list(arguments.values())).to(device)


def as_augreg(m_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> Arguments:
    """The space of big_vision's `randaug` (and of TensorFlow's EfficientNet): a tenth of the magnitude → arguments.

    Its posterize and solarize are weaker at larger magnitudes, and its factors of 0.1 + 1.8·m change most at 0. Its 100
    pixels of translation and 40 of cutout are of 224.
    """
    H, W = size
    factor = 0.1 + 1.8 * m_B
    return {
        "autocontrast": m_B, "equalize": m_B, "invert": m_B,
        "rotate": sign_B * 30 * m_B,
        "posterize": (4 * m_B).floor().clamp(max=8),
        "solarize": (256 * m_B).floor(),
        "solarize_add": (110 * m_B).floor(),
        "color": factor, "contrast": factor, "brightness": factor, "sharpness": factor,
        "shear_x": sign_B * 0.3 * m_B, "shear_y": sign_B * 0.3 * m_B,
        "translate_x": sign_B * 100 / 224 * W * m_B, "translate_y": sign_B * 100 / 224 * H * m_B,
        "cutout": (40 / 224 * min(size) * m_B).floor(),
    }  # fmt: skip


def increasing(m_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> Arguments:
    """The space of timm's "inc1"."""
    H, W = size
    factor = (1 + sign_B * 0.9 * m_B).clamp(min=0.1)
    return {
        "autocontrast": m_B, "equalize": m_B, "invert": m_B,
        "rotate": sign_B * 30 * m_B,
        "posterize": 4 - (4 * m_B).floor(),
        "solarize": 256 - (256 * m_B).floor(),
        "solarize_add": (110 * m_B).floor(),
        "color": factor, "contrast": factor, "brightness": factor, "sharpness": factor,
        "shear_x": sign_B * 0.3 * m_B, "shear_y": sign_B * 0.3 * m_B,
        "translate_x": sign_B * 0.45 * W * m_B, "translate_y": sign_B * 0.45 * H * m_B,
    }  # fmt: skip


def trivial(m_B: Tensor, sign_B: Tensor) -> Arguments:
    """TrivialAugment's wide space: one operation, of a strength from nothing to far beyond RandAugment's."""
    factor, shear, pixels = 1 + sign_B * 0.99 * m_B, sign_B * 0.99 * m_B, (sign_B * 32 * m_B).trunc()
    return {
        "identity": m_B, "autocontrast": m_B, "equalize": m_B,
        "shear_x": shear, "shear_y": shear, "translate_x": pixels, "translate_y": pixels,
        "rotate": sign_B * 135 * m_B,
        "brightness": factor, "color": factor, "contrast": factor, "sharpness": factor,
        "posterize": 8 - (6 * m_B).round(),
        "solarize": 255 * (1 - m_B),
    }  # fmt: skip


def jitter(images_BCHW: Tensor, strength: float, generator: Generator, operate: Operate | None = None) -> Tensor:
    """uint8 → uint8: brightness, then contrast, then colour, each by a factor from 1 - strength to 1 + strength."""
    B, device = len(images_BCHW), images_BCHW.device
    for name in ("brightness", "contrast", "color"):
        factor = 1 + strength * (torch.rand(B, generator=generator, device=device) * 2 - 1)
        operation = torch.full((B,), OPERATIONS.index(name), device=device)
        images_BCHW = (operate or apply)(images_BCHW, operation, factor, None)
    return images_BCHW


def apply(images_BCHW: Tensor, operation_B: Tensor, argument_B: Tensor, place_2B: Tensor | None = None) -> Tensor:
    """uint8 → uint8: to each image its operation, by its place in OPERATIONS.

    The argument is a factor for brightness, contrast, color and sharpness (1 changes nothing), pixels for translate
    and for half the side of cutout, degrees counter-clockwise for rotate, x over y for shear, bits kept for posterize,
    a threshold for solarize, an amount for solarize_add. `place` is where cutout's middle is, from 0 to 1.
    """

    def of(*names: str) -> Tensor:
        """B: whether the image's operation is one of these."""
        return torch.stack([operation_B == OPERATIONS.index(name) for name in names]).any(dim=0)

    def argument(name: str) -> Tensor:
        return torch.where(of(name), argument_B, 0.0)

    images = images_BCHW.clone()
    shear, pixels = (argument("shear_x"), argument("shear_y")), (argument("translate_x"), argument("translate_y"))
    change(images, of(*MOVING), move, *shear, *pixels, argument("rotate"))
    for names in APART if images.device.type == "cpu" else (LOOKED_UP,):
        change(images, of(*names), partial(look_up, names), operation_B, argument_B)
    change(images, of("color"), lambda values, factor: blend(luma(values), values, factor), argument_B)
    change(images, of("sharpness"), lambda values, factor: blend(smooth(values), values, factor), argument_B)
    if place_2B is not None:
        change(images, of("cutout"), cut_out, argument_B, *place_2B)
    return images


def change(images_BCHW: Tensor, which_B: Tensor, how: Callable[..., Tensor], *values_B: Tensor) -> None:
    """Change some images in place. A CPU computes only those; a GPU would have to wait to know which, so it computes
    all and keeps what is wanted, some images at a time to bound the memory."""
    if images_BCHW.device.type == "cpu":
        which = which_B.nonzero().flatten()
        for rows in which.split(AT_ONCE_CPU) if len(which) else ():
            images_BCHW[rows] = how(images_BCHW[rows].float(), *(values[rows] for values in values_B)).to(torch.uint8)
        return
    for images, which, *values in zip(*(x.split(AT_ONCE) for x in (images_BCHW, which_B, *values_B)), strict=True):
        images.copy_(torch.where(which[:, None, None, None], how(images.float(), *values).to(torch.uint8), images))


def cut_out(values_BCHW: Tensor, half_B: Tensor, down_B: Tensor, right_B: Tensor) -> Tensor:
    """A gray square whose middle may be anywhere, also at the border."""
    H, W = values_BCHW.shape[2:]
    y, x = torch.arange(H, device=half_B.device) + 0.5, torch.arange(W, device=half_B.device) + 0.5
    rows = ((down_B * H).floor()[:, None] - y).abs() < half_B[:, None]
    columns = ((right_B * W).floor()[:, None] - x).abs() < half_B[:, None]
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], GRAY, values_BCHW)


def move(
    values_BCHW: Tensor, shear_x: Tensor, shear_y: Tensor, right: Tensor, below: Tensor, degrees: Tensor
) -> Tensor:
    """Whole values, as float: shear about the top left corner, shift, turn about the middle; one bilinear sampling."""
    B, C, H, W = values_BCHW.shape
    turn = degrees * (math.pi / 180)
    cos, sin = turn.cos(), turn.sin()
    # From an output pixel (x, y) to where it is read, in pixels: x' = cos·x + across·y + right
    across, down = shear_x - sin, shear_y + sin
    right = W / 2 * (1 - cos) + H / 2 * sin + right
    below = H / 2 * (1 - cos) - W / 2 * sin + below
    across, down = across * (H / W), down * (W / H)  # affine_grid spans [-1, 1] both ways
    x_row = torch.stack([cos, across, cos + across + right * (2 / W) - 1], dim=1)
    y_row = torch.stack([down, cos, cos + down + below * (2 / H) - 1], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), [B, C, H, W], align_corners=False)
    return F.grid_sample(values_BCHW - GRAY, grid, align_corners=False).add_(GRAY).round_()


def luma(values_BCHW: Tensor) -> Tensor:
    """B 1 H W, whole: Pillow's gray, ITU-R 601 in 16-bit fractions."""
    if values_BCHW.shape[1] != 3:
        return values_BCHW.mean(dim=1, keepdim=True).round_()
    red, green, blue = values_BCHW.split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor_()  # below 2²⁴: exact in fp32


def smooth(values_BCHW: Tensor) -> Tensor:
    """Pillow's SMOOTH: the pixel five times and its neighbours once; the outermost pixels stay."""
    if min(values_BCHW.shape[2:]) < 3:
        return values_BCHW
    rows = values_BCHW[:, :, :-2] + values_BCHW[:, :, 1:-1] + values_BCHW[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values_BCHW[:, :, 1:-1, 1:-1]
    result = values_BCHW.clone()
    result[:, :, 1:-1, 1:-1] = (sums / 13 + 0.5).floor_()
    return result


def blend(other: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """Pillow's: towards `values` and beyond, cut off to whole values from 0 to 255."""
    return (values - other).mul_(factor.view(-1, 1, 1, 1)).add_(other).clamp_(0, 255).trunc_()


def look_up(names: tuple[str, ...], values_BCHW: Tensor, operation_B: Tensor, argument_B: Tensor) -> Tensor:
    """Each value through the image's own table of 256, for operations of these names."""
    B, C = values_BCHW.shape[:2]
    starts = torch.arange(0, B * C * 256, 256, device=values_BCHW.device, dtype=torch.int32)
    places = (values_BCHW.to(torch.int32) + starts.view(B, C, 1, 1)).flatten()
    table = tables(names, values_BCHW, places, operation_B, argument_B)
    return table.flatten().index_select(0, places).view_as(values_BCHW)


def tables(
    names: tuple[str, ...], values_BCHW: Tensor, places: Tensor, operation_B: Tensor, argument_B: Tensor
) -> Tensor:
    """B C 256: what each value becomes."""
    B, C = values_BCHW.shape[:2]
    v, a = torch.arange(256.0, device=argument_B.device), argument_B[:, None, None]
    step = 2 ** (8 - a)
    made = {
        "posterize": (v / step).floor() * step,
        "solarize": torch.where(v < a, v, 255 - v),
        "solarize_add": torch.where(v < 128, (v + a).clamp(max=255), v),
        "invert": 255 - v,
        "brightness": (a * v).clamp(0, 255).trunc(),
    }
    if "contrast" in names:
        middle = (luma(values_BCHW).mean(dim=(2, 3), dtype=torch.float64) + 0.5).floor().float()[:, :, None]
        made["contrast"] = (middle + a * (v - middle)).clamp(0, 255).trunc()
    if "equalize" in names:
        one = torch.ones((), device=places.device).expand(places.shape)
        counts = torch.zeros(B * C * 256, device=places.device).scatter_add_(0, places.long(), one).view(B, C, 256)
        made |= {"autocontrast": stretched(counts), "equalize": equalized(counts)}
    result = v.expand(B, C, 256)
    for name in names:
        result = torch.where((operation_B == OPERATIONS.index(name))[:, None, None], made[name], result)
    return result


def stretched(counts_BC256: Tensor) -> Tensor:
    """autocontrast: the darkest value becomes 0, the brightest 255."""
    v = torch.arange(256, device=counts_BC256.device, dtype=torch.float64)
    there = counts_BC256 > 0
    low = torch.where(there, v, 255).amin(dim=2, keepdim=True)
    high = torch.where(there, v, 0).amax(dim=2, keepdim=True)
    scale = torch.full_like(high, 255) / (high - low).clamp(min=1)  # 255 / x would be rounded twice
    return torch.where(high > low, (v * scale - low * scale).trunc().clamp(0, 255), v).float()


def equalized(counts_BC256: Tensor) -> Tensor:
    """equalize: as many pixels above as below, in whole numbers as Pillow counts them."""
    v = torch.arange(256, device=counts_BC256.device)
    counts = counts_BC256.long()
    brightest = torch.where(counts > 0, v, 0).amax(dim=2, keepdim=True)
    step = (counts.sum(dim=2, keepdim=True) - counts.gather(2, brightest)) // 255
    below = counts.cumsum(dim=2) - counts
    flat = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, flat, v).float()
