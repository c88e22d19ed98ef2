"""The hybrid ViT against timm, against the behaviour of the plain ViT, and through a model folder."""

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
from support.references import compute_logits, random_images, randomize_weights, timm
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.explain import faithfulness
from vitral.explain.api import explain
from vitral.explain.pair import widen_for_pair
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS, variant_name
from vitral.models.variants.hybrid import (
    HYBRIDS,
    ConvStem,
    ConvStemConfig,
    HybridConfig,
    HybridViT,
    ResNetConfig,
    StdConv,
    hybrid_preset,
)
from vitral.models.vit import ViTConfig, patchify
from vitral.recipes.schema import OptimConfig
from vitral.reporting.figures import heatmaps
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.serve.explain_payload import ExplainRequest, explain_image
from vitral.training.optim.builder import make_optimizers

SMALL: dict[str, Any] = {"num_classes": 5, "width": 32, "depth": 2, "heads": 2}
RESNET = HybridConfig(
    image_size=(32, 48), patch_size=16, resnet=ResNetConfig(blocks=(1, 2, 1), width=32), positions="learned", **SMALL
)
CONV = HybridConfig(image_size=(8, 12), patch_size=4, conv=ConvStemConfig(widths=(8, 16), strides=(2, 2)), **SMALL)
MAP_PATCHES = replace(CONV, image_size=(16, 24), patch_size=8)  # patches of 2×2 on the feature map
UNPADDED = replace(CONV, image_size=(12, 16), conv=ConvStemConfig(widths=(8, 16), strides=(2, 2), same_padding=False))
STEMS = {"resnet": RESNET, "conv": CONV, "patches on the map": MAP_PATCHES, "no same padding": UNPADDED}
stems = pytest.mark.parametrize("config", STEMS.values(), ids=STEMS.keys())

# Regular expressions of timm's parameter names → vitral's names.
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


def convert_timm(model: Any) -> dict[str, Tensor]:
    """timm's state dict with vitral's names; the patch embedding's convolution becomes a matrix."""
    state = {}
    for name, tensor in model.state_dict().items():
        in_stem = name.startswith("patch_embed.backbone.stages")
        for pattern, replacement in NAMES.items():
            if in_stem or not replacement.startswith(("reduce", "spatial", "expand")):
                name = re.sub(pattern, replacement, name)
        state[name] = tensor.flatten(1) if name.endswith("embedding.project.weight") else tensor
    return state


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_model_config(config: ViTConfig, **changes: Any) -> ModelConfig:
    preprocessing = Preprocessing(
        image_size=config.image_size, channels=config.channels, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    classes = tuple(f"class {k}" for k in range(config.num_classes))
    fields: dict[str, Any] = {
        "architecture": config,
        "preprocessing": preprocessing,
        "classes": classes,
        "trained_on": "-",
        "epoch": 0,
    }
    return ModelConfig(**fields | {"variant": "hybrid"} | changes)


# Equivalence to timm


@pytest.mark.parametrize(
    ("preset", "timm_name", "parameters"),
    [
        ("R26+S/32", "vit_small_r26_s32_224", 36_431_912),
        pytest.param("R50+B/16", "vit_base_r50_s16_224", 98_659_112, marks=pytest.mark.slow),
        pytest.param("R50+L/32", "vit_large_r50_s32_224", 328_994_856, marks=pytest.mark.slow),
    ],
)
def test_presets_have_the_parameters_of_timm_models(preset: str, timm_name: str, parameters: int) -> None:
    with torch.device("meta"):
        model, reference = HybridViT.from_preset(preset), timm.create_model(timm_name, num_classes=1000)
    assert count(model) == count(reference) == parameters
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in convert_timm(reference).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timm_name", "arguments", "config"),
    [
        # the complete model
        ("vit_small_r26_s32_224", {"img_size": 64}, hybrid_preset("R26+S/32", image_size=(64, 64), num_classes=7)),
        # complete stems with a small encoder
        (
            "vit_base_r50_s16_224",
            {"img_size": (64, 96), "embed_dim": 48, "depth": 2, "num_heads": 4},
            hybrid_preset("R50+B/16", image_size=(64, 96), width=48, depth=2, heads=4, num_classes=7),
        ),
        (
            "vit_large_r50_s32_224",
            {"img_size": (96, 64), "embed_dim": 48, "depth": 1, "num_heads": 4, "in_chans": 1},
            hybrid_preset("R50+L/32", image_size=(96, 64), width=48, depth=1, heads=4, num_classes=7, channels=1),
        ),
        # only the root, with 8×8 patches on its feature map
        (
            "vit_tiny_r_s16_p8_224",
            {"img_size": 96, "depth": 1},
            HybridConfig(
                image_size=(96, 96),
                patch_size=32,
                width=192,
                depth=1,
                heads=3,
                num_classes=7,
                resnet=ResNetConfig(blocks=()),
            ),
        ),
    ],
    ids=["R26+S/32", "R50, stride 16", "R50, stride 32", "root only"],
)
def test_timm_weights_give_timm_logits(timm_name: str, arguments: dict[str, Any], config: HybridConfig) -> None:
    reference = randomize_weights(timm.create_model(timm_name, num_classes=7, **arguments))
    model = HybridViT(config).eval()
    model.load_state_dict(convert_timm(reference))
    x = random_images(*config.image_size, channels=config.channels)
    expected = compute_logits(reference, x)
    assert expected.std() > 0.1
    torch.testing.assert_close(compute_logits(model, x), expected, rtol=1e-4, atol=1e-4)


# Stems


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("R50")) for name in HYBRIDS]
)
def test_feature_map_has_the_size_and_channels_of_the_config(preset: str) -> None:
    config = HYBRIDS[preset]
    with torch.device("meta"):
        model = HybridViT(config)
        feature_map = model.patch_embedding.get_submodule("stem")(torch.empty(1, 3, *config.image_size))
        tokens = model.patch_embedding(torch.empty(1, 3, *config.image_size))
    height, width = config.image_size
    stride = config.stem.stride
    assert feature_map.shape == (1, config.stem.channels, height // stride, width // stride)
    assert tokens.shape == (1, config.grid[0] * config.grid[1], config.width)


@pytest.mark.parametrize("strides", [(1, 2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("sides", [1, 3, 5])
@pytest.mark.parametrize("same_padding", [True, False])
def test_conv_stem_output_size_matches_the_config(strides: Any, sides: int, same_padding: bool) -> None:
    config = ConvStemConfig(widths=(8,) * len(strides), strides=strides, same_padding=same_padding)
    pixels = (sides + (not same_padding)) * config.stride
    with torch.device("meta"):
        shape = ConvStem(config, 3, 1e-6)(torch.empty(1, 3, pixels, pixels)).shape
    assert shape == (1, 8, config.output_size(pixels), config.output_size(pixels))
    assert config.output_size(pixels) == sides + (not same_padding and 2 not in strides)


def test_conv_presets_have_8x8_tokens() -> None:
    assert {HYBRIDS[name].grid for name in HYBRIDS if name.startswith("conv-")} == {(8, 8)}


@pytest.mark.parametrize("preset", ["conv-Ti/4", "conv-S/4"])
def test_conv_stem_costs_about_one_block(preset: str) -> None:
    """Stem and eleven blocks cost no more than a plain ViT of twelve blocks."""
    config = HYBRIDS[preset]
    assert config.conv is not None
    assert config.depth == 11
    layers = zip((3, *config.conv.widths[:-1]), config.conv.widths, (1, 2, 4), strict=True)
    stem = sum(9 * inputs * outputs * (32 // down) ** 2 for inputs, outputs, down in layers)
    block = 12 * config.width**2 * 65 + 2 * 65**2 * config.width
    assert 0.5 * block < stem < block


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_std_conv_uses_same_padding_and_standardised_weights(kernel: int, stride: int) -> None:
    conv, x = randomize_weights(StdConv(8, 4, kernel, stride)), random_images(12, 6, channels=8)
    filters = conv.weight - conv.weight.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.std(dim=(1, 2, 3), keepdim=True, correction=0)
    pad = max(kernel - stride, 0)
    before, after = pad // 2, pad - pad // 2
    expected = F.conv2d(F.pad(x, (before, after, before, after)), filters, stride=stride)
    assert expected.shape == (2, 4, 12 // stride, 6 // stride)
    torch.testing.assert_close(conv(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1)])
def test_compiled_stem_runs_as_matmul(kernel: int, stride: int) -> None:
    conv, x = randomize_weights(StdConv(3, 8, kernel, stride)), random_images(12, 6)
    operations: list[str] = []

    def record_operations(graph: torch.fx.GraphModule, _: Any) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(conv, backend=record_operations)
    torch.testing.assert_close(compiled(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not any("conv2d" in name for name in operations)


@stems
def test_logits_do_not_depend_on_the_scale_of_filters(config: HybridConfig) -> None:
    model, x = randomize_weights(HybridViT(config)), random_images(*config.image_size)
    expected = compute_logits(model, x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StdConv):
                module.weight.mul_(7).add_(0.3)
    torch.testing.assert_close(compute_logits(model, x), expected, rtol=1e-3, atol=1e-4)


@stems
def test_logits_do_not_depend_on_batch_or_training_mode(config: HybridConfig) -> None:
    model, x = randomize_weights(HybridViT(config)), random_images(*config.image_size, count=3)
    expected = compute_logits(model, x)
    torch.testing.assert_close(compute_logits(model, x[1:2]), expected[1:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compute_logits(model.train(), x), expected)


def test_initial_bottlenecks_are_identities_and_logits_zero() -> None:
    torch.manual_seed(0)
    model, x = HybridViT(RESNET), random_images(*RESNET.image_size)
    stem: Any = model.patch_embedding.stem
    positive = torch.rand(2, 256, 4, 6)
    assert torch.equal(stem.stages[1][1](positive), positive)
    assert compute_logits(model, x).abs().max() == 0
    assert 0.3 < model.patch_embedding(x).std() < 3


# Behaviour of the plain ViT


@stems
def test_gradient_reaches_every_parameter(config: HybridConfig) -> None:
    model = randomize_weights(HybridViT(config)).train()
    F.cross_entropy(model(random_images(*config.image_size)), torch.tensor([0, 3])).backward()
    unreached = [n for n, p in model.named_parameters() if p.grad is None or not 1e-8 < p.grad.norm() < 1e3]
    assert unreached == []


@stems
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_trace_has_the_logits_of_forward_and_the_pixels_of_each_token(config: HybridConfig, pooling: Any) -> None:
    config = replace(config, pooling=pooling, registers=1, positions="learned+rotary")
    model, x = randomize_weights(HybridViT(config)), random_images(*config.image_size)
    with torch.inference_mode():
        trace = model.trace(x)
    torch.testing.assert_close(trace.logits, compute_logits(model, x))
    assert trace.grid == config.grid == (2, 3)
    assert trace.num_prefix_tokens == config.num_prefix_tokens
    assert trace.margin == margin(config)
    inner = x[:, :, 2:-2, 2:-2] if trace.margin else x
    assert torch.equal(trace.patches, patchify(inner, config.patch_size))
    assert [a.shape for a in trace.attention] == [
        (2, 2, 6 + config.num_prefix_tokens, 6 + config.num_prefix_tokens)
    ] * 2


@stems
def test_other_image_sizes_warn_or_are_refused(config: HybridConfig) -> None:
    model, P, margins = randomize_weights(HybridViT(config)), config.patch_size, 2 * margin(config)
    with pytest.warns(UserWarning, match="positions resampled from 2×3 to 3×1 patches"):
        assert compute_logits(model, random_images(3 * P + margins, P + margins)).shape == (2, 5)
    if margins:
        with pytest.raises(ValueError, match="images of 12×4 pixels are too small"):
            model(random_images(12, 4))
    with pytest.raises(ValueError, match=f"image height {P + 2} is not divisible by the patch size {P}"):
        model(random_images(P + 2, P))


def margin(config: HybridConfig) -> int:
    return 2 if config is UNPADDED or config.conv == UNPADDED.conv else 0


@pytest.mark.parametrize("config", [CONV, UNPADDED], ids=["same padding", "no same padding"])
def test_changed_patch_changes_its_own_token_most(config: HybridConfig) -> None:
    stem, offset = randomize_weights(HybridViT(config)).patch_embedding.stem, margin(config)
    x = random_images(*config.image_size, count=50)
    for token in range(6):
        changed = x.clone()
        y, z = offset + 4 * (token // 3), offset + 4 * (token % 3)
        changed[:, :, y : y + 4, z : z + 4] += 3
        with torch.inference_mode():
            differences = (stem(changed) - stem(x)).abs().sum(dim=(0, 1)).flatten()
        assert differences.argmax() == token


@pytest.mark.parametrize(
    ("config", "size"), [(CONV, (8, 12)), (UNPADDED, (8, 12))], ids=["same padding", "no same padding"]
)
def test_explain_payload_covers_the_area_of_the_patches(
    config: HybridConfig, size: tuple[int, int], cpu: Hardware
) -> None:
    seen = Preprocessing(image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple("abcde")
    card = ModelConfig(
        architecture=config, preprocessing=seen, classes=names, trained_on="x", epoch=1, variant="hybrid"
    )
    predictor = Predictor(randomize_weights(HybridViT(config)), card, cpu)
    pixels = torch.randint(0, 256, (3, *config.image_size), dtype=torch.uint8)
    payload = explain_image(predictor, pixels, ExplainRequest(methods=("rollout",)))
    assert payload["grid"] == [2, 3]
    for image in (payload["image"], payload["heatmaps"]["rollout"]):
        assert (image["height"], image["width"]) == size


def test_explanations_work_without_same_padding(cpu: Hardware) -> None:
    predictor = Predictor(randomize_weights(HybridViT(UNPADDED)), make_model_config(UNPADDED), cpu)
    pixels = torch.randint(0, 256, (12, 3, *UNPADDED.image_size), dtype=torch.uint8)
    image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    explanation = heatmaps.explanation_to_dict(explain(predictor, image, methods=["rollout"]), predictor, [])
    assert np.array(explanation["heatmaps"][0]["patches"]).shape == (2, 3)
    report = faithfulness.measure_faithfulness(
        predictor, Split(images=pixels, labels=torch.arange(12) % 5), ["rollout"], num_images=4, num_pairs=4
    )
    assert [row.method for row in report.rows] == ["rollout", faithfulness.RANDOM]
    single, pair = (model.position_embedding for model in (predictor.model, widen_for_pair(predictor.model)))
    assert single is not None
    assert pair is not None
    for half in (slice(0, 3), slice(4, 7)):  # column 3 is on the seam between the two images
        assert torch.equal(pair.table[:, 1:].unflatten(1, (2, 7))[:, :, half].flatten(1, 2), single.table[:, 1:])


@pytest.mark.slow
@stems
def test_exported_model_accepts_any_batch_size(config: HybridConfig) -> None:
    model = randomize_weights(HybridViT(config))
    example, batch = random_images(*config.image_size), torch.export.Dim("batch")
    exported: Any = torch.export.export(model, (example,), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 5):
        x = random_images(*config.image_size, count=size)
        torch.testing.assert_close(exported(x), model(x))


@stems
def test_bf16_logits_are_close_to_fp32(config: HybridConfig) -> None:
    model, x = randomize_weights(HybridViT(config)), random_images(*config.image_size)
    expected = compute_logits(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = compute_logits(model, x)
    converted = compute_logits(model.bfloat16(), x.bfloat16())
    for logits in (autocast, converted):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).norm() < 0.1 * expected.norm()


def test_convolution_filters_are_optimised_by_adamw() -> None:
    muon, adamw = make_optimizers(HybridViT(RESNET), OptimConfig(name="muon"))
    assert {p.ndim for group in muon.param_groups for p in group["params"]} == {2}
    assert any(p.ndim == 4 for group in adamw.param_groups for p in group["params"])


def test_conv_hybrid_learns_textures() -> None:
    torch.manual_seed(0)
    data = textures(96, seed=1)
    model = HybridViT(replace(CONV, image_size=(8, 8), channels=1, num_classes=4))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = data.images[:].float() / 128 - 1
    for _ in range(30):
        adam.zero_grad()
        loss = F.cross_entropy(model(x), data.labels)
        loss.backward()
        adam.step()
    validation = textures(40, seed=2)
    correct = compute_logits(model.eval(), validation.images[:].float() / 128 - 1).argmax(dim=1) == validation.labels
    assert correct.float().mean() > 0.9


# Configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv": None}, "a hybrid needs one stem, resnet or conv, got neither"),
        ({"resnet": ResNetConfig(blocks=(1,))}, "a hybrid needs one stem, resnet or conv, got both"),
        ({"conv": None, "resnet": (3, 4, 9)}, "resnet must be a ResNetConfig or None, got (3, 4, 9)"),
        ({"conv": ResNetConfig(blocks=(1,))}, "conv must be a ConvStemConfig or None, got ResNetConfig("),
        ({"patch_size": 2}, "patch_size must be a multiple of 4, the stride of the stem, got 2"),
        ({"image_size": (8, 14)}, "image width 14 is not divisible by the patch size 4; try 12 or 16"),
        ({"heads": 5}, "width must be a multiple of 5"),
        ({"conv": UNPADDED.conv, "patch_size": 8, "image_size": (32, 32)}, "patch_size must equal the stem's stride"),
        ({"conv": UNPADDED.conv, "image_size": (4, 8)}, "the grid must have a patch"),
    ],
)
def test_invalid_hybrid_config_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONV, **changes)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (ResNetConfig, {"blocks": (1, 1, 1, 1, 1)}, "blocks must be at most four integers"),
        (ResNetConfig, {"blocks": [1, 1]}, "blocks must be at most four integers, one per stage, got [1, 1]"),
        (ResNetConfig, {"blocks": (1, 2.0)}, "blocks must be at most four integers"),
        (ResNetConfig, {"blocks": (1, 0)}, "blocks must be at least 1 in each stage, got (1, 0)"),
        (
            ResNetConfig,
            {"blocks": (1,), "width": 48},
            "width of the ResNet must be a multiple of 32 (group norm), got 48",
        ),
        (ResNetConfig, {"blocks": (1,), "width": 0}, "width of the ResNet must be a multiple of 32"),
        (ConvStemConfig, {"widths": (), "strides": ()}, "widths must be one to three integers, got ()"),
        (ConvStemConfig, {"widths": (8,) * 4, "strides": (1,) * 4}, "widths must be one to three integers"),
        (ConvStemConfig, {"widths": (8,), "strides": 2}, "strides must be one to three integers, got 2"),
        (
            ConvStemConfig,
            {"widths": (8, 8), "strides": (2,)},
            "widths and strides must have equal lengths, got (8, 8) and (2,)",
        ),
        (ConvStemConfig, {"widths": (8, 12), "strides": (1, 2)}, "widths must be multiples of 8"),
        (ConvStemConfig, {"widths": (8,), "strides": (4,)}, "strides must be 1, 2 or 3"),
        (
            ConvStemConfig,
            {"widths": (8,), "strides": (2,), "same_padding": 1},
            "same_padding must be True or False, got 1",
        ),
    ],
)
def test_invalid_stem_config_names_the_field(cls: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**fields)


def test_plain_config_is_refused() -> None:
    with pytest.raises(ValueError, match="a hybrid ViT requires a HybridConfig"):
        HybridViT(ViTConfig())


def test_preset_accepts_overrides() -> None:
    assert hybrid_preset("r26+s/32", num_classes=3) == replace(HYBRIDS["R26+S/32"], num_classes=3)
    model = HybridViT.from_preset("conv-Ti/4", num_classes=10, depth=1)
    assert type(model) is HybridViT is VARIANTS["hybrid"]
    assert variant_name(model) == "hybrid"
    assert model(random_images(32, 32)).shape == (2, 10)


def test_unknown_preset_or_field_suggests_the_closest() -> None:
    with pytest.raises(VitralError, match=re.escape("no hybrid named 'R50+B/61'. Did you mean 'R50+B/16'?")):
        hybrid_preset("R50+B/61")
    with pytest.raises(VitralError, match=re.escape("HybridConfig named 'resnets'. Did you mean 'resnet'?")):
        hybrid_preset("R50+B/16", resnets=None)


# Model folder


@stems
def test_model_folder_round_trip(config: HybridConfig, tmp_path: Path) -> None:
    model, model_config = randomize_weights(HybridViT(config)), make_model_config(config)
    save_model(tmp_path, model, model_config)
    loaded, loaded_config = load_model(tmp_path)
    assert loaded_config == model_config
    assert type(loaded) is HybridViT
    assert identical(loaded.state_dict(), model.state_dict())
    x = random_images(*config.image_size)
    assert torch.equal(compute_logits(loaded, x), compute_logits(model, x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "plain"}, "no field named 'architecture.conv'"),
        ({"architecture": {"num_classes": 5}}, "a hybrid needs one stem, resnet or conv, got neither"),
        (
            {"architecture": {"conv": {"width": [8]}}},
            "'architecture.conv.width'. Did you mean 'widths'?",
        ),
        ({"architecture": {"conv": {"widths": [8]}}}, "the field 'architecture.conv.strides' is missing"),
        ({"architecture": None}, "architecture must be HybridConfig, got None"),
        ({"classes": ["one"]}, "classes has 1 names, but architecture.num_classes is 5"),
    ],
)
def test_invalid_model_config_names_the_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, HybridViT(CONV), make_model_config(CONV))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VitralError, match=re.escape(message)) as caught:
        load_model(tmp_path)
    assert str(file) in caught.value.what


def test_model_config_requires_the_config_class_of_the_variant() -> None:
    with pytest.raises(ValueError, match="the architecture of variant 'plain' must be a ViTConfig, got a HybridConfig"):
        make_model_config(CONV, variant="plain")
    with pytest.raises(
        ValueError, match="the architecture of variant 'hybrid' must be a HybridConfig, got a ViTConfig"
    ):
        make_model_config(ViTConfig(num_classes=5))
