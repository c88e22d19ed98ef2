"""Image operations for automatic augmentation, for batches in which every image has its own operation.

Instead of looping over images, operations are grouped into three computations:

    one affine map            shear, translate, rotate
    one 256-entry table       brightness, contrast, posterize, solarize, invert, autocontrast, equalize
    one blend                 color (with gray), sharpness (with a smoothed image)

Results match Pillow's on 8-bit values within 1 of 255.

Shapes:  B images   C channels   H, W pixels
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

OPS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "posterize",
    "solarize", "solarize_add", "invert", "autocontrast", "equalize", "color", "sharpness", "cutout",
)  # fmt: skip
GEOMETRIC_OPS = OPS[1:6]
LOOKUP_OPS = OPS[6:14]
CPU_LOOKUP_GROUPS = (("brightness", *OPS[8:12]), ("contrast",), OPS[12:14])  # by the image statistics they need
FILL_VALUE = 128  # for pixels from outside the image, as in AugReg; DeiT uses the mean colour
GPU_CHUNK, CPU_CHUNK = 128, 8  # images per chunk: bounds memory on a GPU, keeps intermediates in cache on a CPU

ApplyOpsFn = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # signature of `apply_ops`


def apply_ops(images_BCHW: Tensor, op_B: Tensor, argument_B: Tensor, position_2B: Tensor | None = None) -> Tensor:
    """Apply to each image its operation, given as an index into OPS: uint8 → uint8.

    The argument is a factor for brightness, contrast, color and sharpness (1 is the identity), pixels for translate
    and for half the side of cutout, counter-clockwise degrees for rotate, the slope for shear, remaining bits for
    posterize, the threshold for solarize and the offset for solarize_add. `position_2B` is the centre of cutout as
    fractions of height and width; without it cutout does nothing.
    """

    def has_op(*names: str) -> Tensor:
        """(B,): whether the image's operation is one of `names`."""
        return torch.stack([op_B == OPS.index(name) for name in names]).any(dim=0)

    def argument(name: str) -> Tensor:
        return torch.where(has_op(name), argument_B, 0.0)

    images = images_BCHW.clone()
    shear, pixels = (argument("shear_x"), argument("shear_y")), (argument("translate_x"), argument("translate_y"))
    update_where(images, has_op(*GEOMETRIC_OPS), affine_transform, *shear, *pixels, argument("rotate"))
    for names in CPU_LOOKUP_GROUPS if images.device.type == "cpu" else (LOOKUP_OPS,):
        update_where(images, has_op(*names), partial(apply_lookup_ops, names), op_B, argument_B)
    update_where(images, has_op("color"), lambda values, factor: blend(luma(values), values, factor), argument_B)
    update_where(images, has_op("sharpness"), lambda values, factor: blend(smooth(values), values, factor), argument_B)
    if position_2B is not None:
        update_where(images, has_op("cutout"), cutout, argument_B, *position_2B)
    return images


def update_where(images_BCHW: Tensor, mask_B: Tensor, transform: Callable[..., Tensor], *args_B: Tensor) -> None:
    """Transform the images selected by `mask_B` in place.

    A CPU computes only the selected images. On a GPU, finding out which ones are selected would synchronise with the
    host, so all images are computed and the selected results are copied.
    """
    update = update_selected if images_BCHW.device.type == "cpu" else update_all
    update(images_BCHW, mask_B, transform, *args_B)


def update_selected(images_BCHW: Tensor, mask_B: Tensor, transform: Callable[..., Tensor], *args_B: Tensor) -> None:
    """Compute only the selected images, in chunks that keep intermediates in the cache."""
    selected = mask_B.nonzero().flatten()
    for rows in selected.split(CPU_CHUNK) if len(selected) else ():
        images_BCHW[rows] = transform(images_BCHW[rows].float(), *(arg[rows] for arg in args_B)).to(torch.uint8)


def update_all(images_BCHW: Tensor, mask_B: Tensor, transform: Callable[..., Tensor], *args_B: Tensor) -> None:
    """Compute all images and keep the selected results, in chunks that bound memory."""
    for images, mask, *args in zip(*(x.split(GPU_CHUNK) for x in (images_BCHW, mask_B, *args_B)), strict=True):
        images.copy_(torch.where(mask[:, None, None, None], transform(images.float(), *args).to(torch.uint8), images))


def cutout(values_BCHW: Tensor, half_side_B: Tensor, y_B: Tensor, x_B: Tensor) -> Tensor:
    """Fill a square with gray. Its centre may be anywhere, so that it may extend beyond the image."""
    H, W = values_BCHW.shape[2:]
    y, x = torch.arange(H, device=half_side_B.device) + 0.5, torch.arange(W, device=half_side_B.device) + 0.5
    rows = ((y_B * H).floor()[:, None] - y).abs() < half_side_B[:, None]
    columns = ((x_B * W).floor()[:, None] - x).abs() < half_side_B[:, None]
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], FILL_VALUE, values_BCHW)


def affine_transform(
    values_BCHW: Tensor, shear_x: Tensor, shear_y: Tensor, right: Tensor, below: Tensor, degrees: Tensor
) -> Tensor:
    """Shear about the top left corner, translate and rotate about the centre, in one bilinear sampling.

    Returns integers, as float.
    """
    B, C, H, W = values_BCHW.shape
    angle = degrees * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    # Source coordinates of output pixel (x, y), in pixels: x' = cos·x + across·y + right, y' = down·x + cos·y + below
    across, down = shear_x - sin, shear_y + sin
    right = W / 2 * (1 - cos) + H / 2 * sin + right
    below = H / 2 * (1 - cos) - W / 2 * sin + below
    across, down = across * (H / W), down * (W / H)  # affine_grid spans [-1, 1] on both axes
    x_row = torch.stack([cos, across, cos + across + right * (2 / W) - 1], dim=1)
    y_row = torch.stack([down, cos, cos + down + below * (2 / H) - 1], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), [B, C, H, W], align_corners=False)
    return F.grid_sample(values_BCHW - FILL_VALUE, grid, align_corners=False).add_(FILL_VALUE).round_()


def luma(values_BCHW: Tensor) -> Tensor:
    """(B, 1, H, W) gray values, as integers: Pillow's ITU-R 601 weights in 16-bit fixed point."""
    if values_BCHW.shape[1] != 3:
        return values_BCHW.mean(dim=1, keepdim=True).round_()
    red, green, blue = values_BCHW.split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor_()  # below 2²⁴: exact in fp32


def smooth(values_BCHW: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: weight 5 for the pixel, 1 for its neighbours; border pixels are unchanged."""
    if min(values_BCHW.shape[2:]) < 3:
        return values_BCHW
    rows = values_BCHW[:, :, :-2] + values_BCHW[:, :, 1:-1] + values_BCHW[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values_BCHW[:, :, 1:-1, 1:-1]
    result = values_BCHW.clone()
    result[:, :, 1:-1, 1:-1] = (sums / 13 + 0.5).floor_()
    return result


def blend(other: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """Pillow's blend: other + factor · (values - other), clipped and truncated to integers from 0 to 255."""
    return (values - other).mul_(factor.view(-1, 1, 1, 1)).add_(other).clamp_(0, 255).trunc_()


def apply_lookup_ops(names: tuple[str, ...], values_BCHW: Tensor, op_B: Tensor, argument_B: Tensor) -> Tensor:
    """Map the values of each image through its own 256-entry table, for the operations `names`."""
    B, C = values_BCHW.shape[:2]
    offsets = torch.arange(0, B * C * 256, 256, device=values_BCHW.device, dtype=torch.int32)
    table_index = (values_BCHW.to(torch.int32) + offsets.view(B, C, 1, 1)).flatten()
    tables = lookup_tables(names, values_BCHW, table_index, op_B, argument_B)
    return tables.flatten().index_select(0, table_index).view_as(values_BCHW)


def lookup_tables(
    names: tuple[str, ...], values_BCHW: Tensor, table_index: Tensor, op_B: Tensor, argument_B: Tensor
) -> Tensor:
    """(B, C, 256): the output for each input value. `table_index` is each pixel's index into the flattened tables."""
    B, C = values_BCHW.shape[:2]
    v, a = torch.arange(256.0, device=argument_B.device), argument_B[:, None, None]
    step = 2 ** (8 - a)
    tables = {
        "posterize": (v / step).floor() * step,
        "solarize": torch.where(v < a, v, 255 - v),
        "solarize_add": torch.where(v < 128, (v + a).clamp(max=255), v),
        "invert": 255 - v,
        "brightness": (a * v).clamp(0, 255).trunc(),
    }
    if "contrast" in names:
        mean = (luma(values_BCHW).mean(dim=(2, 3), dtype=torch.float64) + 0.5).floor().float()[:, :, None]
        tables["contrast"] = (mean + a * (v - mean)).clamp(0, 255).trunc()
    if "equalize" in names:
        one = torch.ones((), device=table_index.device).expand(table_index.shape)
        counts = torch.zeros(B * C * 256, device=table_index.device).scatter_add_(0, table_index.long(), one)
        counts = counts.view(B, C, 256)
        tables |= {"autocontrast": autocontrast_table(counts), "equalize": equalize_table(counts)}
    result = v.expand(B, C, 256)
    for name in names:
        result = torch.where((op_B == OPS.index(name))[:, None, None], tables[name], result)
    return result


def autocontrast_table(counts_BC256: Tensor) -> Tensor:
    """Stretch linearly so that the darkest value becomes 0 and the brightest 255."""
    v = torch.arange(256, device=counts_BC256.device, dtype=torch.float64)
    occurs = counts_BC256 > 0
    low = torch.where(occurs, v, 255).amin(dim=2, keepdim=True)
    high = torch.where(occurs, v, 0).amax(dim=2, keepdim=True)
    scale = torch.full_like(high, 255) / (high - low).clamp(min=1)  # 255 / x would be rounded twice
    return torch.where(high > low, (v * scale - low * scale).trunc().clamp(0, 255), v).float()


def equalize_table(counts_BC256: Tensor) -> Tensor:
    """Equalise the histogram with Pillow's integer arithmetic."""
    v = torch.arange(256, device=counts_BC256.device)
    counts = counts_BC256.long()
    brightest = torch.where(counts > 0, v, 0).amax(dim=2, keepdim=True)
    step = (counts.sum(dim=2, keepdim=True) - counts.gather(2, brightest)) // 255
    below = counts.cumsum(dim=2) - counts
    equalized = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, equalized, v).float()
