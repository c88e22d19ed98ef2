"""The hybrid against timm's, against the plain ViT's contract, and through a model folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from support.common import identical, textures
from support.references import answers, lively, pictures, timm
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.explain import api as pictures_of
from vitral.explain import faithfulness
from vitral.explain.pair import beside
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS, variant_of
from vitral.models.variants.hybrid import (
    HYBRIDS,
    ConvStem,
    ConvStemConfig,
    HybridConfig,
    HybridViT,
    ResNetConfig,
    StandardConv,
    hybrid,
)
from vitral.models.vit import ViTConfig, patchify
from vitral.recipes.schema import Optim
from vitral.reporting.figures import heatmaps
from vitral.runs.run import ModelCard, load_model, save_model
from vitral.serve.explain_payload import Wish, look_inside
from vitral.training.optim.build import make_optimizers

SMALL: dict[str, Any] = {"classes": 5, "width": 32, "depth": 2, "heads": 2}
RESNET = HybridConfig(
    image_size=(32, 48), patch_size=16, resnet=ResNetConfig(blocks=(1, 2, 1), width=32), positions="learned", **SMALL
)
CONV = HybridConfig(image_size=(8, 12), patch_size=4, conv=ConvStemConfig(widths=(8, 16), strides=(2, 2)), **SMALL)
WIDE = replace(CONV, image_size=(16, 24), patch_size=8)  # patches of 2×2 on the feature map
LESS = replace(CONV, image_size=(12, 16), conv=ConvStemConfig(widths=(8, 16), strides=(2, 2), whole=False))
STEMS = {"resnet": RESNET, "conv": CONV, "patches on the map": WIDE, "not whole": LESS}
stems = pytest.mark.parametrize("config", STEMS.values(), ids=STEMS.keys())

# A regular expression over timm's names, and ours.
NAMES = {
    r"patch_embed\.backbone\.stem\.(conv|norm)": r"patch_embedding.stem.root.\1",
    r"patch_embed\.backbone\.(conv|norm)": r"patch_embedding.stem.root.\1",
    r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.": r"patch_embedding.stem.stages.\1.\2.",
    r"(conv|norm)1\.(weight|bias)$": r"reduce.\1.\2",
    r"(conv|norm)2\.(weight|bias)$": r"spatial.\1.\2",
    r"(conv|norm)3\.(weight|bias)$": r"expand.\1.\2",
    r"downsample": "shortcut",
    r"patch_embed\.proj": "patch_embedding.project",
    r"cls_token": "class_token.token",
    r"pos_embed": "position_embedding.table",
    r"^blocks\.(\d+)\.": r"encoder.blocks.\1.",
    r"\.attn\.qkv": ".attention.qkv",
    r"\.attn\.proj": ".attention.project",
    r"\.mlp\.fc1": ".mlp.expand",
    r"\.mlp\.fc2": ".mlp.contract",
    r"^norm\.": "encoder.norm.",
    r"^head\.": "head.out.",
}


def moved(model: Any) -> dict[str, Tensor]:
    """timm's weights under our names; a convolution that covers its input once is a matrix here."""
    state = {}
    for name, tensor in model.state_dict().items():
        stem = name.startswith("patch_embed.backbone.stages")
        for theirs, ours in NAMES.items():
            if stem or not ours.startswith(("reduce", "spatial", "expand")):
                name = re.sub(theirs, ours, name)
        state[name] = tensor.flatten(1) if name.endswith("embedding.project.weight") else tensor
    return state


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def card(config: ViTConfig, **changes: Any) -> ModelCard:
    seen = Preprocessing(image_size=config.image_size, channels=config.channels, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple(f"class {k}" for k in range(config.classes))
    made = {"architecture": config, "preprocessing": seen, "classes": names, "trained_on": "nothing", "epoch": 0}
    return ModelCard(**made | {"variant": "hybrid"} | changes)


# ── timm's ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("preset", "theirs", "parameters"),
    [
        ("R26+S/32", "vit_small_r26_s32_224", 36_431_912),
        ("R50+B/16", "vit_base_r50_s16_224", 98_659_112),
        ("R50+L/32", "vit_large_r50_s32_224", 328_994_856),
    ],
)
def test_presets_have_the_parameters_of_timms_models(preset: str, theirs: str, parameters: int) -> None:
    with torch.device("meta"):
        ours, reference = HybridViT.from_preset(preset), timm.create_model(theirs, num_classes=1000)
    assert count(ours) == count(reference) == parameters
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == {
        name: tensor.shape for name, tensor in moved(reference).items()
    }


@pytest.mark.parametrize(
    ("theirs", "asked", "config"),
    [
        # whole, and of the real size
        ("vit_small_r26_s32_224", {"img_size": 64}, hybrid("R26+S/32", image_size=(64, 64), classes=7)),
        # whole stems in front of a small encoder
        (
            "vit_base_r50_s16_224",
            {"img_size": (64, 96), "embed_dim": 48, "depth": 2, "num_heads": 4},
            hybrid("R50+B/16", image_size=(64, 96), width=48, depth=2, heads=4, classes=7),
        ),
        (
            "vit_large_r50_s32_224",
            {"img_size": (96, 64), "embed_dim": 48, "depth": 1, "num_heads": 4, "in_chans": 1},
            hybrid("R50+L/32", image_size=(96, 64), width=48, depth=1, heads=4, classes=7, channels=1),
        ),
        # the root alone, with patches of 8×8 on its map
        (
            "vit_tiny_r_s16_p8_224",
            {"img_size": 96, "depth": 1},
            HybridConfig(
                image_size=(96, 96),
                patch_size=32,
                width=192,
                depth=1,
                heads=3,
                classes=7,
                resnet=ResNetConfig(blocks=()),
            ),
        ),
    ],
    ids=["R26+S/32", "R50, stride 16", "R50, stride 32", "root alone"],
)
def test_timms_weights_give_timms_logits(theirs: str, asked: dict[str, Any], config: HybridConfig) -> None:
    reference = lively(timm.create_model(theirs, num_classes=7, **asked))
    model = HybridViT(config).eval()
    model.load_state_dict(moved(reference))
    x = pictures(*config.image_size, channels=config.channels)
    want = answers(reference, x)
    assert want.std() > 0.1
    torch.testing.assert_close(answers(model, x), want, rtol=1e-4, atol=1e-4)


# ── the stems ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preset", HYBRIDS)
def test_the_stem_s_map_has_the_size_and_channels_that_its_config_says(preset: str) -> None:
    config = HYBRIDS[preset]
    with torch.device("meta"):
        model = HybridViT(config)
        feature_map = model.patch_embedding.stem(torch.empty(1, 3, *config.image_size))
        tokens = model.patch_embedding(torch.empty(1, 3, *config.image_size))
    height, width = config.image_size
    stride = config.stem.stride
    assert feature_map.shape == (1, config.stem.channels, height // stride, width // stride)
    assert tokens.shape == (1, config.grid[0] * config.grid[1], config.width)


@pytest.mark.parametrize("strides", [(1, 2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("sides", [1, 3, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_a_conv_stem_s_map_has_the_places_that_its_config_counts(strides: Any, sides: int, whole: bool) -> None:
    config = ConvStemConfig(widths=(8,) * len(strides), strides=strides, whole=whole)
    pixels = (sides + (not whole)) * config.stride
    with torch.device("meta"):
        found = ConvStem(config, 3, 1e-6)(torch.empty(1, 3, pixels, pixels)).shape
    assert found == (1, 8, config.places(pixels), config.places(pixels))
    assert config.places(pixels) == sides + (not whole and 2 not in strides)


def test_small_images_have_eight_by_eight_tokens() -> None:
    assert {HYBRIDS[name].grid for name in HYBRIDS if name.startswith("conv-")} == {(8, 8)}


@pytest.mark.parametrize("preset", ["conv-Ti/4", "conv-S/4"])
def test_the_conv_stem_does_the_arithmetic_of_about_one_block(preset: str) -> None:
    """With its eleven blocks it costs no more than twelve blocks and patches of pixels."""
    config = HYBRIDS[preset]
    assert config.conv is not None
    assert config.depth == 11
    layers = zip((3, *config.conv.widths[:-1]), config.conv.widths, (1, 2, 4), strict=True)
    stem = sum(9 * inputs * outputs * (32 // down) ** 2 for inputs, outputs, down in layers)
    block = 12 * config.width**2 * 65 + 2 * 65**2 * config.width
    assert 0.5 * block < stem < block


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_padding_keeps_side_over_stride_with_the_odd_pixel_behind(kernel: int, stride: int) -> None:
    conv, x = lively(StandardConv(8, 4, kernel, stride)), pictures(12, 6, channels=8)
    filters = conv.weight - conv.weight.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.std(dim=(1, 2, 3), keepdim=True, correction=0)
    pad = max(kernel - stride, 0)
    before, behind = pad // 2, pad - pad // 2
    want = F.conv2d(F.pad(x, (before, behind, before, behind)), filters, stride=stride)
    assert want.shape == (2, 4, 12 // stride, 6 // stride)
    torch.testing.assert_close(conv(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1)])
def test_a_compiled_stem_multiplies_the_patches_of_pixels(kernel: int, stride: int) -> None:
    conv, x = lively(StandardConv(3, 8, kernel, stride)), pictures(12, 6)
    called: list[str] = []

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(conv, backend=noting)
    torch.testing.assert_close(compiled(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not any("conv2d" in name for name in called)


@stems
def test_the_size_of_a_filter_does_not_matter(config: HybridConfig) -> None:
    model, x = lively(HybridViT(config)), pictures(*config.image_size)
    want = answers(model, x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StandardConv):
                module.weight.mul_(7).add_(0.3)
    torch.testing.assert_close(answers(model, x), want, rtol=1e-3, atol=1e-4)


@stems
def test_an_image_is_answered_alike_alone_and_in_a_batch_in_training_and_in_use(config: HybridConfig) -> None:
    model, x = lively(HybridViT(config)), pictures(*config.image_size, count=3)
    want = answers(model, x)
    torch.testing.assert_close(answers(model, x[1:2]), want[1:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answers(model.train(), x), want)


def test_a_new_model_s_blocks_are_their_shortcuts_and_its_odds_equal() -> None:
    torch.manual_seed(0)
    model, x = HybridViT(RESNET), pictures(*RESNET.image_size)
    stem: Any = model.patch_embedding.stem
    positive = torch.rand(2, 256, 4, 6)
    assert torch.equal(stem.stages[1][1](positive), positive)
    assert answers(model, x).abs().max() == 0
    assert 0.3 < model.patch_embedding(x).std() < 3


# ── the contract of the plain ViT ──────────────────────────────────────────────────────────────────────────────


@stems
def test_gradients_reach_every_parameter(config: HybridConfig) -> None:
    model = lively(HybridViT(config)).train()
    F.cross_entropy(model(pictures(*config.image_size)), torch.tensor([0, 3])).backward()
    faint = [n for n, p in model.named_parameters() if p.grad is None or not 1e-8 < p.grad.norm() < 1e3]
    assert faint == []


@stems
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_trace_has_the_fast_logits_and_the_pixels_under_each_token(config: HybridConfig, pooling: Any) -> None:
    config = replace(config, pooling=pooling, registers=1, positions="learned+rotary")
    model, x = lively(HybridViT(config)), pictures(*config.image_size)
    with torch.inference_mode():
        trace = model.trace(x)
    torch.testing.assert_close(trace.logits, answers(model, x))
    assert trace.grid == config.grid == (2, 3)
    assert trace.prefix == config.prefix
    assert trace.margin == margin_of(config)
    inner = x[:, :, 2:-2, 2:-2] if trace.margin else x
    assert torch.equal(trace.patches, patchify(inner, config.patch_size))
    assert [a.shape for a in trace.attention] == [(2, 2, 6 + config.prefix, 6 + config.prefix)] * 2


@stems
def test_images_of_another_size_pass_with_a_warning_and_those_that_do_not_fit_are_refused(config: HybridConfig) -> None:
    model, P, room = lively(HybridViT(config)), config.patch_size, 2 * margin_of(config)
    with pytest.warns(UserWarning, match="positions resampled from 2×3 to 3×1 patches"):
        assert answers(model, pictures(3 * P + room, P + room)).shape == (2, 5)
    if room:
        with pytest.raises(ValueError, match="images of 12×4 pixels are too small for a single token"):
            model(pictures(12, 4))
    with pytest.raises(ValueError, match=f"image height {P + 2} is not a multiple of patch_size {P}"):
        model(pictures(P + 2, P))


def margin_of(config: HybridConfig) -> int:
    return 2 if config is LESS or config.conv == LESS.conv else 0


@pytest.mark.parametrize("config", [CONV, LESS], ids=["whole", "not whole"])
def test_a_change_in_the_pixels_of_a_patch_shows_most_on_the_map_under_its_token(config: HybridConfig) -> None:
    stem, margin = lively(HybridViT(config)).patch_embedding.stem, margin_of(config)
    x = pictures(*config.image_size, count=50)
    for place in range(6):
        changed = x.clone()
        y, z = margin + 4 * (place // 3), margin + 4 * (place % 3)
        changed[:, :, y : y + 4, z : z + 4] += 3
        with torch.inference_mode():
            moves = (stem(changed) - stem(x)).abs().sum(dim=(0, 1)).flatten()
        assert moves.argmax() == place


@pytest.mark.parametrize(("config", "size"), [(CONV, (8, 12)), (LESS, (8, 12))], ids=["whole", "not whole"])
def test_a_page_is_sent_what_the_patches_cover(config: HybridConfig, size: tuple[int, int], cpu: Hardware) -> None:
    seen = Preprocessing(image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple("abcde")
    card = ModelCard(architecture=config, preprocessing=seen, classes=names, trained_on="x", epoch=1, variant="hybrid")
    predictor = Predictor(lively(HybridViT(config)), card, cpu)
    pixels = torch.randint(0, 256, (3, *config.image_size), dtype=torch.uint8)
    found = look_inside(predictor, pixels, Wish(methods=("rollout",)))
    assert found["grid"] == [2, 3]
    for sent in (found["image"], found["heatmaps"]["rollout"]):
        assert (sent["height"], sent["width"]) == size


def test_explanations_of_a_hybrid_that_is_not_whole_are_told_and_tested(cpu: Hardware) -> None:
    seen = Preprocessing(image_size=LESS.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple("abcde")
    card = ModelCard(architecture=LESS, preprocessing=seen, classes=names, trained_on="x", epoch=1, variant="hybrid")
    predictor = Predictor(lively(HybridViT(LESS)), card, cpu)
    pixels = torch.randint(0, 256, (12, 3, *LESS.image_size), dtype=torch.uint8)
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    told = heatmaps.as_dict(pictures_of.explain(predictor, picture, methods=["rollout"]), predictor, [])
    assert np.array(told["maps"][0]["patches"]).shape == (2, 3)
    found = faithfulness.measure(
        predictor, Split(images=pixels, labels=torch.arange(12) % 5), ["rollout"], images=4, pairs=4
    )
    assert [row.method for row in found.rows] == ["rollout", faithfulness.RANDOM]
    alone, wide = (model.position_embedding for model in (predictor.model, beside(predictor.model)))
    assert alone is not None
    assert wide is not None
    for half in (slice(0, 3), slice(4, 7)):  # a column between them stands on the seam
        assert torch.equal(wide.table[:, 1:].unflatten(1, (2, 7))[:, :, half].flatten(1, 2), alone.table[:, 1:])


@stems
def test_an_exported_model_takes_any_batch_and_gives_the_same_logits(config: HybridConfig) -> None:
    model = lively(HybridViT(config))
    example, batch = pictures(*config.image_size), torch.export.Dim("batch")
    exported: Any = torch.export.export(model, (example,), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 5):
        x = pictures(*config.image_size, count=size)
        torch.testing.assert_close(exported(x), model(x))


@stems
def test_bf16_gives_nearly_the_logits_of_fp32(config: HybridConfig) -> None:
    model, x = lively(HybridViT(config)), pictures(*config.image_size)
    want = answers(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = answers(model, x)
    halved = answers(model.bfloat16(), x.bfloat16())
    for got in (automatic, halved):
        assert got.dtype == torch.bfloat16
        assert (got.float() - want).norm() < 0.1 * want.norm()


def test_muon_leaves_the_stem_s_filters_to_adamw() -> None:
    muon, adamw = make_optimizers(HybridViT(RESNET), Optim(name="muon"))
    assert {p.ndim for group in muon.param_groups for p in group["params"]} == {2}
    assert any(p.ndim == 4 for group in adamw.param_groups for p in group["params"])


def test_a_conv_hybrid_learns_textures() -> None:
    torch.manual_seed(0)
    data = textures(96, seed=1)
    model = HybridViT(replace(CONV, image_size=(8, 8), channels=1, classes=4))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = data.images.float() / 128 - 1
    for _ in range(30):
        adam.zero_grad()
        loss = F.cross_entropy(model(x), data.labels)
        loss.backward()
        adam.step()
    unseen = textures(40, seed=2)
    right = answers(model.eval(), unseen.images.float() / 128 - 1).argmax(dim=1) == unseen.labels
    assert right.float().mean() > 0.9


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv": None}, "a hybrid has one stem, resnet or conv, not neither"),
        ({"resnet": ResNetConfig(blocks=(1,))}, "a hybrid has one stem, resnet or conv, not both"),
        ({"conv": None, "resnet": (3, 4, 9)}, "resnet must be a ResNetConfig or None, not (3, 4, 9)"),
        ({"conv": ResNetConfig(blocks=(1,))}, "conv must be a ConvStemConfig or None, not ResNetConfig("),
        ({"patch_size": 2}, "patch_size must be a multiple of 4, the stride of its stem, not 2"),
        ({"image_size": (8, 14)}, "image width 14 is not a multiple of patch_size 4; 12 and 16 are"),
        ({"heads": 5}, "width must be a multiple of 5"),
        ({"conv": LESS.conv, "patch_size": 8, "image_size": (32, 32)}, "gives a token for each place of its map"),
        ({"conv": LESS.conv, "image_size": (4, 8)}, "gives a token for each place of its map, and at least one"),
    ],
)
def test_settings_that_fit_no_hybrid_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(CONV, **changes)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ResNetConfig, {"blocks": (1, 1, 1, 1, 1)}, "blocks must be at most four whole numbers"),
        (ResNetConfig, {"blocks": [1, 1]}, "blocks must be at most four whole numbers, one a stage, not [1, 1]"),
        (ResNetConfig, {"blocks": (1, 2.0)}, "blocks must be at most four whole numbers"),
        (ResNetConfig, {"blocks": (1, 0)}, "blocks must be at least 1 in each stage, not (1, 0)"),
        (
            ResNetConfig,
            {"blocks": (1,), "width": 48},
            "width of the ResNet must be a multiple of 32 (group norm), not 48",
        ),
        (ResNetConfig, {"blocks": (1,), "width": 0}, "width of the ResNet must be a multiple of 32"),
        (ConvStemConfig, {"widths": (), "strides": ()}, "widths must be one to three whole numbers, not ()"),
        (ConvStemConfig, {"widths": (8,) * 4, "strides": (1,) * 4}, "widths must be one to three whole numbers"),
        (ConvStemConfig, {"widths": (8,), "strides": 2}, "strides must be one to three whole numbers, not 2"),
        (
            ConvStemConfig,
            {"widths": (8, 8), "strides": (2,)},
            "widths and strides must be as many, not (8, 8) and (2,)",
        ),
        (ConvStemConfig, {"widths": (8, 12), "strides": (1, 2)}, "widths must be multiples of 8"),
        (ConvStemConfig, {"widths": (8,), "strides": (4,)}, "strides must be 1, 2 or 3"),
        (ConvStemConfig, {"widths": (8,), "strides": (2,), "whole": 1}, "whole must be True or False, not 1"),
    ],
)
def test_settings_that_fit_no_stem_are_refused_by_name(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        kind(**settings)


def test_a_plain_config_makes_no_hybrid() -> None:
    with pytest.raises(ValueError, match="a hybrid ViT is described by a HybridConfig"):
        HybridViT(ViTConfig())


def test_presets_are_found_by_name_and_changed() -> None:
    assert hybrid("r26+s/32", classes=3) == replace(HYBRIDS["R26+S/32"], classes=3)
    model = HybridViT.from_preset("conv-Ti/4", classes=10, depth=1)
    assert type(model) is HybridViT is VARIANTS["hybrid"]
    assert variant_of(model) == "hybrid"
    assert model(pictures(32, 32)).shape == (2, 10)


def test_an_unknown_preset_or_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(VitralError, match=re.escape("no hybrid named 'R50+B/61'. Did you mean R50+B/16?")):
        hybrid("R50+B/61")
    with pytest.raises(VitralError, match=re.escape("no setting of a hybrid named 'resnets'. Did you mean resnet?")):
        hybrid("R50+B/16", resnets=None)


# ── the model folder ───────────────────────────────────────────────────────────────────────────────────────────


@stems
def test_a_hybrid_survives_a_model_folder(config: HybridConfig, tmp_path: Path) -> None:
    model, described = lively(HybridViT(config)), card(config)
    save_model(tmp_path, model, described)
    loaded, read = load_model(tmp_path)
    assert read == described
    assert type(loaded) is HybridViT
    assert identical(loaded.state_dict(), model.state_dict())
    x = pictures(*config.image_size)
    assert torch.equal(answers(loaded, x), answers(model, x))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variant": "plain"}, "no field 'architecture.conv'"),
        ({"architecture": {"classes": 5}}, "a hybrid has one stem, resnet or conv, not neither"),
        ({"architecture": {"conv": {"width": [8]}}}, "no field 'architecture.conv.width'. Did you mean widths?"),
        ({"architecture": {"conv": {"widths": [8]}}}, "the field 'architecture.conv.strides' is missing"),
        ({"architecture": None}, "architecture must be HybridConfig, not None"),
        ({"classes": ["one"]}, "1 class names for a model of 5 classes"),
    ],
)
def test_a_damaged_config_is_an_error_that_names_the_field(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(tmp_path, HybridViT(CONV), card(CONV))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VitralError, match=re.escape(said)) as caught:
        load_model(tmp_path)
    assert str(file) in caught.value.what


def test_a_card_s_architecture_is_of_the_kind_of_its_variant() -> None:
    with pytest.raises(ValueError, match="the architecture of variant 'plain' must be a ViTConfig, not a HybridConfig"):
        card(CONV, variant="plain")
    with pytest.raises(
        ValueError, match="the architecture of variant 'hybrid' must be a HybridConfig, not a ViTConfig"
    ):
        card(ViTConfig(classes=5))
