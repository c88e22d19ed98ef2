"""Batch norm without running statistics, and the cosine similarity with prototypes, against torch's layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitral.distributed.world import SINGLE_PROCESS
from vitral.ssl.heads import MLP, BatchNorm, Prototypes, mean_over_ranks, sum_over_ranks


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_equals_that_of_torch_in_training(affine: bool) -> None:
    torch.manual_seed(0)
    norm, reference = BatchNorm(5, affine=affine), nn.BatchNorm1d(5, affine=affine)
    if affine:
        for parameter in (norm.weight, norm.bias):
            nn.init.normal_(parameter)
        reference.load_state_dict(reference.state_dict() | norm.state_dict())
    x = torch.randn(7, 5) * 3 + 2
    torch.testing.assert_close(norm(x), reference(x))


def test_batch_norm_does_not_depend_on_earlier_batches_or_the_mode() -> None:
    norm, x = BatchNorm(3), torch.randn(4, 3)
    expected = norm(x)
    norm(torch.randn(4, 3) + 5)
    assert torch.equal(norm.eval()(x), expected)


def test_batch_norm_computes_in_fp32() -> None:
    x = (torch.randn(64, 4) + 300).bfloat16()  # in bf16 the variance of such values is lost
    with torch.autocast("cpu", torch.bfloat16):
        normed = BatchNorm(4)(x)
    assert normed.dtype == torch.float32
    torch.testing.assert_close(normed, F.batch_norm(x.double(), None, None, training=True).float())


def test_mlp_has_gelu_and_batch_norm_between_its_linear_layers() -> None:
    mlp = MLP([4, 6, 6, 3], SINGLE_PROCESS, norm_output=True)
    assert [type(layer) for layer in mlp] == [
        nn.Linear, BatchNorm, nn.GELU, nn.Linear, BatchNorm, nn.GELU, nn.Linear, BatchNorm,
    ]  # fmt: skip
    assert mlp[-1].weight is None  # MoCo v3: no learned scale at the output
    assert all(layer.bias is None for layer in mlp if isinstance(layer, nn.Linear))
    plain = MLP([4, 6, 6, 3], SINGLE_PROCESS, batch_norm=False)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert all(not layer.bias.any() for layer in plain if isinstance(layer, nn.Linear))


def test_mlp_keeps_the_scale_of_its_input_at_initialisation() -> None:
    torch.manual_seed(0)
    outputs = MLP([256, 512, 128], SINGLE_PROCESS, batch_norm=False)(torch.randn(512, 256))
    assert 0.4 < outputs.std().item() < 1  # GELU halves the second moment, roughly


def test_prototypes_are_a_linear_layer_with_unit_weight_norm() -> None:
    torch.manual_seed(0)
    prototypes, x = Prototypes(8, 5), torch.randn(6, 8)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5, bias=False))  # as in DINO's code
    with torch.no_grad():
        linear.parametrizations.weight.original0.fill_(1)  # g
        linear.parametrizations.weight.original1.copy_(prototypes.weight)  # v
    torch.testing.assert_close(prototypes(x), linear(F.normalize(x, dim=-1)))
    assert prototypes(x).abs().max() <= 1 + 1e-6
    torch.testing.assert_close(prototypes(100 * x), prototypes(x))


def test_reductions_of_one_process_are_those_of_torch() -> None:
    x = torch.randn(3, 2)
    assert sum_over_ranks(x, SINGLE_PROCESS) is x
    assert torch.equal(mean_over_ranks(x, SINGLE_PROCESS), x.mean(dim=0))
