"""RandAugment, TrivialAugment and colour jitter: sample an operation and its strength for each image of a batch.

The operations themselves are in image_ops.py. All draws are made on the device, one operation per image.

Shapes:  B images   O operations
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from vitral.data.image_ops import OPS, ApplyOpsFn, apply_ops

NUM_LEVELS = 31  # TrivialAugment's strengths
PolicyName = Literal["none", "randaugment", "trivialaugment"]
OpArguments = dict[str, Tensor]  # operation → (B,) arguments, in the units of `apply_ops`


@dataclass(frozen=True, kw_only=True)
class AutoAugmentPolicy:
    """RandAugment or TrivialAugment.

    RandAugment (arXiv 1909.13719) comes in the two versions that recipes use: big_vision's and AugReg's (magnitudes up
    to 30, always applied), and timm's as in DeiT. timm's "rand-m9-mstd0.5-inc1" is magnitude 9, magnitude_std 0.5,
    increasing, probability 0.5. TrivialAugment (arXiv 2103.10158) uses its "wide" space and has no parameters.
    """

    name: PolicyName = "none"  # automatic augmentation policy
    num_ops: int = 2  # RandAugment: operations applied in sequence
    magnitude: float = 10.0  # RandAugment: strength; 10 is the end of most scales
    magnitude_std: float = 0.0  # RandAugment: standard deviation of the magnitude
    increasing: bool = False  # RandAugment: larger magnitude means stronger for every operation (timm's inc1)
    probability: float = 1.0  # RandAugment: probability of applying a drawn operation

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            raise ValueError(f"augment.policy.name must be one of {', '.join(get_args(PolicyName))}, got {self.name!r}")
        if self.num_ops < 1:
            raise ValueError(f"augment.policy.num_ops must be at least 1, got {self.num_ops}")
        for name, limit in (("magnitude", 30), ("magnitude_std", 30), ("probability", 1)):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"augment.policy.{name} must be from 0 to {limit}, got {getattr(self, name)}")

    def __call__(self, images_BCHW: Tensor, generator: Generator, apply_fn: ApplyOpsFn | None = None) -> Tensor:
        """Augment uint8 images. `apply_fn` replaces `apply_ops`, for a fused kernel."""
        for _ in range(self.num_ops if self.name == "randaugment" else int(self.name == "trivialaugment")):
            images_BCHW = (apply_fn or apply_ops)(images_BCHW, *self.sample_ops(images_BCHW, generator))
        return images_BCHW

    def sample_ops(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Operation (B,), argument (B,) and position (2, B) for each image: the inputs of `apply_ops`."""
        B, device, size = len(images_BCHW), images_BCHW.device, (images_BCHW.shape[2], images_BCHW.shape[3])
        sign_draw, op_draw, *position = torch.rand(4, B, generator=generator, device=device)
        column = (sign_draw >= 0.5).long()
        ops, arguments = op_table(self, size, device)
        if self.name == "trivialaugment":
            column += 2 * torch.randint(0, NUM_LEVELS, (B,), generator=generator, device=device)
        else:
            noise = torch.randn(B, generator=generator, device=device)
            if self.magnitude_std:  # every image has its own magnitude
                per_image = self.op_arguments(self.magnitude + self.magnitude_std * noise, column * 2.0 - 1, size)
                arguments, column = torch.stack(list(per_image.values())), torch.arange(B, device=device)
        row = (op_draw * len(ops)).long().clamp(max=len(ops) - 1)
        op = ops[row]
        if self.probability < 1:
            is_applied = torch.rand(B, generator=generator, device=device) < self.probability
            op = torch.where(is_applied, op, OPS.index("identity"))
        return op, arguments[row, column], torch.stack(position)

    def op_arguments(self, magnitude_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> OpArguments:
        """Arguments of every operation that may be drawn, for the given magnitudes and signs (±1)."""
        if self.name == "trivialaugment":
            return trivialaugment_space(magnitude_B / (NUM_LEVELS - 1), sign_B)
        if self.increasing:
            return increasing_space(magnitude_B.clamp(0, 10) / 10, sign_B, size)
        return augreg_space(magnitude_B.clamp(min=0) / 10, sign_B, size)


@cache
def op_table(policy: AutoAugmentPolicy, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Operations (O,) and their arguments (O, 2 · levels): per level one with negative and one with positive sign.

    Cached, so that a step draws from it with few launches, and kept alive: a captured CUDA graph reads its memory.
    """
    levels = torch.arange(float(NUM_LEVELS)) if policy.name == "trivialaugment" else torch.tensor([policy.magnitude])
    arguments = policy.op_arguments(levels.repeat_interleave(2), torch.tensor([-1.0, 1.0]).repeat(len(levels)), size)
    ops = torch.tensor([OPS.index(name) for name in arguments])
    return ops.to(device), torch.stack(list(arguments.values())).to(device)


def augreg_space(m_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> OpArguments:
    """Search space of big_vision's `randaug` (and TensorFlow's EfficientNet), for magnitudes divided by 10.

    Posterize and solarize are weaker at larger magnitudes, and the enhancement factors 0.1 + 1.8·m are strongest at 0.
    The original's 100 pixels of translation and 40 of cutout are relative to 224.
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


def increasing_space(m_B: Tensor, sign_B: Tensor, size: tuple[int, int]) -> OpArguments:
    """Search space of timm's "inc1", for magnitudes divided by 10."""
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


def trivialaugment_space(m_B: Tensor, sign_B: Tensor) -> OpArguments:
    """TrivialAugment's wide search space, for strengths from 0 to 1."""
    factor, shear, pixels = 1 + sign_B * 0.99 * m_B, sign_B * 0.99 * m_B, (sign_B * 32 * m_B).trunc()
    return {
        "identity": m_B, "autocontrast": m_B, "equalize": m_B,
        "shear_x": shear, "shear_y": shear, "translate_x": pixels, "translate_y": pixels,
        "rotate": sign_B * 135 * m_B,
        "brightness": factor, "color": factor, "contrast": factor, "sharpness": factor,
        "posterize": 8 - (6 * m_B).round(),
        "solarize": 255 * (1 - m_B),
    }  # fmt: skip


def color_jitter(
    images_BCHW: Tensor, strength: float, generator: Generator, apply_fn: ApplyOpsFn | None = None
) -> Tensor:
    """Scale brightness, then contrast, then saturation by factors in [1 - strength, 1 + strength]: uint8 → uint8."""
    B, device = len(images_BCHW), images_BCHW.device
    for name in ("brightness", "contrast", "color"):
        factor = 1 + strength * (torch.rand(B, generator=generator, device=device) * 2 - 1)
        op = torch.full((B,), OPS.index(name), device=device)
        images_BCHW = (apply_fn or apply_ops)(images_BCHW, op, factor, None)
    return images_BCHW
