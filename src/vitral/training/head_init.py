"""Fit a new head to the features of a checkpoint before the first step (`Recipe.head_init`).

A head of zeros learns the classes from scratch, and its first gradients distort the pretrained features (LP-FT, arXiv
2202.10054). Least squares needs one forward pass over the training images and a linear system of D equations.

Shapes:  N training images   D features   K outputs (classes, or targets of a regression)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.datasets import Split
from vitral.data.lazy_images import Images
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import select_rows
from vitral.device.select import Hardware
from vitral.evaluation.ridge import fit_ridge
from vitral.inference.forward import compute_features, gather_shards
from vitral.models.uninitialized import build_uninitialized
from vitral.models.vit import ClassificationHead
from vitral.recipes.schema import Recipe
from vitral.tasks import TASKS
from vitral.tasks.losses import balanced_class_weights, class_balance_terms, per_image_losses
from vitral.utils.bfgs import minimize

MAX_IMAGES = 10_000  # of a larger training set, evenly spaced ones
BATCH_SIZE = 32
SHIFT_PENALTY = 1e-4  # keeps the bias of a class without images finite
SCALE_PENALTY = 1e-4  # bounds the scale of predictions without errors, whose loss has no minimum
HEAD_OUT = re.compile(r"head\.(\w+\.)?out")  # the layers that produce logits: one, or two of a distilled ViT

LossFn = Callable[[Tensor], Tensor]  # logits (N, K) to the mean loss


@dataclass(frozen=True, kw_only=True)
class HeadFit:
    """Initial weights with a fitted head, and how well the fit predicts images that were left out of it."""

    weights: dict[str, Tensor]  # of the whole model
    loss: float  # mean loss of the run
    mean_score: float  # mean of the task's running score
    num_images: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.num_images / self.seconds


def fits_head(recipe: Recipe, initial_weights: dict[str, Tensor]) -> bool:
    """Whether the head is fitted before training: the recipe enables it, and the checkpoint's head lacks a class."""
    if recipe.head_init != "least_squares" or recipe.pretrain is not None:
        return False
    heads = [tensor for name, tensor in initial_weights.items() if HEAD_OUT.fullmatch(name.removesuffix(".weight"))]
    return any(bool((weight == 0).all(dim=1).any()) for weight in heads)


def fit_new_head(
    recipe: Recipe,
    train: Split,
    preprocessing: Preprocessing,
    hardware: Hardware,
    initial_weights: dict[str, Tensor],
) -> HeadFit:
    """Fit the head to the features of training images without augmentation. All ranks compute a share of them.

    The labels of a regression are standardised.
    """
    started = time.perf_counter()
    rows = sample_rows(len(train))
    sample = replace(train, images=select_rows(train.images, rows)) if len(rows) < len(train) else train
    features_ND = head_features(
        recipe, sample.to_model_input(preprocessing).images, preprocessing, hardware, initial_weights
    )
    labels = train.labels[rows]
    loss = partial(run_loss, recipe, labels)
    weight_KD, bias_K, left_out_NK = hardware.world.broadcast_from_rank0(
        lambda: fit_linear_layer(features_ND, labels, recipe, loss)
    )
    return HeadFit(
        weights=initial_weights | head_tensors(initial_weights, weight_KD, bias_K),
        loss=loss(left_out_NK).item(),
        mean_score=TASKS[recipe.task_name].scores(left_out_NK, labels).double().mean().item(),
        num_images=len(rows),
        seconds=time.perf_counter() - started,
    )


def sample_rows(num_images: int) -> Tensor:
    """Indices of at most MAX_IMAGES training images, evenly spaced."""
    count = min(num_images, MAX_IMAGES)
    return torch.arange(count) * num_images // count


def head_features(
    recipe: Recipe,
    images: Images,
    preprocessing: Preprocessing,
    hardware: Hardware,
    initial_weights: dict[str, Tensor],
) -> Tensor:
    """The inputs (N, D) of the head's last layer, in fp32 on the CPU."""
    model = build_uninitialized(recipe.variant, recipe.model)
    model.load_state_dict(initial_weights)
    model.accepts_any_grid = preprocessing.resize == "native"
    model.to(hardware.device)

    def pooled(shard: Images) -> Tensor:
        return compute_features(model, shard, preprocessing, hardware, BATCH_SIZE).to(hardware.device)

    features = gather_shards(images, hardware.world, pooled)
    hidden = model.head.hidden if isinstance(model.head, ClassificationHead) else None
    with torch.no_grad():
        return (features if hidden is None else torch.tanh(hidden(features))).cpu()


def run_loss(recipe: Recipe, labels: Tensor, logits_NK: Tensor) -> Tensor:
    """The mean loss of the run for logits of training images. Balanced sampling weights the classes equally."""
    K = recipe.model.num_classes
    class_weights_K, logit_offsets_K = class_balance_terms(recipe, labels)
    if recipe.sampling == "balanced":
        class_weights_K = balanced_class_weights(labels, K)
    targets_NK = (F.one_hot(labels, K) if labels.ndim == 1 else labels).to(logits_NK)
    if class_weights_K is not None:
        class_weights_K = class_weights_K.to(logits_NK)
    return per_image_losses(
        logits_NK, targets_NK, recipe.loss_name, recipe.label_smoothing, class_weights_K, logit_offsets_K
    ).mean()


def fit_linear_layer(
    features_ND: Tensor, labels: Tensor, recipe: Recipe, loss: LossFn
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (K, D), bias (K,), and outputs (N, K) for images that were left out of the fit.

    Labels are class indices (N,), multi-hot (N, K), or standardised targets (N, K) of a regression. Least squares
    predicts ±1 per class. These predictions become logits with one scale for all classes and a bias per class, which
    minimise `loss` for images that were left out. If the predictions are no better than chance, all three are zero.
    """
    if recipe.task_name == "regression":
        fit = fit_ridge(features_ND, labels)
        scale, shift_K = 1.0, torch.zeros_like(fit.bias_K)
    else:
        one_hot = F.one_hot(labels, recipe.model.num_classes) if labels.ndim == 1 else labels
        fit = fit_ridge(features_ND, 2 * one_hot.double() - 1)
        scale, shift_K = scale_logits(fit.left_out_NK, loss)
    outputs = (scale * fit.weight_KD, scale * fit.bias_K + shift_K, scale * fit.left_out_NK + shift_K)
    weight_KD, bias_K, left_out_NK = (tensor.float() for tensor in outputs)
    return weight_KD, bias_K, left_out_NK


def scale_logits(predictions_NK: Tensor, loss: LossFn) -> tuple[float, Tensor]:
    """The scale, at least 0, and the biases (K,) that minimise the loss of the scaled and shifted predictions.

    Small penalties keep both finite even if all predictions are right or a class has no images.
    """

    def penalised_loss(parameters: Tensor) -> Tensor:
        scale, shift_K = parameters[0], parameters[1:]
        penalty = SCALE_PENALTY * scale.square() + SHIFT_PENALTY * shift_K.square().sum()
        return loss(scale * predictions_NK + shift_K) + penalty

    start = torch.zeros(1 + predictions_NK.shape[1], dtype=torch.float64)
    start[0] = 1.0
    fitted = minimize(penalised_loss, start)
    scale, shift_K = fitted[0], fitted[1:]
    if not (scale > 0 and shift_K.isfinite().all()):
        return 0.0, torch.zeros_like(shift_K)
    return scale.item(), shift_K


def head_tensors(initial_weights: dict[str, Tensor], weight_KD: Tensor, bias_K: Tensor) -> dict[str, Tensor]:
    """The tensors of the head. A distilled ViT averages two heads, each of which gets half of the columns."""
    layers = [name.removesuffix(".weight") for name in initial_weights if name.endswith(".weight")]
    layers = [layer for layer in layers if HEAD_OUT.fullmatch(layer)]
    columns = weight_KD.chunk(len(layers), dim=1)
    weights = {f"{layer}.weight": len(layers) * part for layer, part in zip(layers, columns, strict=True)}
    return weights | {f"{layer}.bias": bias_K.clone() for layer in layers}
