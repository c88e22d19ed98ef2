"""What must hold for every shape, grid and configuration, not for chosen ones: hypothesis looks for the exception."""

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

from vitral.errors import VitralError
from vitral.models.vit import (
    Gelu,
    Head,
    Pooling,
    Positions,
    RotaryPosition,
    ViT,
    ViTConfig,
    patchify,
    resample_positions,
    rotate,
    unpatchify,
)
from vitral.utils.serialization import from_plain, to_plain

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
        classes=draw(st.integers(1, 9)),
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
        gelu=draw(st.sampled_from(get_args(Gelu))),
        norm_eps=draw(st.floats(1e-12, 1e-2)),
    )


@given(batch=st.integers(1, 3), channels=st.integers(1, 4), grid=grids, P=sides)
def test_unpatchify_undoes_patchify(batch: int, channels: int, grid: tuple[int, int], P: int) -> None:
    x = torch.arange(batch * channels * grid[0] * grid[1] * P * P).view(batch, channels, grid[0] * P, grid[1] * P)
    patches = patchify(x, P)
    assert patches.shape == (batch, grid[0] * grid[1], channels * P * P)
    assert torch.equal(unpatchify(patches, grid, P), x)


@given(batch=st.integers(1, 2), channels=st.integers(1, 3), grid=grids, P=sides, data=st.data())
def test_a_patch_is_the_square_of_pixels_at_its_place(
    batch: int, channels: int, grid: tuple[int, int], P: int, data: st.DataObject
) -> None:
    x = torch.arange(batch * channels * grid[0] * grid[1] * P * P).view(batch, channels, grid[0] * P, grid[1] * P)
    row, column = data.draw(st.integers(0, grid[0] - 1)), data.draw(st.integers(0, grid[1] - 1))
    square = x[:, :, row * P : (row + 1) * P, column * P : (column + 1) * P]
    assert torch.equal(patchify(x, P)[:, row * grid[1] + column], square.flatten(1))


@settings(max_examples=30)
@given(config=configs())
def test_any_valid_configuration_makes_a_model_that_answers_and_traces_alike(config: ViTConfig) -> None:
    model: Any = ViT(config).eval()
    torch.nn.init.normal_(model.head.out.weight)
    x = torch.rand(2, config.channels, *config.image_size)
    trace = model.trace(x)
    assert model(x).shape == (2, config.classes)
    torch.testing.assert_close(trace.logits, model(x), rtol=1e-3, atol=1e-4)
    assert trace.prefix == config.prefix
    assert trace.tokens[0].shape == (2, config.prefix + config.grid[0] * config.grid[1], config.width)


@given(config=configs())
def test_a_configuration_survives_json_and_toml(config: ViTConfig) -> None:
    plain = to_plain(config)
    assert from_plain(ViTConfig, json.loads(json.dumps(plain))) == config
    assert from_plain(ViTConfig, tomllib.loads(tomli_w.dumps(plain))) == config


@given(old=grids, new=grids, width=st.integers(1, 5), a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_resampling_is_linear_and_gives_a_row_for_each_new_place(
    old: tuple[int, int], new: tuple[int, int], width: int, a: float, b: float
) -> None:
    one, other = torch.randn(2, 1, old[0] * old[1], width)
    mixed = resample_positions(a * one + b * other, old, new)
    assert mixed.shape == (1, new[0] * new[1], width)
    apart = a * resample_positions(one, old, new) + b * resample_positions(other, old, new)
    torch.testing.assert_close(mixed, apart, rtol=1e-3, atol=1e-4)


@given(old=grids, new=grids)
def test_resampling_treats_height_and_width_alike(old: tuple[int, int], new: tuple[int, int]) -> None:
    rows = torch.randn(1, *old, 2)
    there = resample_positions(rows.flatten(1, 2), old, new).view(*new, 2)
    turned = resample_positions(rows.transpose(1, 2).flatten(1, 2), old[::-1], new[::-1]).view(*new[::-1], 2)
    torch.testing.assert_close(there, turned.transpose(0, 1), rtol=1e-4, atol=1e-5)


@given(old=grids, new=grids, value=st.floats(-5, 5))
def test_a_constant_table_stays_constant(old: tuple[int, int], new: tuple[int, int], value: float) -> None:
    rows = resample_positions(torch.full((1, old[0] * old[1], 1), value), old, new)
    torch.testing.assert_close(rows, torch.full_like(rows, value))


@given(grid=st.tuples(st.integers(2, 8), st.integers(2, 8)), prefix=st.integers(0, 2), data=st.data())
def test_rotary_scores_depend_on_the_offset_between_two_places_alone(
    grid: tuple[int, int], prefix: int, data: st.DataObject
) -> None:
    H, W = grid
    config = ViTConfig(
        image_size=grid, patch_size=1, width=16, heads=2, positions="rotary", pooling="mean", registers=prefix
    )
    turn = RotaryPosition(config)(grid)
    down, across = data.draw(st.integers(1 - H, H - 1)), data.draw(st.integers(1 - W, W - 1))
    q, k = torch.randn(2, 1, 1, 1, 8)
    q, k = (rotate(x.expand(1, 1, prefix + H * W, 8), turn)[0, 0, prefix:].view(H, W, 8) for x in (q, k))
    scores = [
        float(q[y, x] @ k[y + down, x + across])
        for y in range(max(0, -down), min(H, H - down))
        for x in range(max(0, -across), min(W, W - across))
    ]
    assert scores == pytest.approx([scores[0]] * len(scores), abs=1e-3)


@given(data=st.data())
def test_rotation_keeps_lengths_and_leaves_tokens_in_front_alone(data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, 3))
    config = ViTConfig(image_size=(4, 6), patch_size=2, width=24, heads=3, positions="rotary", registers=prefix)
    x = torch.randn(1, 3, 1 + prefix + 6, 8)
    turned = rotate(x, RotaryPosition(config)((2, 3)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, : 1 + prefix], x[:, :, : 1 + prefix])


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clases": 10}, r"^no field 'clases'\. Did you mean classes\?"),
        ({"patch_sizem": 4}, "Did you mean patch_size"),
        ({"zzzzzz": 4}, r"^no field 'zzzzzz'\.\nKnown: image_size, patch_size"),
        ({"classes": "10"}, r"^classes must be int, not '10'"),
        ({"classes": 10.0}, r"^classes must be int, not 10\.0"),
        ({"classes": True}, r"^classes must be int, not True"),
        ({"classes": None}, r"^classes must be int, not None"),
        ({"qk_norm": 1}, r"^qk_norm must be bool, not 1"),
        ({"dropout": "0.1"}, r"^dropout must be float, not '0\.1'"),
        ({"dropout": True}, r"^dropout must be float, not True"),
        ({"layer_scale": "small"}, r"^layer_scale must be float, not 'small'"),
        ({"image_size": 224}, r"^image_size must be tuple\[int, int\], not 224"),
        ({"image_size": [224]}, r"^image_size must be tuple\[int, int\], not \[224\]"),
        ({"image_size": [224, "224"]}, r"^image_size must be int, not '224'"),
        ({"pooling": "cls"}, r"^pooling must be one of class, mean, attention, not 'cls'"),
        ({"image_size": [324, 324]}, "324 is not a multiple of patch_size 16; 320 and 336 are"),
        ({"width": 770}, r"^width must be a multiple of 12"),
    ],
)
def test_from_plain_refuses_unknown_names_wrong_types_and_wrong_values(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(VitralError, match=complaint):
        from_plain(ViTConfig, values)


def test_from_plain_takes_whole_numbers_for_fractions_lists_for_tuples_and_none_for_optional_fields() -> None:
    config = from_plain(ViTConfig, {"dropout": 0, "image_size": [32, 32], "layer_scale": None, "mlp_width": None})
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


def test_nested_dataclasses_are_read_and_written_with_the_way_to_the_field_in_errors() -> None:
    outer = Outer(inner=Inner(size=3), names=("a", "b", "c"))
    assert to_plain(outer) == {"inner": {"size": 3}, "names": ["a", "b", "c"]}
    assert from_plain(Outer, to_plain(outer)) == outer
    with pytest.raises(VitralError, match=r"^no field 'inner\.sise'\. Did you mean size\?\nKnown in inner: size"):
        from_plain(Outer, {"inner": {"sise": 3}})
    with pytest.raises(VitralError, match=r"^inner\.size must be int, not 'x'"):
        from_plain(Outer, {"inner": {"size": "x"}})
    with pytest.raises(VitralError, match=r"^the field 'inner' is missing"):
        from_plain(Outer, {})
    with pytest.raises(VitralError, match=r"^the field 'more\.size' is missing"):
        from_plain(Outer, {"inner": {"size": 3}, "more": {}})
    with pytest.raises(VitralError, match=r"^inner must be Inner, not 3"):
        from_plain(Outer, {"inner": 3})
    with pytest.raises(VitralError, match=r"^names must be str, not 1"):
        from_plain(Outer, {"inner": {"size": 3}, "names": ["a", 1]})
