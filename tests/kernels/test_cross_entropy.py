"""Loss, gradient and right answers in one launch against PyTorch's: in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.triton_interpreter import a_gpu, interpreted
from vitral.kernels.cross_entropy import op as own
from vitral.recipes.builtin import RECIPES
from vitral.training.loss import judged
from vitral.training.trainer import judge_of

pytestmark = interpreted
GPU = a_gpu(precision="fp32")


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 40),
    K=st.integers(1, 20),
    smoothing=st.sampled_from((0.0, 0.1)),
    size=st.sampled_from((0.1, 1.0, 50.0)),
    at_once=st.sampled_from((16, 64, 4096)),
    seed=st.integers(0, 99),
)
def test_the_same_loss_gradient_and_right_answers(
    B: int, K: int, smoothing: float, size: float, at_once: int, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = (size * torch.randn(B, K, generator=draws)).round(decimals=1).requires_grad_()  # some are equal
    targets = torch.rand(B, K, generator=draws)  # rows that do not add up to one, as those of weights
    labels = torch.randint(0, K, (B,), generator=draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "AT_ONCE", at_once)
        loss, right = own.Judged.apply(logits, targets, labels, smoothing)  # type: ignore[no-untyped-call]
    wanted, hits = judged(logits, targets, labels, "softmax", smoothing)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    assert right == hits
    (found,) = torch.autograd.grad(loss / 7, logits)
    torch.testing.assert_close(found, torch.autograd.grad(wanted / 7, logits)[0], rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_no_number_stays_none() -> None:
    logits, targets = torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), torch.eye(2)
    loss, _ = own.Judged.apply(logits, targets, torch.arange(2), 0.1)  # type: ignore[no-untyped-call]
    assert not loss.isfinite()


def test_it_is_used_where_it_agrees_and_can_hold_all(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, said = RECIPES["cifar10-94"](), list[str]()
    assert judge_of(recipe, recipe.batch, GPU, said.append) is not None
    assert judge_of(recipe, 4000, GPU, said.append) is None
    assert judge_of(recipe.changed({"loss": "sigmoid"}), recipe.batch, GPU, said.append) is None
    assert said == []
    real = own.Judged.apply
    monkeypatch.setattr(own.Judged, "apply", lambda *given: [1.5 * x for x in real(*given)])  # type: ignore[no-untyped-call]
    assert judge_of(recipe, recipe.batch, GPU, said.append) is None
    assert "the loss is left to PyTorch: its kernels are off by 50%" in said[0]
