"""The ViT against the paper's equations and against itself: traced, compiled, exported, in bf16."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common import unpatchify
from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import (
    EncoderBlock,
    FeedForward,
    MultiHeadAttention,
    Pooling,
    PositionEmbedding,
    Positions,
    Residual,
    RotaryPosition,
    ViT,
    ViTConfig,
    patch_coordinates,
    patchify,
    resample_positions,
)

TINY: dict[str, Any] = {"image_size": (12, 8), "patch_size": 4, "num_classes": 5, "width": 16, "depth": 2, "heads": 2}
POOLINGS, POSITIONS = get_args(Pooling), get_args(Positions)


def random_model(model_class: Any = ViT, **settings: Any) -> Any:
    """A small model with noise added to all parameters, so that none is zero or one."""
    torch.manual_seed(1)
    model = model_class(ViTConfig(**TINY | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def images(batch: int = 2, channels: int = 3, size: tuple[int, int] = (12, 8), seed: int = 2) -> Tensor:
    return torch.rand(batch, channels, *size, generator=torch.Generator().manual_seed(seed))


def fill(model: nn.Module) -> None:
    """Set weights without a random generator: equal on every machine and in every version of PyTorch."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            wave = (torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + 0.01 * i) + i).sin()
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_((offset + 0.4 * wave).view(parameter.shape))


@contextmanager
def warns_of_resampling(old: str, new: str) -> Iterator[None]:
    text = f"positions resampled from {old} to {new} patches; fine-tune for best accuracy"
    with pytest.warns(UserWarning, match=f"^{text}$") as caught:
        yield
    assert len(caught) == 1


# Embedding and blocks


@pytest.mark.parametrize("size", [(28, 28), (14, 21)])
def test_patch_embedding_equals_strided_convolution_unfold_and_einops(
    size: tuple[int, int],
) -> None:
    P, C, D = 7, 3, 10
    embed = ViT(ViTConfig(image_size=size, patch_size=P, channels=C, width=D, heads=2, depth=1)).patch_embedding
    weight, bias = embed.project.weight, nn.init.normal_(embed.project.bias)
    x = images(2, C, size)
    ours = embed(x)
    convolved = F.conv2d(x, weight.view(D, C, P, P), bias, stride=P).flatten(2).transpose(1, 2)
    unfolded = F.linear(F.unfold(x, P, stride=P).transpose(1, 2), weight, bias)
    rearranged = F.linear(einops.rearrange(x, "b c (h p1) (w p2) -> b (h w) (c p1 p2)", p1=P, p2=P), weight, bias)
    for other in (convolved, unfolded, rearranged):
        torch.testing.assert_close(ours, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "side", "patch", "width", "depth", "heads", "classes", "tokens"),
    [
        pytest.param(1, 28, 7, 64, 3, 4, 10, 17, id="MNIST summary"),
        pytest.param(1, 28, 7, 128, 3, 4, 10, 17, id="MNIST training"),
        pytest.param(1, 28, 4, 16, 1, 1, 10, 50, id="MNIST embedding"),
        pytest.param(3, 320, 16, 768, 6, 4, 10, 401, id="default, at a size that works"),
        pytest.param(3, 224, 16, 768, 12, 12, 1000, 197, id="base"),
        pytest.param(3, 32, 4, 96, 2, 3, 10, 65, id="CIFAR-10"),
    ],
)
def test_documented_configurations_run(
    channels: int, side: int, patch: int, width: int, depth: int, heads: int, classes: int, tokens: int
) -> None:
    config = ViTConfig(
        image_size=(side, side),
        patch_size=patch,
        channels=channels,
        width=width,
        depth=depth,
        heads=heads,
        num_classes=classes,
    )
    model, x = ViT(config).eval(), images(2, channels, (side, side))
    with torch.no_grad():
        assert model.embed(x, config.grid).shape == (2, tokens, width)
        features = model.features(x)
        assert features.std(dim=1).min() > 0.5  # the output of a layer norm, not zeros
        assert model.head(features).shape == (2, classes)


def test_defaults_are_vit_b16_of_the_paper() -> None:
    config = ViTConfig()
    assert (config.patch_size, config.width, config.depth, config.heads, config.hidden_width) == (16, 768, 12, 12, 3072)
    assert math.prod(config.grid) == 196


def test_block_is_equations_2_and_3_with_residuals_before_the_norm() -> None:
    torch.manual_seed(0)
    block = EncoderBlock(ViTConfig(**TINY), drop_path=0.0).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    z = torch.randn(3, 6, 16, dtype=torch.float64)

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight + layer.bias

    def attention(x: Tensor) -> Tensor:
        q, k, v = (x @ block.attention.qkv.weight.T + block.attention.qkv.bias).chunk(3, dim=-1)
        heads = [slice(0, 8), slice(8, 16)]
        mixed = [(q[..., h] @ k[..., h].mT / 8**0.5).softmax(-1) @ v[..., h] for h in heads]
        return torch.cat(mixed, -1) @ block.attention.project.weight.T + block.attention.project.bias

    def mlp(x: Tensor) -> Tensor:
        hidden = x @ block.mlp.expand.weight.T + block.mlp.expand.bias
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return hidden @ block.mlp.contract.weight.T + block.mlp.contract.bias

    between = attention(norm(z, block.norm1)) + z
    torch.testing.assert_close(block(z), mlp(norm(between, block.norm2)) + between)


def test_config_refuses_an_image_size_not_divisible_by_the_patch_size() -> None:
    with pytest.raises(ValueError, match="image height 324 is not divisible by the patch size 16; try 320 or 336"):
        ViTConfig(image_size=(324, 324), width=768, depth=6, heads=4, num_classes=10)
    with pytest.raises(ValueError, match="image width 31 is not divisible by the patch size 4; try 28 or 32"):
        ViTConfig(**TINY | {"image_size": (32, 31)})
    with pytest.raises(ValueError, match="image height 3 is not divisible by the patch size 4; try 4"):
        ViTConfig(**TINY | {"image_size": (3, 8)})


def test_forward_refuses_images_not_divisible_by_the_patch_size() -> None:
    with pytest.raises(ValueError, match="image width 10 is not divisible by the patch size 4; try 8 or 12"):
        random_model()(images(size=(12, 10)))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_batch_of_one_keeps_its_dimension(pooling: str) -> None:
    model, x = random_model(pooling=pooling, num_classes=1), images(3)
    assert model(x[:1]).shape == (1, 1)
    assert model.features(x[:1]).shape == (1, 16)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_each_token_gets_the_embedding_of_its_position(batch: int) -> None:
    model, x = random_model(), images(batch)
    assert model.class_token is not None
    assert model.position_embedding is not None
    tokens, table = model.embed(x, (3, 2)), model.position_embedding.table
    torch.testing.assert_close(tokens[:, 0], (model.class_token.token[0] + table[0, :1]).expand(batch, -1))
    patches = model.patch_embedding(x)
    for i in range(6):
        torch.testing.assert_close(tokens[:, 1 + i], patches[:, i] + table[0, 1 + i])


@pytest.mark.parametrize("name", ["dropout_embedding", "dropout_attention", "dropout", "drop_path"])
def test_dropout_is_active_only_in_training(name: str) -> None:
    reference, model, x = random_model(), random_model(**{name: 0.5}), images(4)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)
    torch.testing.assert_close(reference.train()(x), reference.eval()(x))
    model.train()
    first, second = model(x), model(x)
    assert not torch.allclose(first, second, atol=1e-3)
    assert not torch.allclose(first, reference(x), atol=1e-3)
    assert not torch.allclose(model.trace(x).logits, model.trace(x).logits, atol=1e-3)


def test_dropout_follows_the_attention_projection_and_both_mlp_layers() -> None:
    torch.manual_seed(0)
    config = ViTConfig(**TINY | {"mlp_width": 16, "dropout": 0.5})
    x = torch.randn(200, 6, 16)
    mlp, attention = FeedForward(config), MultiHeadAttention(config)
    with torch.no_grad():
        mlp.contract.weight.copy_(torch.eye(16))
        mlp.contract.bias.zero_()
    assert (attention(x) == 0).float().mean() == pytest.approx(0.5, abs=0.02)
    assert (mlp(x) == 0).float().mean() == pytest.approx(0.75, abs=0.02)


def test_attention_dropout_preserves_the_mean_with_and_without_trace() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(ViTConfig(**TINY | {"dropout_attention": 0.3}))
    x = torch.randn(1, 6, 16)
    expected = attention.eval()(x)
    attention.train()
    batch = x.expand(20_000, -1, -1)
    attentions: list[Tensor] = []
    for output in (attention(batch), attention(batch, None, attentions)):
        torch.testing.assert_close(output.mean(0, keepdim=True), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(attentions[0].sum(-1), torch.ones(20_000, 2, 6))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", F.gelu),
        ("gelu_tanh", partial(F.gelu, approximate="tanh")),
        ("quick_gelu", lambda x: F.silu(1.702 * x) / 1.702),
        ("relu", F.relu),
    ],
)
def test_mlp_uses_the_configured_activation(activation: Any, function: Callable[[Tensor], Tensor]) -> None:
    mlp = FeedForward(ViTConfig(**TINY | {"activation": activation})).double()
    x = torch.linspace(-6, 6, 16, dtype=torch.float64).view(1, 1, 16)
    expected = F.linear(function(mlp.expand(x)), mlp.contract.weight, mlp.contract.bias)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["patch_sizem", "attn_drop", "atten_drop", "drop_out", "n_classes"])
def test_misspelt_field_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        ViTConfig(**{name: 1})  # type: ignore[arg-type]


def test_model_consists_of_the_documented_modules() -> None:
    import vitral.models.vit as vit

    names = "PatchEmbedding ClassToken PositionEmbedding MultiHeadAttention Residual FeedForward EncoderBlock Encoder"
    for name in [*names.split(), "ClassificationHead", "ViT"]:
        assert issubclass(getattr(vit, name), nn.Module)
    modules = {type(module).__name__ for module in random_model().modules()}
    assert {*names.split(), "ClassificationHead"} <= modules


# Configuration


INVALID: list[tuple[str, Any]] = [
    *[("image_size", size) for size in (224, (224,), (32, 32, 3), [32, 32], (32.0, 32), None)],
    *[
        (name, n)
        for name in ("patch_size", "channels", "num_classes", "width", "depth", "heads")
        for n in (0, -1, 1.5, "2")
    ],
    *[("mlp_width", n) for n in (0, 64.0, "64")],
    *[("registers", n) for n in (-1, 0.5, None)],
    *[
        (name, rate)
        for name in ("dropout_embedding", "dropout_attention", "dropout", "patch_drop", "drop_path")
        for rate in (-0.1, 1.0, math.nan, "0.1", None)
    ],
    *[("layer_scale", value) for value in (0.0, -1e-4, math.nan, "1e-4")],
    *[(name, value) for name in ("norm_eps", "rope_base") for value in (0.0, -1e-6, None)],
    *[
        (name, value)
        for name in ("qk_norm", "qkv_bias", "key_bias", "pre_norm", "final_norm", "register_positions")
        for value in ("no", 1, None)
    ],
    *[("class_token", value) for value in ("no", 1, False)],  # False contradicts class pooling
    *[
        (name, value)
        for name in ("pooling", "positions", "position_resampling", "rope", "head", "activation")
        for value in ("cls", "", None, 0)
    ],
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_value_is_refused_with_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {re.escape(repr(value))}$"):
        ViTConfig(**TINY | {name: value})


def test_invalid_values_cover_every_field() -> None:
    assert {name for name, _ in INVALID} == {field.name for field in dataclasses.fields(ViTConfig)}


@pytest.mark.parametrize(
    ("positions", "width", "heads", "multiple"),
    [("learned", 64, 3, 3), ("sincos", 64, 3, 12), ("sincos", 6, 1, 4), ("rotary", 24, 4, 16), ("none", 5, 2, 2)],
)
def test_width_must_be_a_multiple_required_by_heads_and_positions(
    positions: Any, width: int, heads: int, multiple: int
) -> None:
    with pytest.raises(
        ValueError, match=rf"^width must be a multiple of {multiple} \(heads, positions\), got {width}$"
    ):
        ViTConfig(positions=positions, width=width, heads=heads)
    ViTConfig(positions=positions, width=4 * multiple, heads=heads)


@pytest.mark.parametrize("shape", [(3, 12, 8), (2, 1, 12, 8), (2, 12, 8, 3)])
def test_images_with_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"(batch, 3, height, width), got {shape}")):
        random_model()(torch.zeros(shape))


# Positions


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_patch_order_matters_only_with_positions(pooling: str, positions: str) -> None:
    model, x = random_model(pooling=pooling, positions=positions, registers=1), images(2)
    shuffled = unpatchify(patchify(x, 4)[:, [4, 2, 0, 5, 1, 3]], (3, 2), 4)
    same = torch.allclose(model(x), model(shuffled), atol=1e-4)
    assert same == (positions == "none")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sincos_table_matches_the_formula(pooling: Any) -> None:
    width, grid = 24, (3, 5)
    config = ViTConfig(image_size=(12, 20), patch_size=4, width=width, heads=2, positions="sincos", pooling=pooling)
    table = PositionEmbedding(config).table[0]
    if pooling == "class":
        assert table[0].abs().max() == 0
        table = table[1:]
    for y, x in itertools.product(range(grid[0]), range(grid[1])):
        omegas = [1 / 10_000 ** (i / 5) for i in range(6)]
        expected = [wave(axis * omega) for axis in (x, y) for wave in (math.sin, math.cos) for omega in omegas]
        torch.testing.assert_close(table[y * grid[1] + x], torch.tensor(expected))


def test_sincos_table_is_not_in_the_state_dict() -> None:
    model = random_model(positions="sincos")
    assert not any("position" in name for name in [*model.state_dict(), *dict(model.named_parameters())])


def test_patch_coordinates_are_in_units_of_the_trained_grid() -> None:
    torch.testing.assert_close(
        patch_coordinates((2, 3), (2, 3)), torch.tensor([[y, x] for y in (0.0, 1) for x in (0.0, 1, 2)])
    )
    finer = patch_coordinates((4, 1), (2, 3))
    torch.testing.assert_close(finer, torch.tensor([[-0.25, 1], [0.25, 1], [0.75, 1], [1.25, 1]]))


def test_sincos_table_is_evaluated_at_the_new_coordinates() -> None:
    config = ViTConfig(**TINY | {"positions": "sincos"})
    embedding = PositionEmbedding(config)
    torch.testing.assert_close(embedding.table_for((6, 4)), embedding.sincos_table((6, 4), 16))
    assert embedding.table_for((6, 4)).shape == (1, 25, 16)
    frequency = 10_000 ** -(torch.arange(4) / 3)
    torch.testing.assert_close(embedding.table_for((6, 4))[0, 1, :4], (-0.25 * frequency).sin())


def test_rope_table_is_evaluated_at_the_new_coordinates() -> None:
    rotary = RotaryPosition(ViTConfig(**TINY | {"positions": "rotary", "registers": 2}))
    cos, sin = rotary((6, 4))
    assert cos.shape == sin.shape == (3 + 24, 4)
    torch.testing.assert_close(cos[:3], torch.ones(3, 4))
    torch.testing.assert_close(sin[:3], torch.zeros(3, 4))
    frequency = torch.tensor([math.pi, math.pi / 10])
    coordinate = torch.tensor([0.75, -0.25])  # third row, first column of a grid twice as fine as the trained one
    torch.testing.assert_close(sin[3 + 2 * 4], (coordinate[:, None] * frequency).flatten().sin())


def test_rope_table_of_a_bf16_model_is_accurate_to_bf16() -> None:
    config = ViTConfig(positions="rotary", width=64, heads=4, depth=1)
    exact, rounded = RotaryPosition(config)((14, 14)), RotaryPosition(config).bfloat16()((14, 14))
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=2**-8)


def test_resampling_to_the_same_grid_is_the_identity() -> None:
    table = torch.randn(1, 6, 16)
    torch.testing.assert_close(resample_positions(table, (3, 2), (3, 2)), table)
    model = random_model()
    assert model.position_embedding is not None
    assert model.position_embedding.table_for((3, 2)) is model.position_embedding.table


def test_resampling_keeps_constants_and_the_class_token() -> None:
    model = random_model()
    assert model.position_embedding is not None
    table = model.position_embedding.table
    with torch.no_grad():
        table[:, 1:] = torch.arange(16.0)
    resampled = model.position_embedding.table_for((5, 7))
    torch.testing.assert_close(resampled[:, 1:], torch.arange(16.0).expand(1, 35, 16))
    torch.testing.assert_close(resampled[:, :1], table[:, :1], rtol=0, atol=0)


def test_resampling_does_not_mix_rows_and_columns() -> None:
    by_row = torch.arange(4.0).repeat_interleave(3).view(1, 12, 1)  # 4 down, 3 across; the value is the row
    finer = resample_positions(by_row, (4, 3), (8, 2)).view(8, 2)
    assert (finer.diff(dim=0) > 0).all()
    torch.testing.assert_close(finer[:, 0], finer[:, 1])


@pytest.mark.parametrize("positions", POSITIONS)
def test_another_image_size_warns_if_positions_are_resampled(positions: str) -> None:
    model, x = random_model(positions=positions), images(size=(16, 12))
    if positions == "none":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert model(x).shape == (2, 5)
        assert not caught
    else:
        with warns_of_resampling("3×2", "4×3"):
            assert model(x).shape == (2, 5)


@pytest.mark.parametrize("positions", ["learned+rotary", "sincos"])
def test_resampled_positions_stay_on_the_device(positions: str) -> None:
    with torch.device("meta"):
        model, x = ViT(ViTConfig(**TINY | {"positions": positions})), torch.ones(1, 3, 16, 16)
    with warns_of_resampling("3×2", "4×4"):
        assert model(x).device.type == "meta"


def test_registers_follow_the_class_token_and_have_no_position() -> None:
    model, without_registers, x = random_model(registers=2), random_model(), images()
    assert isinstance(model.registers, nn.Parameter)
    weights = {name: value for name, value in model.state_dict().items() if name != "registers"}
    without_registers.load_state_dict(weights)
    tokens, expected = model.embed(x, (3, 2)), without_registers.embed(x, (3, 2))
    torch.testing.assert_close(tokens[:, 1:3], model.registers.expand(2, -1, -1), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([tokens[:, :1], tokens[:, 3:]], 1), expected, rtol=0, atol=0)
    assert model.trace(x).num_prefix_tokens == model.config.num_prefix_tokens == 3


# Trace


@pytest.mark.parametrize(
    ("registers", "qk_norm", "layer_scale"),  # every pair of values
    [(0, False, None), (0, True, 0.1), (2, False, 0.1), (2, True, None)],
)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_trace_has_the_logits_of_forward(
    pooling: str, positions: str, registers: int, qk_norm: bool, layer_scale: float | None
) -> None:
    model = random_model(
        pooling=pooling, positions=positions, registers=registers, qk_norm=qk_norm, layer_scale=layer_scale
    )
    for x in (images(), images(size=(8, 12))):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "positions resampled from 3×2 to 2×3 patches")
            trace, logits, features = model.trace(x), model(x), model.features(x)
        torch.testing.assert_close(trace.logits, logits)
        torch.testing.assert_close(trace.pooled, features)
        T = (pooling == "class") + registers + 6
        assert [a.shape for a in trace.attention] == [(2, 2, T, T)] * 2
        assert [t.shape for t in trace.tokens] == [(2, T, 16)] * 3
        for attention in trace.attention:
            torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, T))
        assert trace.grid == (x.shape[2] // 4, x.shape[3] // 4)
        assert trace.num_prefix_tokens == T - 6


def test_trace_of_another_image_size_warns() -> None:
    with warns_of_resampling("3×2", "2×5"):
        trace = random_model().trace(images(size=(8, 20)))
    assert trace.grid == (2, 5)
    assert trace.attention[0].shape == (2, 2, 11, 11)


def test_trace_holds_patches_and_tokens_of_each_block() -> None:
    model, x = random_model(positions="rotary"), images()
    trace = model.trace(x)
    torch.testing.assert_close(unpatchify(trace.patches, trace.grid, 4), x, rtol=0, atol=0)
    z = model.embed(x, (3, 2))
    torch.testing.assert_close(trace.tokens[0], z)
    assert model.encoder.rotary_position is not None
    rope = model.encoder.rotary_position((3, 2))
    for block, after in zip(model.encoder.blocks, trace.tokens[1:], strict=True):
        z = block(z, rope)
        torch.testing.assert_close(after, z)
    torch.testing.assert_close(trace.pooled, model.encoder.norm(z)[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_traced_attention_matches_scalar_computation(rotary: bool, qk_norm: bool) -> None:
    settings = {"image_size": (4, 8), "depth": 1, "width": 8, "heads": 2, "qk_norm": qk_norm}
    model = random_model(**settings, positions="learned+rotary" if rotary else "learned").double()
    x = images(size=(4, 8)).double()
    trace, block = model.trace(x), model.encoder.blocks[0]
    normed = block.norm1(trace.tokens[0])
    for image, head, i in itertools.product(range(2), range(2), range(3)):
        weights = []
        for j in range(3):
            q, k = (
                [
                    float(normed[image, token] @ block.attention.qkv.weight[row] + block.attention.qkv.bias[row])
                    for row in range(8 * part + 4 * head, 8 * part + 4 * head + 4)
                ]
                for part, token in enumerate((i, j))
            )
            if qk_norm:
                q = block.attention.norm_q(torch.tensor(q, dtype=torch.float64)).tolist()
                k = block.attention.norm_k(torch.tensor(k, dtype=torch.float64)).tolist()
            if rotary:  # one row of two patches: the column pair of the second is rotated by π
                q, k = ([v[0], -v[1], v[2], -v[3]] if token == 2 else v for v, token in ((q, i), (k, j)))
            weights.append(math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / 4**0.5))
        expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        torch.testing.assert_close(trace.attention[0][image, head, i], expected, rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_traced_attention() -> None:
    model = random_model()
    trace = model.trace(images())
    gradients = torch.autograd.grad(trace.logits[:, 1].sum(), trace.attention)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_distilled_model_averages_the_logits_of_both_heads() -> None:
    model, x = random_model(DistilledViT), images()
    trace = model.trace(x)
    assert (trace.num_prefix_tokens, trace.attention[0].shape) == (2, (2, 2, 8, 8))
    table = model.distillation_token + model.distillation_position_table
    torch.testing.assert_close(trace.tokens[0][:, 1:2], table.expand(2, -1, -1))
    label, teacher = model.encoder.norm(trace.tokens[-1])[:, :2].unbind(1)
    expected = (model.head.label_head(label) + model.head.teacher_head(teacher)) / 2
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(trace.logits, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "mean"}, "model.pooling 'class', got 'mean'"),
        ({"positions": "learned+rotary"}, "model.positions 'learned', got 'learned\\+rotary'"),
        ({"registers": 1}, "model.registers 0, got 1"),
        ({"pre_norm": True}, "model.pre_norm False, got True"),
    ],
)
def test_unsupported_distilled_configurations_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"'distilled' requires {message}"):
        random_model(DistilledViT, **settings)


# Training


@pytest.mark.parametrize(
    "settings",
    [
        *[{"pooling": pooling, "positions": positions} for pooling in POOLINGS for positions in POSITIONS],
        {
            "registers": 3,
            "qk_norm": True,
            "layer_scale": 1e-4,
            "positions": "learned+rotary",
            "head": "mlp",
            "activation": "gelu_tanh",
        },
        {"qkv_bias": False, "mlp_width": 24, "pooling": "mean", "registers": 1},
        {"dropout": 0.1, "dropout_attention": 0.1, "dropout_embedding": 0.1, "patch_drop": 0.2, "drop_path": 0.1},
        {"depth": 1, "heads": 1},
    ],
    ids=str,
)
def test_gradient_reaches_every_parameter(settings: dict[str, Any]) -> None:
    assert_gradient_reaches_every_parameter(random_model(**settings))


def test_gradient_reaches_every_parameter_of_a_distilled_model() -> None:
    assert_gradient_reaches_every_parameter(random_model(DistilledViT, head="mlp", layer_scale=0.1))


def assert_gradient_reaches_every_parameter(model: ViT) -> None:
    model.train()
    F.cross_entropy(model(images(8)), torch.arange(8) % 5).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        rows = parameter.grad[0] if name.endswith(("table", "registers", "token")) else parameter.grad[None]
        assert (rows.flatten(1).abs().amax(1) > 1e-8).all(), name


BOTH_CLASSES = [*[(ViT, pooling) for pooling in POOLINGS], (DistilledViT, "class")]


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize(("model_class", "pooling"), BOTH_CLASSES)
def test_initial_loss_is_that_of_uniform_predictions(model_class: type[ViT], pooling: Any, head: Any) -> None:
    model = model_class(ViTConfig(**TINY | {"head": head, "pooling": pooling}))
    loss = F.cross_entropy(model(images(4)), torch.tensor([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(math.log(5), rel=1e-6)


def test_initial_weights_have_the_documented_distributions() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(64, 64), width=96, depth=2, heads=4, registers=4, head="mlp", pooling="attention", qk_norm=True
    )
    D, weights = 96, dict(ViT(config).named_parameters())
    for name, weight in weights.items():
        if name.endswith("bias") or name == "head.out.weight":
            assert (weight == 0).all(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        elif name.endswith(("table", "registers", "probe", "token")):
            assert weight.std().item() == pytest.approx(0.02, rel=0.2), name
        elif name in ("patch_embedding.project.weight", "head.hidden.weight"):
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05), name
        else:
            assert ("kv" in name) == (len(weight) in (2 * D, 3 * D))
            for part in weight.split(D) if "kv" in name else (weight,):
                bound = (6 / sum(part.shape)) ** 0.5
                assert 0.99 * bound < part.abs().max() <= bound, name
                assert part.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name


def test_drop_path_grows_linearly_from_zero() -> None:
    blocks = random_model(depth=5, drop_path=0.2).encoder.blocks
    assert [block.residual1.drop for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert [block.residual2.drop for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_stochastic_depth_drops_per_image_and_preserves_the_mean() -> None:
    torch.manual_seed(0)
    residual = Residual(ViTConfig(**TINY), drop=0.25)
    z, f = torch.full((20_000, 2, 16), 3.0), torch.ones(20_000, 2, 16)
    out = residual(z, f) - z
    assert ((out == 0).all((1, 2)) | torch.isclose(out, f / 0.75).all((1, 2))).all()
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(residual.eval()(z, f), z + f, rtol=0, atol=0)


def test_layer_scale_multiplies_the_branch() -> None:
    model: Any = ViT(ViTConfig(**TINY | {"layer_scale": 1e-5}))
    for block in model.encoder.blocks:
        for residual in (block.residual1, block.residual2):
            torch.testing.assert_close(residual.scale.data, torch.full((16,), 1e-5))
    residual.scale.data = torch.arange(16.0)
    torch.testing.assert_close(residual(torch.ones(1, 2, 16), torch.ones(1, 2, 16))[0, 0], 1 + torch.arange(16.0))
    assert not any("scale" in name for name in random_model().state_dict())


# Shapes, dtypes, compilers


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("size", [(4, 4), (8, 20), (20, 8)])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_number_of_channels_image_shape_and_batch_size(channels: int, size: tuple[int, int], batch: int) -> None:
    model = random_model(channels=channels, image_size=size)
    assert model(images(batch, channels, size)).shape == (batch, 5)
    assert model.config.grid == (size[0] // 4, size[1] // 4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_bf16_logits_are_close_to_fp32(positions: str, pooling: str) -> None:
    model = random_model(positions=positions, pooling=pooling, registers=1, qk_norm=True, layer_scale=0.5)
    x = images()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        autocast, traced = model(x), model.trace(x).logits
    converted = copy.deepcopy(model).bfloat16()(x.bfloat16())
    for logits in (autocast, traced, converted):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary"])
def test_resampled_positions_stay_bf16(positions: str) -> None:
    with warns_of_resampling("3×2", "4×4"):
        logits = random_model(positions=positions).bfloat16()(images(size=(16, 16)).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_model_has_the_same_logits() -> None:
    model = random_model(positions="learned+rotary", depth=1, qk_norm=True)
    compiled: Any = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "pooling"), BOTH_CLASSES)
def test_exported_model_accepts_any_batch_size(model_class: type[ViT], pooling: str) -> None:
    settings: dict[str, Any] = {"registers": 1, "positions": "learned+rotary"} if model_class is ViT else {}
    model = random_model(model_class, pooling=pooling, **settings)
    batch = torch.export.Dim("batch")
    program: Any = torch.export.export(model, (images(2),), dynamic_shapes=({0: batch},))
    exported = program.module()
    for size in (1, 2, 7):
        torch.testing.assert_close(exported(images(size)), model(images(size)))


def test_state_dict_round_trip() -> None:
    source = random_model(positions="learned+rotary", registers=1, head="mlp")
    target = ViT(source.config)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.eval()(images()), source(images()), rtol=0, atol=0)


REFERENCE_LOGITS: list[tuple[dict[str, Any], list[list[float]]]] = [
    # The first was also computed by an independent implementation in NumPy.
    ({}, [[-0.291357, 1.339394, 0.204911], [-0.371858, 1.10378, 0.353975]]),
    (
        {"pooling": "mean", "positions": "sincos", "head": "mlp", "activation": "gelu_tanh", "registers": 1},
        [[0.535056, 0.144441, -0.002153], [0.549083, 0.127355, -0.008522]],
    ),
    (
        {"pooling": "attention", "positions": "learned+rotary", "qk_norm": True, "layer_scale": 0.5, "qkv_bias": False},
        [[1.276832, -0.715857, -0.674709], [1.277115, -0.716481, -0.673814]],
    ),
]


@pytest.mark.parametrize(("settings", "expected"), REFERENCE_LOGITS, ids=["paper", "simple", "modern"])
def test_logits_match_the_reference_values(settings: dict[str, Any], expected: list[list[float]]) -> None:
    model = ViT(ViTConfig(image_size=(4, 6), patch_size=2, num_classes=3, width=8, depth=2, heads=2, **settings)).eval()
    fill(model)
    x = torch.linspace(-1, 1, 2 * 3 * 4 * 6, dtype=torch.float64).mul(9).cos().float().view(2, 3, 4, 6)
    torch.testing.assert_close(model(x), torch.tensor(expected), rtol=1e-4, atol=1e-5)
