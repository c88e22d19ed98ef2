"""Options of the blocks: SwiGLU, RoPE conventions, biases, norms and tokens, against the equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vitral.models.vit import FeedForward, QKVLinear, Rope, RotaryPosition, ViT, ViTConfig

TINY: dict[str, Any] = {"image_size": (8, 12), "patch_size": 4, "num_classes": 3, "width": 16, "depth": 2, "heads": 2}


def random_vit(**options: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**TINY | options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_swiglu_multiplies_values_by_the_silu_of_the_gate() -> None:
    mlp = FeedForward(ViTConfig(**TINY, activation="swiglu", mlp_width=24)).double()
    gate_weight, value_weight = mlp.expand.weight.chunk(2)
    gate_bias, value_bias = mlp.expand.bias.chunk(2)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    gate, value = F.linear(x, gate_weight, gate_bias), F.linear(x, value_weight, value_bias)
    expected = mlp.contract(gate / (1 + torch.exp(-gate)) * value)
    assert (mlp.expand.out_features, mlp.contract.in_features) == (48, 24)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


def test_swiglu_initialises_gate_and_value_separately() -> None:
    torch.manual_seed(0)
    mlp: Any = ViT(ViTConfig(**TINY, activation="swiglu", mlp_width=64)).encoder.blocks[0].mlp
    bound = math.sqrt(6 / (16 + 64))
    for matrix in mlp.expand.weight.chunk(2):
        assert 0.95 * bound < matrix.abs().max() <= bound


@pytest.mark.parametrize(
    ("rope", "base", "grid", "vertical", "horizontal", "largest"),
    [
        ("patch", 100.0, (2, 3), [0, 1], [0, 1, 2], math.pi),
        ("patch", 100.0, (4, 3), [-0.25, 0.25, 0.75, 1.25], [0, 1, 2], math.pi),
        ("centered", 100.0, (2, 3), [-0.5, 0.5], [-2 / 3, 0, 2 / 3], 2 * math.pi),
        ("centered", 50.0, (1, 4), [0], [-0.75, -0.25, 0.25, 0.75], 2 * math.pi),
        ("index", 100.0, (3, 4), [0, 1, 2], [0, 1, 2, 3], 1.0),
        ("scaled-index", 1e4, (4, 3), [0, 0.5, 1, 1.5], [0, 1, 2], 1.0),
        ("scaled-index-1", 1e4, (4, 3), [0.5, 1, 1.5, 2], [1, 2, 3], 1.0),
    ],
)
def test_rope_angles_are_coordinate_times_frequency(
    rope: Rope, base: float, grid: tuple[int, int], vertical: list[float], horizontal: list[float], largest: float
) -> None:
    config = ViTConfig(**TINY, positions="rotary", rope=rope, rope_base=base, registers=1)
    cos, sin = RotaryPosition(config)(grid)
    frequencies = [largest * base**-0.0, largest * base**-0.5]  # head width 8: two frequencies per axis
    rows = [[c * f for c in (y, x) for f in frequencies] for y in vertical for x in horizontal]
    expected = torch.tensor([[0.0] * 4] * 2 + rows)  # class token and register are not rotated
    torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=1e-5)


def test_key_bias_has_no_effect_and_no_gradient_without_key_bias() -> None:
    model = random_vit(key_bias=False, positions="rotary")
    qkv: Any = model.encoder.blocks[0].get_submodule("attention.qkv")
    assert isinstance(qkv, QKVLinear)
    logits = model(images())
    logits.sum().backward()
    gradients = qkv.bias.grad
    assert gradients is not None
    assert [bool(part.any()) for part in gradients.chunk(3)] == [True, False, True]
    with torch.no_grad():
        qkv.bias[16:32] += 5
    assert torch.equal(model(images()), logits)


def test_pre_norm_normalises_the_tokens_before_the_first_block() -> None:
    model = random_vit(pre_norm=True, registers=2)
    assert model.patch_embedding.project.bias is None
    plain = random_vit(registers=2)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pre_norm")}
    plain.load_state_dict(state | {"patch_embedding.project.bias": torch.zeros(16)})
    before, after = plain.embed(images(), (2, 3)), model.embed(images(), (2, 3))
    weight, bias = (model.get_parameter(f"pre_norm.{leaf}") for leaf in ("weight", "bias"))
    mean, var = before.mean(-1, keepdim=True), before.var(-1, unbiased=False, keepdim=True)
    torch.testing.assert_close(after, (before - mean) / (var + 1e-6).sqrt() * weight + bias)
    assert torch.equal(model.trace(images()).tokens[0], after)


def test_without_final_norm_the_last_block_is_pooled() -> None:
    model = random_vit(final_norm=False)
    torch.testing.assert_close(model.features(images()), model.trace(images()).tokens[-1][:, 0])


def test_class_token_that_is_not_pooled_takes_part_in_attention() -> None:
    model = random_vit(pooling="mean", class_token=True, registers=1)
    trace = model.trace(images())
    assert (trace.num_prefix_tokens, trace.attention[0].shape[-1]) == (2, 8)
    position_embedding = model.position_embedding
    assert position_embedding is not None
    assert position_embedding.table.shape == (1, 7, 16)  # the register has no position
    normed = model.encoder.norm(trace.tokens[-1])
    torch.testing.assert_close(trace.pooled, normed[:, 2:].mean(dim=1))


def test_register_positions_are_added_to_the_registers() -> None:
    model = random_vit(registers=2, register_positions=True)
    position_embedding, registers = model.position_embedding, model.registers
    assert position_embedding is not None
    assert registers is not None
    assert position_embedding.table.shape == (1, 9, 16)
    tokens = model.embed(images(), (2, 3))
    expected = (registers + position_embedding.table[:, 1:3]).expand(2, -1, -1)
    torch.testing.assert_close(tokens[:, 1:3], expected)
    with pytest.warns(UserWarning, match="positions resampled"):
        larger = model.trace(torch.randn(1, 3, 16, 16, dtype=torch.float64)).tokens[0]
    torch.testing.assert_close(larger[:, 1:3], expected[:1])  # only the patches' positions are resampled
