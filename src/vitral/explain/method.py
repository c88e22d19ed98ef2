"""The signature that all methods share, and the mapping from tokens back to pixels.

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

from vitral.errors import VitralError, did_you_mean
from vitral.models.variants.class_and_mean import ClassAndMeanViT
from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import Grid, Trace, ViT, check_divisible

Model = Callable[[Tensor], Tensor]  # normalised images (B, C, H, W) to logits (B, K); most methods need a ViT


@dataclass(frozen=True, kw_only=True)
class Method:
    """`METHODS["relevance"](model, image, target)`: the importance of each pixel in `unit`, as float32.

    `image` is normalised model input: (C, H, W) gives (H, W), a batch (B, C, H, W) gives (B, H, W). `target` is a class
    index, a tensor with one index per image, or None for the predicted class. Options are the keyword-only arguments
    of the method's function.
    """

    name: str
    summary: str  # one line for help texts
    function: Callable[..., Tensor]  # (model, images (B, C, H, W), targets (B,), **options) -> (B, H, W)
    unit: str  # meaning and range of the values
    needs: Literal["trace", "gradients", "logits"]  # what the method needs from the model
    is_class_specific: bool = True  # whether the heatmap depends on the target
    is_signed: bool = False  # negative values are evidence against the class
    is_pixelwise: bool = False  # one value per pixel, smoothed for display; the others have one per patch
    needs_captum: bool = False  # installed by the extra `explain`
    is_slow: bool = False  # hundreds of forward passes per image

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(
            name for name, p in signature(self.function).parameters.items() if p.kind is Parameter.KEYWORD_ONLY
        )

    def __call__(self, model: Model, image: Tensor, target: int | Tensor | None = None, **options: Any) -> Tensor:
        self.check(model, options)
        images = image if image.ndim == 4 else image[None]
        check_images(model, images)
        with eval_mode(model), torch.inference_mode(False), torch.set_grad_enabled(self.needs == "gradients"):
            images = images.clone() if images.is_inference() else images.detach()
            targets = resolve_targets(model, images, target) if self.is_class_specific else torch.empty(0)
            heat = self._call_function(model, images, targets, options).detach().float()
        return heat if image.ndim == 4 else heat[0]

    def check(self, model: Model, options: dict[str, Any]) -> None:
        """Refuse unknown options, and models that do not provide what the method needs."""
        for name in options:
            if name not in self.options:
                hint = f"Options of {self.name}: {', '.join(self.options) or 'none'}"
                raise VitralError(f"{self.name} has no option {name!r}{did_you_mean(name, self.options)}", hint)
        if self.needs != "logits" and not isinstance(model, ViT):
            raise VitralError(
                f"{self.name} needs the {'gradients' if self.needs == 'gradients' else 'attention'} of a ViT, "
                "and this model only returns logits (is it exported?)",
                "Use the run it was exported from, or occlusion, which needs only logits",
            )

    def _call_function(self, model: Model, images: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        try:
            return self.function(model, images, targets, **options)
        except RuntimeError as error:
            if "inference tensors" not in str(error).lower():
                raise
            raise VitralError(
                f"{self.name} needs gradients, but the weights were created in torch.inference_mode",
                "Load the model outside of torch.inference_mode",
            ) from error


def check_images(model: Model, images_BCHW: Tensor) -> None:
    """Refuse images whose channels or size do not fit the model."""
    if not isinstance(model, ViT):
        return
    C, shape = model.config.channels, tuple(images_BCHW.shape)
    if len(shape) != 4 or shape[1] != C:
        raise VitralError(
            f"expected images of shape ({C}, height, width), got {shape[1:]}",
            "Use explain(predictor, image), which converts images of any kind",
        )
    try:
        check_divisible(shape[2:], model.config.patch_size)
    except ValueError as error:
        raise VitralError(str(error), "Use explain(predictor, image), which resizes images of any size") from error


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Switch off dropout and stochastic depth; restore the mode afterwards."""
    training = isinstance(model, torch.nn.Module) and model.training
    if isinstance(model, torch.nn.Module) and training:
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, torch.nn.Module) and training:
            model.train()


def resolve_targets(model: Model, images_BCHW: Tensor, target: int | Tensor | None) -> Tensor:
    """Class indices (B,): the requested ones, or the predicted ones."""
    if target is None:
        with torch.no_grad():
            return model(images_BCHW).argmax(dim=1)
    targets = torch.as_tensor(target, device=images_BCHW.device).expand(len(images_BCHW))
    classes = model.config.num_classes if isinstance(model, ViT) else None
    if classes is not None and not ((targets >= 0) & (targets < classes)).all():
        raise VitralError(
            f"no class {target}: the model has {classes} classes, numbered from 0 to {classes - 1}",
            "Pass None for the predicted class",
        )
    return targets


def logit_gradients(trace: Trace, targets_B: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of each image's target logit with respect to tensors of its trace."""
    score = trace.logits.gather(1, targets_B[:, None]).sum()
    return torch.autograd.grad(score, of, materialize_grads=True)


def trace_with_grad(model: ViT, images_BCHW: Tensor) -> Trace:
    """A trace with gradients, even if all parameters are frozen."""
    return model.trace(images_BCHW.requires_grad_(torch.is_grad_enabled()))


def readout_weights(model: ViT, trace: Trace) -> Tensor:
    """Weight of each token in the pooled feature, (B, T); each row sums to one.

    One for the class token, uniform over the patches for mean pooling, or the mean over heads of the pooling attention.
    """
    first = trace.attention[0]
    weights_BT = first.new_zeros(first.shape[0], first.shape[-1], dtype=torch.float32)
    if trace.pooling:
        weights_BT[:, trace.num_prefix_tokens :] = trace.pooling[0].float().mean(dim=1)[:, 0]
    elif isinstance(model, DistilledViT):
        weights_BT[:, :2] = 1 / 2  # class and distillation token
    elif isinstance(model, ClassAndMeanViT):
        weights_BT[:, 0] = 1 / 2
        weights_BT[:, trace.num_prefix_tokens :] = 1 / 2 / (weights_BT.shape[1] - trace.num_prefix_tokens)
    elif model.config.pooling == "class":
        weights_BT[:, 0] = 1
    else:
        weights_BT[:, trace.num_prefix_tokens :] = 1 / (weights_BT.shape[1] - trace.num_prefix_tokens)
    return weights_BT


def to_pixels(heat_BN: Tensor, grid: Grid, images_BCHW: Tensor, margin: int = 0) -> Tensor:
    """Interpolate values per patch (B, N) to pixels (B, H, W): bilinear between patch centres, constant beyond them."""
    size = [side - 2 * margin for side in images_BCHW.shape[2:]]
    heat = heat_BN.float().unflatten(-1, grid)[:, None]
    heat = F.interpolate(heat, size=size, mode="bilinear", align_corners=False)
    return F.pad(heat, (margin,) * 4, mode="replicate")[:, 0]


def patch_grid(model: Model, images_BCHW: Tensor) -> Grid:
    """Number of patches down and across; about fourteen on the shorter side if the model is not a ViT."""
    H, W = images_BCHW.shape[2:]
    if isinstance(model, ViT):
        return H // model.config.patch_size, W // model.config.patch_size
    side = max(min(H, W) // 14, 1)
    return -(-H // side), -(-W // side)


def index_from_one(what: str, number: int | None, count: int) -> int | None:
    """Zero-based index of a layer or head number, which count from 1 as in the paper."""
    if number is None:
        return None
    if not 1 <= number <= count:
        raise VitralError(
            f"no {what} {number}: the model has {count}, numbered from 1 to {count}",
            f"Choose one of these, or omit --{what}",
        )
    return number - 1


def rescale_for_display(heat_BHW: Tensor, signed: bool = False) -> Tensor:
    """Scale each heatmap for display: to [0, 1], or to [-1, 1] with zero unchanged."""
    flat = heat_BHW.flatten(-2)
    if signed:
        return heat_BHW / flat.abs().amax(dim=-1).clamp_min(1e-12)[..., None, None]
    low, high = flat.amin(dim=-1)[..., None, None], flat.amax(dim=-1)[..., None, None]
    return (heat_BHW - low) / (high - low).clamp_min(1e-12)
