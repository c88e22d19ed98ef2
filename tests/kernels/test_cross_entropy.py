"""The fused loss, its gradient and its count of correct predictions against PyTorch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.triton_interpreter import requires_interpreter
from vitral.kernels.cross_entropy import op
from vitral.kernels.cross_entropy.op import fused_cross_entropy
from vitral.tasks.classification import Classification
from vitral.tasks.losses import loss_and_score

pytestmark = requires_interpreter


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 40),
    K=st.integers(1, 20),
    label_smoothing=st.sampled_from((0.0, 0.1)),
    scale=st.sampled_from((0.1, 1.0, 50.0)),
    block_size=st.sampled_from((16, 64, 4096)),
    has_offsets=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_gradient_and_count_match_pytorch(
    B: int, K: int, label_smoothing: float, scale: float, block_size: int, has_offsets: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(B, K, generator=rng)).round(decimals=1).requires_grad_()  # rounded: some ties
    targets = torch.rand(B, K, generator=rng)  # rows do not sum to 1
    labels = torch.randint(0, K, (B,), generator=rng)
    offsets = 3 * torch.randn(K, generator=rng) if has_offsets else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "BLOCK_SIZE", block_size)
        loss, num_correct = fused_cross_entropy(logits, targets, labels, label_smoothing, offsets)
    expected_loss, expected_correct = loss_and_score(
        Classification(), logits, targets, labels, "softmax", label_smoothing, logit_offsets_K=offsets
    )
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert num_correct == expected_correct
    (grad,) = torch.autograd.grad(loss / 7, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(expected_loss / 7, logits)[0], rtol=1e-5, atol=1e-6)


def test_nan_logits_give_a_non_finite_loss() -> None:
    logits, targets = torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), torch.eye(2)
    loss, _ = fused_cross_entropy(logits, targets, torch.arange(2), 0.1)
    assert not loss.isfinite()


def test_large_batches_are_left_to_pytorch() -> None:
    assert op.is_supported(batch_size=512, num_classes=10)
    assert not op.is_supported(batch_size=4000, num_classes=10)
