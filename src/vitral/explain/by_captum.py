"""What captum already does well, through it: `pip install 'vitral[explain]'`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.explain.method import Model, grid_of
from vitral.explain.occlusion import nearest_pixels

AT_ONCE = 64  # images in one pass


def captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise VitralError("this method needs captum", "pip install 'vitral[explain]'") from error
    return captum.attr


def integrated_gradients(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, steps: int = 32) -> Tensor:
    """Gradients summed on the way from the mean colour to the picture (arXiv 1703.01365): B H W, in logits.

    Over all pixels they add up to the logit's difference between the picture and the mean colour.
    """
    way = captum().IntegratedGradients(model)
    heat = way.attribute(images_BCHW.requires_grad_(), target=targets_B, n_steps=steps, internal_batch_size=AT_ONCE)
    return heat.sum(dim=1)


def smooth_gradient(
    model: Model, images_BCHW: Tensor, targets_B: Tensor, *, samples: int = 16, noise: float = 0.15
) -> Tensor:
    """How steeply the logit changes with each pixel, averaged over noisy copies (arXiv 1706.03825): B H W, from 0 up.

    `noise` is its deviation as a share of the picture's range.
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
            nt_samples_batch_size=max(AT_ONCE // len(images_BCHW), 1),
            stdevs=max(noise * span, 1e-6),
        )
    return heat.sum(dim=1)


def shapley(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, samples: int = 8) -> Tensor:
    """Each patch's fair share of the logit (Shapley values by sampling orders): B H W, in logits a patch.

    Patches are shown one after the other, the rest in the mean colour, in `samples` random orders; what the logit
    gains is the patch's. The patches' shares add up to the logit's difference, as with integrated gradients.
    """
    grid = grid_of(model, images_BCHW)
    patches_NHW = nearest_pixels(torch.eye(grid[0] * grid[1]), grid, images_BCHW)
    which_1HW = patches_NHW.long().argmax(dim=0)[None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heat = (
            captum()
            .ShapleyValueSampling(model)
            .attribute(
                images_BCHW,
                baselines=0.0,
                target=targets_B,
                feature_mask=which_1HW[None],
                n_samples=samples,
                perturbations_per_eval=max(AT_ONCE // len(images_BCHW), 1),
            )
        )
    return heat[:, 0]
