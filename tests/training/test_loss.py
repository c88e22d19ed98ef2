from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.training.loss import balanced_class_weights, loss_and_correct, per_image_losses, uniform_loss


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


def test_loss_and_correct_sum_over_the_batch() -> None:
    logits, labels, _ = random_batch()
    targets = F.one_hot(labels, 7).float()
    loss, num_correct = loss_and_correct(logits, targets, labels, "softmax")
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item(), rel=1e-5)
    assert num_correct.item() == (logits.argmax(dim=1) == labels).sum().item()


def test_balanced_class_weights_equal_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    weights = balanced_class_weights(labels, 4)
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels.numpy())
    assert weights[[0, 1, 3]].tolist() == pytest.approx(expected.tolist())
    assert weights[labels].mean().item() == pytest.approx(1)


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_uniform_loss_is_the_loss_of_zero_logits(num_classes: int) -> None:
    targets = F.one_hot(torch.tensor([0]), num_classes).float()
    expected = per_image_losses(torch.zeros(1, num_classes), targets, "softmax").item()
    assert uniform_loss(num_classes) == pytest.approx(expected)
