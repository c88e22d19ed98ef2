"""What all methods share: one signature, and the way from tokens back to pixels.

Shapes:  B images   C channels   H, W pixels   T tokens   h heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError, nearest
from vitral.models.variants.class_and_mean import ClassAndMeanViT
from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import Grid, Trace, ViT, check_divides

Model = Callable[[Tensor], Tensor]  # normalised images B C H W → logits B K; most methods want a ViT


@dataclass(frozen=True, kw_only=True)
class Method:
    """`METHODS["relevance"](model, image, target)`: how much each pixel mattered, in `unit`, as float32.

    `image` is what the model wants, normalised: C H W gives H W, a batch B C H W gives B H W. `target` is a class index
    (or one an image), None for the class that the model itself says. Options are those of the method's own function.
    """

    name: str
    about: str  # one line for people
    heat: Callable[..., Tensor]  # (model, images B C H W, targets B, **options) → B H W
    unit: str  # what the numbers are, and their range
    needs: Literal["trace", "gradients", "answers"]  # of the model
    by_class: bool = True  # whether another target gives another map
    signed: bool = False  # below zero: speaks against the class
    fine: bool = False  # pixel by pixel, and so noisy that a drawing smooths it; the others go patch by patch
    by_captum: bool = False  # which is an extra
    slow: bool = False  # hundreds of forward passes an image

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(name for name, p in signature(self.heat).parameters.items() if p.kind is Parameter.KEYWORD_ONLY)

    def __call__(self, model: Model, image: Tensor, target: int | Tensor | None = None, **options: Any) -> Tensor:
        self.check(model, options)
        images = image if image.ndim == 4 else image[None]
        check_images(model, images)
        with answering(model), torch.inference_mode(False), torch.set_grad_enabled(self.needs == "gradients"):
            images = images.clone() if images.is_inference() else images.detach()
            targets = targets_of(model, images, target) if self.by_class else torch.empty(0)
            heat = self._heat(model, images, targets, options).detach().float()
        return heat if image.ndim == 4 else heat[0]

    def check(self, model: Model, options: dict[str, Any]) -> None:
        """An option that the method does not have, or a model that cannot give what it needs, is refused."""
        for name in options:
            if name not in self.options:
                known = f"it takes {', '.join(self.options)}" if self.options else "it takes none"
                raise VitralError(f"{self.name} has no option {name!r}.{nearest(name, self.options)}", known)
        if self.needs != "answers" and not isinstance(model, ViT):
            raise VitralError(
                f"{self.name} needs {'gradients' if self.needs == 'gradients' else 'the attention'} of a model; "
                "this one only answers (an exported model?)",
                "ask the run it was exported from, or use occlusion, which needs answers alone",
            )

    def _heat(self, model: Model, images: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        try:
            return self.heat(model, images, targets, **options)
        except RuntimeError as error:
            if "inference tensors" not in str(error).lower():
                raise
            raise VitralError(
                f"{self.name} needs gradients, and this model's weights were made in torch.inference_mode",
                "load the model outside of it",
            ) from error


def check_images(model: Model, images_BCHW: Tensor) -> None:
    """Images that do not fit the model are refused in one sentence."""
    if not isinstance(model, ViT):
        return
    C, shape = model.config.channels, tuple(images_BCHW.shape)
    if len(shape) != 4 or shape[1] != C:
        raise VitralError(
            f"this model wants images with {C} channel{'s' if C > 1 else ''}: {C} height width, not "
            f"{' '.join(map(str, shape[1:]))}",
            "explain(predictor, picture) converts pictures of any kind",
        )
    try:
        check_divides(shape[2:], model.config.patch_size)
    except ValueError as error:
        raise VitralError(str(error), "explain(predictor, picture) scales pictures of any size") from error


@contextmanager
def answering(model: Model) -> Iterator[None]:
    """Without dropout and stochastic depth; afterwards as it was."""
    training = isinstance(model, torch.nn.Module) and model.training
    if isinstance(model, torch.nn.Module) and training:
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, torch.nn.Module) and training:
            model.train()


def targets_of(model: Model, images_BCHW: Tensor, target: int | Tensor | None) -> Tensor:
    """B class indices: those asked for, or what the model says."""
    if target is None:
        with torch.no_grad():
            return model(images_BCHW).argmax(dim=1)
    targets = torch.as_tensor(target, device=images_BCHW.device).expand(len(images_BCHW))
    classes = model.config.classes if isinstance(model, ViT) else None
    if classes is not None and not ((targets >= 0) & (targets < classes)).all():
        raise VitralError(
            f"there is no class {target}: the model has {classes}, counted from 0 to {classes - 1}",
            "None: the class that it says",
        )
    return targets


def gradients(trace: Trace, targets_B: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    """Of each image's logit for its target, with respect to tensors of its trace; zero where it does not depend."""
    score = trace.logits.gather(1, targets_B[:, None]).sum()
    return torch.autograd.grad(score, of, materialize_grads=True)


def traced(model: ViT, images_BCHW: Tensor) -> Trace:
    """A trace that gradients run through, whatever parameters are frozen."""
    return model.trace(images_BCHW.requires_grad_(torch.is_grad_enabled()))


def readout(model: ViT, trace: Trace) -> Tensor:
    """B T: how much of the answer is read off each token after the last block; each row sums to one.

    The class token, the mean of the patches, or what attention pooling looked at, its heads' mean.
    """
    first = trace.attention[0]
    read = first.new_zeros(first.shape[0], first.shape[-1], dtype=torch.float32)
    if trace.pooling:
        read[:, trace.prefix :] = trace.pooling[0].float().mean(dim=1)[:, 0]
    elif isinstance(model, DistilledViT):
        read[:, :2] = 1 / 2  # class and distillation token
    elif isinstance(model, ClassAndMeanViT):
        read[:, 0] = 1 / 2
        read[:, trace.prefix :] = 1 / 2 / (read.shape[1] - trace.prefix)
    elif model.config.pooling == "class":
        read[:, 0] = 1
    else:
        read[:, trace.prefix :] = 1 / (read.shape[1] - trace.prefix)
    return read


def to_pixels(heat_BN: Tensor, grid: Grid, images_BCHW: Tensor, margin: int = 0) -> Tensor:
    """One number a patch → one a pixel, B H W: bilinear between the patches' middles, the same beyond the last."""
    size = [side - 2 * margin for side in images_BCHW.shape[2:]]
    heat = heat_BN.float().unflatten(-1, grid)[:, None]
    heat = F.interpolate(heat, size=size, mode="bilinear", align_corners=False)
    return F.pad(heat, (margin,) * 4, mode="replicate")[:, 0]


def grid_of(model: Model, images_BCHW: Tensor) -> Grid:
    """Patches down and across; about fourteen on the shorter side for a model that does not say."""
    H, W = images_BCHW.shape[2:]
    if isinstance(model, ViT):
        return H // model.config.patch_size, W // model.config.patch_size
    side = max(min(H, W) // 14, 1)
    return -(-H // side), -(-W // side)


def chosen(what: str, number: int | None, count: int) -> int | None:
    """The index of the layer or head with this number, counted from 1 as the paper does."""
    if number is None:
        return None
    if not 1 <= number <= count:
        raise VitralError(
            f"there is no {what} {number}: the model has {count}, counted from 1 to {count}",
            f"choose from these, or leave --{what} out",
        )
    return number - 1


def scaled(heat_BHW: Tensor, signed: bool = False) -> Tensor:
    """For drawing, image by image: 0…1 from the least to the most, or -1…1 with zero where it was."""
    flat = heat_BHW.flatten(-2)
    if signed:
        return heat_BHW / flat.abs().amax(dim=-1).clamp_min(1e-12)[..., None, None]
    low, high = flat.amin(dim=-1)[..., None, None], flat.amax(dim=-1)[..., None, None]
    return (heat_BHW - low) / (high - low).clamp_min(1e-12)
