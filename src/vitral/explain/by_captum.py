"""Methods from captum, which the extra `explain` installs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.explain.method import Model, patch_grid
from vitral.explain.occlusion import patch_masks_to_pixels

MAX_BATCH_SIZE = 64  # images per forward pass


def captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise VitralError("this method requires captum", "pip install 'vitral[explain]'") from error
    return captum.attr


def integrated_gradients(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, steps: int = 32) -> Tensor:
    """Gradients integrated from the mean colour to the image (arXiv 1703.01365), (B, H, W), in logits.

    Their sum is the difference of the logit between the image and the mean colour.
    """
    attributor = captum().IntegratedGradients(model)
    heat = attributor.attribute(
        images_BCHW.requires_grad_(), target=targets_B, n_steps=steps, internal_batch_size=MAX_BATCH_SIZE
    )
    return heat.sum(dim=1)


def smoothgrad(
    model: Model, images_BCHW: Tensor, targets_B: Tensor, *, samples: int = 16, noise: float = 0.15
) -> Tensor:
    """Gradient magnitude averaged over noisy copies (arXiv 1706.03825), (B, H, W), non-negative.

    `noise` is the standard deviation relative to the range of the image.
    """
    attr = captum()
    span = float(images_BCHW.max() - images_BCHW.min())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heat = attr.NoiseTunnel(attr.Saliency(model)).attribute(
            images_BCHW.requires_grad_(),
            target=targets_B,
            nt_type="smoothgrad",
            nt_samples=samples,
            nt_samples_batch_size=max(MAX_BATCH_SIZE // len(images_BCHW), 1),
            stdevs=max(noise * span, 1e-6),
        )
    return heat.sum(dim=1)


def shapley(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, samples: int = 8) -> Tensor:
    """Shapley values of the patches by permutation sampling, (B, H, W), in logits per patch.

    Patches are revealed one after the other in `samples` random orders; the gain of the logit is attributed to the
    revealed patch. As with integrated gradients, the values sum to the difference of the logit.
    """
    grid = patch_grid(model, images_BCHW)
    patches_NHW = patch_masks_to_pixels(torch.eye(grid[0] * grid[1]), grid, images_BCHW)
    patch_index_1HW = patches_NHW.long().argmax(dim=0)[None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heat = (
            captum()
            .ShapleyValueSampling(model)
            .attribute(
                images_BCHW,
                baselines=0.0,
                target=targets_B,
                feature_mask=patch_index_1HW[None],
                n_samples=samples,
                perturbations_per_eval=max(MAX_BATCH_SIZE // len(images_BCHW), 1),
            )
        )
    return heat[:, 0]
