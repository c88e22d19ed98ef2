from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peers import register_torchvision_ops
from vitral.recipes.options import LossName
from vitral.tasks.classification import Classification
from vitral.tasks.losses import (
    asymmetric_losses,
    balanced_class_weights,
    focal_losses,
    logit_adjustment_offsets,
    loss_and_score,
    per_image_losses,
    uniform_loss,
)


def random_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return (
        torch.randn(50, 7, generator=rng) * 3,
        torch.randint(0, 7, (50,), generator=rng),
        torch.rand(7, generator=rng) + 0.1,
    )


def test_softmax_losses_equal_torch_cross_entropy() -> None:
    logits, labels, weights = random_batch()
    targets = F.one_hot(labels, 7).float()
    torch.testing.assert_close(
        per_image_losses(logits, targets, "softmax", class_weights_K=weights),
        F.cross_entropy(logits, labels, weight=weights, reduction="none"),
    )
    torch.testing.assert_close(
        per_image_losses(logits, targets, "softmax", 0.1),
        F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none"),
    )


def test_sigmoid_losses_are_sums_of_binary_cross_entropies() -> None:
    logits, labels, _ = random_batch()
    targets = F.one_hot(labels, 7).float()
    p = logits.double().sigmoid()
    expected = -torch.where(targets > 0, p, 1 - p).log().sum(dim=1)
    torch.testing.assert_close(per_image_losses(logits, targets, "sigmoid").double(), expected, rtol=1e-4, atol=1e-4)


def test_loss_and_score_are_sums_over_the_batch() -> None:
    logits, labels, _ = random_batch()
    targets = F.one_hot(labels, 7).float()
    loss, num_correct = loss_and_score(Classification(), logits, targets, labels, "softmax")
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item(), rel=1e-5)
    assert num_correct.item() == (logits.argmax(dim=1) == labels).sum().item()


def test_balanced_class_weights_equal_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    weights = balanced_class_weights(labels, 4)
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels.numpy())
    assert weights[[0, 1, 3]].tolist() == pytest.approx(expected.tolist())
    assert weights[labels].mean().item() == pytest.approx(1)


def test_logit_adjustment_equals_the_formula_of_the_paper() -> None:
    """Equation 10 of arXiv 2007.07314: log(1 + sum over the other classes of (prior ratio)^tau * e^difference)."""
    logits, labels, _ = random_batch()
    counts = torch.tensor([40, 30, 10, 10, 5, 3, 2])
    priors, training_labels = counts.double() / 100, torch.arange(7).repeat_interleave(counts)
    offsets = logit_adjustment_offsets(training_labels, 7, tau=1.5)
    targets = F.one_hot(labels, 7).float()
    x, y = logits.double(), labels[:, None]
    ratios = (priors[None] / priors[labels][:, None]) ** 1.5 * (x - x.gather(1, y)).exp()
    expected = torch.log1p(ratios.scatter(1, y, 0.0).sum(dim=1))
    losses = per_image_losses(logits, targets, "softmax", logit_offsets_K=offsets)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-5)


def test_logit_adjustment_counts_predictions_of_the_unadjusted_logits() -> None:
    logits, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    offsets = logit_adjustment_offsets(torch.tensor([0] * 99 + [1]), 2, tau=1.0)
    assert (logits + offsets).argmax() == 0
    loss, num_correct = loss_and_score(
        Classification(), logits, torch.eye(2)[labels], labels, "softmax", logit_offsets_K=offsets
    )
    assert num_correct == 1
    assert loss > 3  # the loss is that of the adjusted logits


def test_equal_class_frequencies_need_no_adjustment() -> None:
    logits, labels, _ = random_batch()
    targets = F.one_hot(labels, 7).float()
    offsets = logit_adjustment_offsets(torch.arange(70) % 7, 7, tau=2.0)
    for smoothing in (0.0, 0.1):
        adjusted = per_image_losses(logits, targets, "softmax", smoothing, logit_offsets_K=offsets)
        torch.testing.assert_close(adjusted, per_image_losses(logits, targets, "softmax", smoothing))


def test_a_class_without_images_has_a_finite_adjustment() -> None:
    assert logit_adjustment_offsets(torch.tensor([0, 0, 2]), 4, tau=1.0).isfinite().all()


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_uniform_loss_is_the_loss_of_zero_logits(num_classes: int) -> None:
    targets = F.one_hot(torch.tensor([0]), num_classes).float()
    expected = per_image_losses(torch.zeros(1, num_classes), targets, "softmax").item()
    assert uniform_loss(num_classes) == pytest.approx(expected)


def multi_label_batch() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(40, 6, generator=rng) * 3, (torch.rand(40, 6, generator=rng) < 0.3).float()


def test_asymmetric_loss_equals_that_of_timm() -> None:
    register_torchvision_ops()
    from timm.loss import AsymmetricLossMultiLabel

    logits, targets = multi_label_batch()
    for gamma_pos in (0, 1):
        reference = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=gamma_pos, clip=0.05)
        losses = asymmetric_losses(logits, targets, gamma_pos=gamma_pos)
        torch.testing.assert_close(losses.sum(), reference(logits, targets), rtol=1e-4, atol=1e-4)


def test_asymmetric_loss_of_known_values() -> None:
    p = torch.tensor([0.8, 0.3, 0.04])
    logits = (p / (1 - p)).log()[None]
    expected = -np.log(0.8) - (1 - 0.75) ** 4 * np.log(0.75)  # the third label is below the margin
    assert asymmetric_losses(logits, torch.tensor([[1.0, 0.0, 0.0]])).item() == pytest.approx(expected, rel=1e-5)


def test_focal_loss_equals_that_of_torchvision() -> None:
    register_torchvision_ops()
    from torchvision.ops import sigmoid_focal_loss as focal

    logits, targets = multi_label_batch()
    expected = focal(logits, targets, alpha=0.25, gamma=2, reduction="none").sum(dim=1)
    torch.testing.assert_close(focal_losses(logits, targets), expected)


def test_focal_loss_without_focus_is_half_the_binary_cross_entropy() -> None:
    logits, targets = multi_label_batch()
    losses = focal_losses(logits, targets, gamma=0, alpha=0.5)
    torch.testing.assert_close(losses, per_image_losses(logits, targets, "sigmoid") / 2)


@pytest.mark.parametrize("loss", ["sigmoid", "asymmetric", "focal", "mse", "huber"])
def test_losses_are_finite_and_have_finite_gradients_at_extreme_logits(loss: LossName) -> None:
    logits = torch.tensor([[-80.0, 80.0, 0.0, -80.0], [80.0, -80.0, 80.0, 0.0]], requires_grad=True)
    losses = per_image_losses(logits, torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, 1]]), loss)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_regression_losses_are_means_over_the_targets() -> None:
    outputs, targets = torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 2.0]])
    assert per_image_losses(outputs, targets, "mse").item() == pytest.approx((1 + 9) / 2)
    assert per_image_losses(outputs, targets, "huber").item() == pytest.approx((0.5 + 2.5) / 2)
