"""Each method on models with known results, all methods on every kind of ViT, and heatmaps projected onto images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitral.models.vit
from support.vit_kinds import KINDS, TINY, random_model
from vitral.data.geometry import Resize
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.explain import METHODS, explain, rescale_for_display
from vitral.explain.api import crop_box, project_to_image
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

REPEATED_PASSES = ("integrated-gradients", "shapley", "smoothgrad")  # slow, and independent of the kind of model


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=[pytest.mark.slow] * (method in REPEATED_PASSES and kind != "class"))
        for method in METHODS
        for kind in KINDS
    ],
)
def test_every_method_supports_every_kind_of_vit(method: str, kind: str) -> None:
    variant, config = KINDS[kind]
    model = random_model(variant, config).requires_grad_(False)  # gradients do not depend on trainable weights
    image = torch.randn(config.channels, 8, 12)
    heat = METHODS[method](model, image, 3)
    assert heat.shape == (8, 12)
    assert heat.dtype == torch.float32
    assert heat.isfinite().all()
    assert not heat.requires_grad
    if not METHODS[method].is_signed:
        assert heat.min() >= 0
    assert not image.requires_grad
    assert torch.equal(METHODS[method](model, image, 3), heat), "deterministic"
    per_class = torch.stack([METHODS[method](model, image, target) for target in range(5)])
    assert per_class.std() > 0  # Grad-CAM may be zero for single classes
    assert bool((per_class == per_class[0]).all()) == (not METHODS[method].is_class_specific)


@pytest.mark.parametrize("method", METHODS)
def test_batch_equals_single_images(method: str) -> None:
    model = random_model(*KINDS["class"])
    images = torch.randn(3, 3, 8, 12)
    images[1] *= images.abs().max() / images[1].abs().max()  # the noise of SmoothGrad depends on the range
    if method in ("smoothgrad", "shapley"):
        pytest.skip("samples are drawn for the whole batch")
    batch = METHODS[method](model, images, torch.tensor([0, 1, 2]))
    for index, image in enumerate(images):
        torch.testing.assert_close(METHODS[method](model, image, index), batch[index], rtol=1e-4, atol=1e-5)


def test_default_target_is_the_predicted_class() -> None:
    model = random_model(*KINDS["mean, rotary"])
    image = torch.randn(3, 8, 12)
    predicted = int(model(image[None]).argmax())
    heats = [METHODS["relevance"](model, image, target) for target in (None, predicted, (predicted + 1) % 5)]
    assert torch.equal(heats[0], heats[1])
    assert not torch.equal(heats[0], heats[2])


def test_inference_mode_is_supported_and_training_mode_is_restored() -> None:
    model = random_model("plain", ViTConfig(**TINY, dropout=0.5, drop_path=0.5)).train()
    image = torch.randn(3, 8, 12)
    with torch.inference_mode():
        inside = METHODS["relevance"](model, image * 1, 1)
    assert torch.equal(inside, METHODS["relevance"](model, image, 1))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────


def test_attention_is_the_row_of_the_class_token_in_the_given_layer_and_head() -> None:
    model = random_model(*KINDS["registers, one channel"])
    image = torch.randn(1, 8, 12)
    trace = model.trace(image[None])
    heat = METHODS["attention"](model, image, layer=1, head=2)
    row = trace.attention[0][0, 1, 0, 4:].view(1, 1, 2, 3)
    expected = torch.nn.functional.interpolate(row, size=(8, 12), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(heat, expected.detach())
    default = METHODS["attention"](model, image)
    heads = [METHODS["attention"](model, image, layer=2, head=head) for head in (1, 2)]
    torch.testing.assert_close(default, (heads[0] + heads[1]) / 2)


def test_trace_of_attention_pooling_has_the_same_logits() -> None:
    model = random_model(*KINDS["attention pooling, sincos"])
    images = torch.randn(2, 3, 8, 12)
    trace = model.trace(images)
    assert trace.pooling[0].shape == (2, 2, 1, 6)
    torch.testing.assert_close(trace.pooling[0].sum(dim=-1), torch.ones(2, 2, 1))
    torch.testing.assert_close(trace.logits, model(images), rtol=1e-4, atol=1e-5)
    assert ViT(ViTConfig(**TINY)).trace(images).pooling == []


# ── relevance ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind",
    [
        "mean, rotary",
        "attention pooling, sincos",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("class", "distilled", "class and mean")),
    ],
)
def test_relevance_equals_the_equations_of_the_paper(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """R = I; R ← R + Ā·R, Ā = E_h[(∇A ⊙ A)⁺], with finite differences for the gradient of each entry of A."""
    model = random_model(*KINDS[kind]).double()
    image, target = torch.randn(1, 3, 8, 12).double(), 2
    attentions: list[Tensor] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        attentions.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return attentions[-1] @ v

    def logit_with(layer: int, attention: Tensor) -> float:
        layers = iter(range(9))

        def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            is_replaced = next(layers) == layer
            return (attention if is_replaced else (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(vitral.models.vit, "attend", attend)
            return float(model(image)[0, target])

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(vitral.models.vit, "attend", record)
        model(image)
    bars = []
    for layer, A in enumerate(attentions):
        bar = np.zeros(A.shape[2:])
        for entry in np.ndindex(*A.shape[1:]):
            step = torch.zeros_like(A)
            step[0][entry] = 1e-5
            slope = (logit_with(layer, A + step) - logit_with(layer, A - step)) / 2e-5
            bar[entry[1:]] += max(slope * float(A[0][entry]), 0) / A.shape[1]
        bars.append(bar)
    T = attentions[0].shape[-1]
    prefix = T - 6
    R = np.eye(T)
    for bar in bars[:2]:
        R = R + bar @ R
    row = {
        "class": lambda: R[0],
        "mean, rotary": lambda: (R - np.eye(T))[prefix:].mean(0),
        "attention pooling, sincos": lambda: bars[2][0] @ R,
        "distilled": lambda: R[:2].mean(0),
        "class and mean": lambda: R[0] / 2 + (R - np.eye(T))[prefix:].mean(0) / 2,
    }[kind]()
    expected = torch.from_numpy(row[prefix:]).view(1, 1, 2, 3).float()
    expected = torch.nn.functional.interpolate(expected, size=(8, 12), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(METHODS["relevance"](model, image[0], target), expected, rtol=1e-3, atol=1e-6)


# ── Grad-CAM ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradcam_of_a_linear_model() -> None:
    """Without norms and with uniform attention, the logit is w·(z_0 + mean of all x): the gradient of every patch is
    w/T, so the heat of patch n is (w·x_n/T)⁺."""
    model: Any = ViT(
        ViTConfig(image_size=(1, 3), patch_size=1, channels=1, num_classes=2, width=4, depth=1, heads=1)
    ).eval()
    torch.manual_seed(0)
    block, w = model.encoder.blocks[0], torch.randn(4)
    block.norm1, model.encoder.norm = torch.nn.Identity(), torch.nn.Identity()
    with torch.no_grad():
        for parameter in (*block.attention.parameters(), *block.mlp.parameters(), model.head.out.bias):
            parameter.zero_()
        block.attention.qkv.weight[8:] = torch.eye(4)
        block.attention.project.weight.copy_(torch.eye(4))
        model.head.out.weight.copy_(torch.stack([-w, w]))
    image = torch.randn(1, 1, 3)
    expected = (model.embed(image[None], (1, 3))[0, 1:] @ w / 4).detach()
    torch.testing.assert_close(METHODS["gradcam"](model, image, 1)[0], expected.clamp_min(0))
    torch.testing.assert_close(METHODS["gradcam"](model, image, 0)[0], (-expected).clamp_min(0))


# ── occlusion ────────────────────────────────────────────────────────────────────────────────────────────────


def test_occlusion_finds_the_only_pixels_that_matter() -> None:
    image = torch.full((1, 28, 28), 0.5)

    def model(images: Tensor) -> Tensor:
        logit = images[:, 0, 8:10, 4:6].sum(dim=(1, 2))
        return torch.stack([logit, -logit], dim=1)

    for target, sign in ((0, 1.0), (1, -1.0)):
        heat = METHODS["occlusion"](model, image, target, window=1)
        patches = heat.unfold(0, 2, 2).unfold(1, 2, 2).sum(dim=(2, 3)) / 4  # 14 × 14
        assert patches.abs().argmax() == 4 * 14 + 2
        outside = heat.clone()
        outside[6:12, 2:8] = 0
        assert (outside == 0).all()
        # log-odds 2·2.0; bilinear weights 3/4 · 3/4 half a pixel from the centre of the patch
        assert heat.abs().max() == pytest.approx(4.0 * 0.75**2)
        assert heat.sum().sign() == sign


def test_overlapping_occlusion_windows_are_averaged() -> None:
    def model(images: Tensor) -> Tensor:
        return images[:, 0, :2, :2].mean(dim=(1, 2))[:, None]

    heat = METHODS["occlusion"](model, torch.ones(1, 28, 28), 0, window=2)
    corner = heat[0, 0]
    assert corner == pytest.approx(1.0)  # only one window covers the corner, and it hides all pixels that matter
    assert heat[27, 27] == 0
    assert 0 < heat[3, 3] < 1


# ── captum ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "options", "pixels_per_feature"), [("integrated-gradients", {"steps": 1000}, 1),
                                                           ("shapley", {"samples": 2}, 16)])  # fmt: skip
def test_attributions_sum_to_the_difference_of_logits(
    method: str, options: dict[str, int], pixels_per_feature: int
) -> None:
    model = random_model(*KINDS["class"])
    image = torch.randn(3, 8, 12)
    with torch.no_grad():
        logit, baseline = model(image[None])[0, 1], model(0 * image[None])[0, 1]
    heat = METHODS[method](model, image, 1, **options)
    torch.testing.assert_close(heat.sum() / pixels_per_feature, logit - baseline, rtol=0.01, atol=0.01)


def test_missing_captum_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(VitralError, match=r"vitral\[explain\]"):
        METHODS["integrated-gradients"](random_model(*KINDS["class"]), torch.randn(3, 8, 12))


# ── errors ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "options", "target", "message"),
    [
        ("attention", {"layer": 3}, None, "no layer 3: the model has 2, numbered from 1 to 2"),
        ("attention", {"layer": 0}, None, "no layer 0"),
        ("attention", {"head": 9}, None, "no head 9: the model has 2"),
        ("gradcam", {"layer": 5}, None, "no layer 5"),
        ("rollout", {"layer": 1}, None, "rollout has no option 'layer'"),
        ("rollout", {"fusio": "max"}, None, "Did you mean 'fusion'"),
        ("relevance", {}, 5, "no class 5: the model has 5 classes, numbered from 0 to 4"),
        ("occlusion", {"window": 9}, None, "window must be between 1 and 2 patches, got 9"),
    ],
)
def test_invalid_option_or_target_is_refused(
    method: str, options: dict[str, Any], target: int | None, message: str
) -> None:
    with pytest.raises(VitralError, match=message):
        METHODS[method](random_model(*KINDS["class"]), torch.randn(3, 8, 12), target, **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 8, 12), r"expected images of shape \(3, height, width\), got \(1, 8, 12\)"),
        ((3, 8, 13), "image width 13 is not divisible by the patch size 4"),
        ((8, 12), r"got \(8, 12\)"),
    ],
)
def test_image_that_does_not_fit_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(VitralError, match=message):
        METHODS["relevance"](random_model(*KINDS["class"]), torch.randn(shape))


def test_model_without_gradients_or_attention_is_refused() -> None:
    model = random_model(*KINDS["class"])

    def exported(images: Tensor) -> Tensor:
        return model(images).detach()

    for method in ("relevance", "rollout"):
        with pytest.raises(VitralError, match="only returns logits"):
            METHODS[method](exported, torch.randn(3, 28, 28))


def test_weights_created_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = ViT(ViTConfig(**TINY))
    with pytest.raises(VitralError, match="needs gradients"):
        METHODS["relevance"](model, torch.randn(3, 8, 12), 0)


def test_rescaling_for_display() -> None:
    heat = torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]])
    assert rescale_for_display(heat).tolist() == [[[0.0, 1.0]], [[0.0, 0.0]]]
    assert rescale_for_display(torch.tensor([[[-4.0, 2.0]]]), signed=True).tolist() == [[[-1.0, 0.5]]]


# ── images ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def predictor(cpu: Hardware) -> Predictor:
    config = ViTConfig(**{**TINY, "image_size": (16, 16)})
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
    names = ("ant", "bee", "tench, Tinca tinca", "7", "Wasp")
    model_config = ModelConfig(architecture=config, preprocessing=preprocessing, classes=names, trained_on="x", epoch=1)
    return Predictor(random_model("plain", config), model_config, cpu)


def test_heatmap_is_projected_to_its_position_in_the_image() -> None:
    """A 40×20 image is not resized; the model input is its center 16×16: columns 12 to 28, rows 2 to 18."""
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
    values = np.zeros((16, 16), dtype=np.float32)
    values[4, 9] = 1
    projected = project_to_image(values, preprocessing, (40, 20), (40, 20))
    assert projected.shape == (20, 40)
    assert np.argwhere(projected == 1).tolist() == [[6, 21]]
    assert np.isnan(projected).sum() == 20 * 40 - 16 * 16
    larger = project_to_image(values, preprocessing, (400, 200), (400, 200))
    peak = np.unravel_index(np.nanargmax(larger), larger.shape)
    assert abs(peak[0] - 64.5) < 2
    assert abs(peak[1] - 214.5) < 2
    assert np.nansum(larger) == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(
    ("resize", "input_size", "point", "expected"),
    [
        ("pad", (16, 16), (8, 3), (11, 9)),  # 40×20 pixels become 16×8 in the rows 4 to 12
        ("stretch", (16, 16), (8, 3), (10, 9)),
        ("native", (12, 20), (6, 5), (11, 11)),  # three rows of five patches
    ],
)
def test_heatmap_of_each_resize_mode_is_projected_to_the_whole_photograph(
    resize: Resize, input_size: tuple[int, int], point: tuple[int, int], expected: tuple[int, int]
) -> None:
    preprocessing = Preprocessing(
        image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, resize=resize, patch_size=4
    )
    assert preprocessing.geometry(20, 40).window == input_size
    values = np.zeros(input_size, dtype=np.float32)
    values[point] = 1
    projected = project_to_image(values, preprocessing, (40, 20), (40, 20))
    assert projected.shape == (20, 40)
    assert np.isfinite(projected).all()
    peak = np.unravel_index(np.argmax(projected), projected.shape)
    assert np.abs(np.subtract(peak, expected)).max() <= 1.5
    assert crop_box(preprocessing, (40, 20), (40, 20)) == (0, 0, 40, 20)


def test_explanation_for_several_classes_and_methods(predictor: Predictor) -> None:
    photo = Image.effect_noise((90, 60), 90).convert("RGB")
    explanation = explain(predictor, photo, ["rollout", "relevance", "attention"], ["bee", 0, "tench"], {"layer": 1})
    order = [(heat.method.name, heat.label and heat.label.name) for heat in explanation.heatmaps]
    assert order[:3] == [("rollout", "bee"), ("relevance", "bee"), ("attention", "bee")]
    assert [name for _, name in order[3::3]] == ["ant", "tench, Tinca tinca"]
    assert all(heat.values.shape == (16, 16) and heat.on_image.shape == (60, 90) for heat in explanation.heatmaps)
    assert np.nanmax(explanation.heatmaps[1].display) == pytest.approx(1, abs=0.05)
    assert explanation.prediction == predictor.predict(photo).labels
    pixels = predictor.model_config.preprocessing.resize_and_crop(photo)
    image = predictor.model_config.preprocessing.normalise(pixels[None])[0]
    expected = METHODS["relevance"](predictor.model, image, 1)
    assert np.array_equal(explanation.heatmaps[1].values, expected.numpy())


def test_large_image_is_explained_at_display_size(predictor: Predictor) -> None:
    explanation = explain(predictor, Image.new("RGB", (4000, 3000)), ["rollout"])
    assert explanation.image.size == (1024, 768)
    assert explanation.heatmaps[0].on_image.shape == (768, 1024)
    assert explanation.heatmaps[0].label == explanation.prediction[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["rolout"]}, "no method named 'rolout'. Did you mean 'rollout'?"),
        ({"targets": ["be"]}, "no class named 'be'. Did you mean 'bee'?"),
        ({"targets": [9]}, "no class named '9'"),
        ({"options": {"layr": 1}, "methods": ["attention"]}, "Did you mean 'layer'?"),
    ],
)
def test_unknown_name_suggests_the_closest(predictor: Predictor, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(VitralError, match=message.replace("?", r"\?")):
        explain(predictor, Image.new("RGB", (20, 20)), **arguments)


def test_class_names_take_precedence_over_indices(predictor: Predictor) -> None:
    photo = Image.new("RGB", (20, 20))
    for target, name in (("7", "7"), ("wasp", "Wasp"), ("1", "bee"), (2, "tench, Tinca tinca")):
        label = explain(predictor, photo, ["rollout"], [target]).heatmaps[0].label
        assert label is not None
        assert label.name == name
