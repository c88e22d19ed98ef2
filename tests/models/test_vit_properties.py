"""Properties of the ViT and its configuration for arbitrary shapes, grids and fields (hypothesis)."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import Any, get_args

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.common import unpatchify
from vitral.errors import VitralError
from vitral.models.vit import (
    Activation,
    Head,
    Pooling,
    Positions,
    RotaryPosition,
    ViT,
    ViTConfig,
    apply_rope,
    patchify,
    resample_positions,
)
from vitral.utils.serialization import from_dict, to_dict

settings.register_profile("here", max_examples=60, deadline=None)
settings.load_profile("here")

sides = st.integers(1, 6)
grids = st.tuples(sides, sides)
rates = st.floats(0, 0.99)


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    heads, patch_size, grid = draw(st.integers(1, 4)), draw(sides), draw(grids)
    return ViTConfig(
        image_size=(grid[0] * patch_size, grid[1] * patch_size),
        patch_size=patch_size,
        channels=draw(st.integers(1, 5)),
        num_classes=draw(st.integers(1, 9)),
        width=heads * 4 * draw(st.integers(1, 3)),
        depth=draw(st.integers(1, 3)),
        heads=heads,
        mlp_width=draw(st.none() | st.integers(1, 40)),
        pooling=draw(st.sampled_from(get_args(Pooling))),
        positions=draw(st.sampled_from(get_args(Positions))),
        registers=draw(st.integers(0, 3)),
        dropout_embedding=draw(rates),
        dropout_attention=draw(rates),
        dropout=draw(rates),
        drop_path=draw(rates),
        layer_scale=draw(st.none() | st.floats(1e-12, 2)),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        head=draw(st.sampled_from(get_args(Head))),
        activation=draw(st.sampled_from(get_args(Activation))),
        norm_eps=draw(st.floats(1e-12, 1e-2)),
    )


@given(batch=st.integers(1, 3), channels=st.integers(1, 4), grid=grids, P=sides)
def test_unpatchify_inverts_patchify(batch: int, channels: int, grid: tuple[int, int], P: int) -> None:
    x = torch.arange(batch * channels * grid[0] * grid[1] * P * P).view(batch, channels, grid[0] * P, grid[1] * P)
    patches = patchify(x, P)
    assert patches.shape == (batch, grid[0] * grid[1], channels * P * P)
    assert torch.equal(unpatchify(patches, grid, P), x)


@given(batch=st.integers(1, 2), channels=st.integers(1, 3), grid=grids, P=sides, data=st.data())
def test_patch_holds_the_pixels_at_its_position(
    batch: int, channels: int, grid: tuple[int, int], P: int, data: st.DataObject
) -> None:
    x = torch.arange(batch * channels * grid[0] * grid[1] * P * P).view(batch, channels, grid[0] * P, grid[1] * P)
    row, column = data.draw(st.integers(0, grid[0] - 1)), data.draw(st.integers(0, grid[1] - 1))
    square = x[:, :, row * P : (row + 1) * P, column * P : (column + 1) * P]
    assert torch.equal(patchify(x, P)[:, row * grid[1] + column], square.flatten(1))


@settings(max_examples=30)
@given(config=configs())
def test_any_valid_config_has_equal_logits_with_and_without_trace(config: ViTConfig) -> None:
    model: Any = ViT(config).eval()
    torch.nn.init.normal_(model.head.out.weight)
    x = torch.rand(2, config.channels, *config.image_size)
    trace = model.trace(x)
    assert model(x).shape == (2, config.num_classes)
    torch.testing.assert_close(trace.logits, model(x), rtol=1e-3, atol=1e-4)
    assert trace.num_prefix_tokens == config.num_prefix_tokens
    assert trace.tokens[0].shape == (2, config.num_prefix_tokens + config.grid[0] * config.grid[1], config.width)


@given(config=configs())
def test_config_round_trips_through_json_and_toml(config: ViTConfig) -> None:
    values = to_dict(config)
    assert from_dict(ViTConfig, json.loads(json.dumps(values))) == config
    assert from_dict(ViTConfig, tomllib.loads(tomli_w.dumps(values))) == config


@given(old=grids, new=grids, width=st.integers(1, 5), a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_resampling_is_linear(old: tuple[int, int], new: tuple[int, int], width: int, a: float, b: float) -> None:
    first, second = torch.randn(2, 1, old[0] * old[1], width)
    resampled = resample_positions(a * first + b * second, old, new)
    assert resampled.shape == (1, new[0] * new[1], width)
    expected = a * resample_positions(first, old, new) + b * resample_positions(second, old, new)
    torch.testing.assert_close(resampled, expected, rtol=1e-3, atol=1e-4)


@given(old=grids, new=grids)
def test_resampling_is_symmetric_in_height_and_width(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = torch.randn(1, *old, 2)
    resampled = resample_positions(table.flatten(1, 2), old, new).view(*new, 2)
    transposed = resample_positions(table.transpose(1, 2).flatten(1, 2), old[::-1], new[::-1]).view(*new[::-1], 2)
    torch.testing.assert_close(resampled, transposed.transpose(0, 1), rtol=1e-4, atol=1e-5)


@given(old=grids, new=grids, value=st.floats(-5, 5))
def test_resampling_preserves_constants(old: tuple[int, int], new: tuple[int, int], value: float) -> None:
    table = resample_positions(torch.full((1, old[0] * old[1], 1), value), old, new)
    torch.testing.assert_close(table, torch.full_like(table, value))


@given(grid=st.tuples(st.integers(2, 8), st.integers(2, 8)), prefix=st.integers(0, 2), data=st.data())
def test_rope_scores_depend_only_on_relative_position(grid: tuple[int, int], prefix: int, data: st.DataObject) -> None:
    H, W = grid
    config = ViTConfig(
        image_size=grid, patch_size=1, width=16, heads=2, positions="rotary", pooling="mean", registers=prefix
    )
    rope = RotaryPosition(config)(grid)
    down, across = data.draw(st.integers(1 - H, H - 1)), data.draw(st.integers(1 - W, W - 1))
    q, k = torch.randn(2, 1, 1, 1, 8)
    q, k = (apply_rope(x.expand(1, 1, prefix + H * W, 8), rope)[0, 0, prefix:].view(H, W, 8) for x in (q, k))
    scores = [
        float(q[y, x] @ k[y + down, x + across])
        for y in range(max(0, -down), min(H, H - down))
        for x in range(max(0, -across), min(W, W - across))
    ]
    assert scores == pytest.approx([scores[0]] * len(scores), abs=1e-3)


@given(data=st.data())
def test_rope_preserves_norms_and_prefix_tokens(data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, 3))
    config = ViTConfig(image_size=(4, 6), patch_size=2, width=24, heads=3, positions="rotary", registers=prefix)
    x = torch.randn(1, 3, 1 + prefix + 6, 8)
    rotated = apply_rope(x, RotaryPosition(config)((2, 3)))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, :, : 1 + prefix], x[:, :, : 1 + prefix])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_clases": 10}, r"^no field named 'num_clases'\. Did you mean 'num_classes'\?"),
        ({"patch_sizem": 4}, "Did you mean 'patch_size'"),
        ({"zzzzzz": 4}, r"^no field named 'zzzzzz'\nFields: image_size, patch_size"),
        ({"num_classes": "10"}, r"^num_classes must be int, got '10'"),
        ({"num_classes": 10.0}, r"^num_classes must be int, got 10\.0"),
        ({"num_classes": True}, r"^num_classes must be int, got True"),
        ({"num_classes": None}, r"^num_classes must be int, got None"),
        ({"qk_norm": 1}, r"^qk_norm must be bool, got 1"),
        ({"dropout": "0.1"}, r"^dropout must be float, got '0\.1'"),
        ({"dropout": True}, r"^dropout must be float, got True"),
        ({"layer_scale": "small"}, r"^layer_scale must be float, got 'small'"),
        ({"image_size": 224}, r"^image_size must be tuple\[int, int\], got 224"),
        ({"image_size": [224]}, r"^image_size must be tuple\[int, int\], got \[224\]"),
        ({"image_size": [224, "224"]}, r"^image_size must be int, got '224'"),
        ({"pooling": "cls"}, r"^pooling must be one of class, mean, attention, got 'cls'"),
        ({"image_size": [324, 324]}, "324 is not divisible by the patch size 16; try 320 or 336"),
        ({"width": 770}, r"^width must be a multiple of 12"),
    ],
)
def test_from_dict_refuses_unknown_fields_wrong_types_and_invalid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(VitralError, match=message):
        from_dict(ViTConfig, values)


def test_from_dict_accepts_ints_as_floats_lists_as_tuples_and_none() -> None:
    config = from_dict(ViTConfig, {"dropout": 0, "image_size": [32, 32], "layer_scale": None, "mlp_width": None})
    assert config == ViTConfig(image_size=(32, 32))
    assert isinstance(config.dropout, float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    names: tuple[str, ...] = ()
    more: Inner | None = None


def test_from_dict_errors_name_nested_fields() -> None:
    outer = Outer(inner=Inner(size=3), names=("a", "b", "c"))
    assert to_dict(outer) == {"inner": {"size": 3}, "names": ["a", "b", "c"]}
    assert from_dict(Outer, to_dict(outer)) == outer
    with pytest.raises(VitralError, match=r"named 'inner\.sise'\. Did you mean 'size'\?\nFields in inner: size"):
        from_dict(Outer, {"inner": {"sise": 3}})
    with pytest.raises(VitralError, match=r"^inner\.size must be int, got 'x'"):
        from_dict(Outer, {"inner": {"size": "x"}})
    with pytest.raises(VitralError, match=r"^the field 'inner' is missing"):
        from_dict(Outer, {})
    with pytest.raises(VitralError, match=r"^the field 'more\.size' is missing"):
        from_dict(Outer, {"inner": {"size": 3}, "more": {}})
    with pytest.raises(VitralError, match=r"^inner must be Inner, got 3"):
        from_dict(Outer, {"inner": 3})
    with pytest.raises(VitralError, match=r"^names must be str, got 1"):
        from_dict(Outer, {"inner": {"size": 3}, "names": ["a", 1]})
