"""Each method against an answer known beforehand; all of them on every kind of ViT; maps laid back onto pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitral.models.vit
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.explain import METHODS, explain, rescale_for_display
from vitral.explain.api import project_to_image
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS, HybridConfig
from vitral.models.variants.hybrid import ConvStemConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

TINY: dict[str, Any] = {"image_size": (8, 12), "patch_size": 4, "num_classes": 5, "width": 16, "depth": 2, "heads": 2}
KINDS: dict[str, tuple[str, ViTConfig]] = {
    "class": ("plain", ViTConfig(**TINY)),
    "mean, rotary": ("plain", ViTConfig(**TINY, pooling="mean", positions="rotary")),
    "attention pooling, sincos": ("plain", ViTConfig(**TINY, pooling="attention", positions="sincos")),
    "registers, one channel": ("plain", ViTConfig(**TINY, registers=3, channels=1, qk_norm=True, layer_scale=0.5)),
    "registers, mean": ("plain", ViTConfig(**TINY, registers=2, pooling="mean", positions="learned+rotary")),
    "distilled": ("distilled", ViTConfig(**TINY)),
    "late norm": ("late-norm", ViTConfig(**TINY, pooling="mean")),
    "patch norm": ("patch-norm", ViTConfig(**TINY, positions="none")),
    "class and mean": ("class-and-mean", ViTConfig(**TINY, registers=1)),
    "hybrid": ("hybrid", HybridConfig(**TINY, conv=ConvStemConfig(widths=(8,), strides=(2,)))),
}


def alive(variant: str, config: ViTConfig) -> ViT:
    """A model whose attention and head are not as flat as they start."""
    torch.manual_seed(0)
    model = VARIANTS[variant](config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head" in name or name.endswith("table"):
                parameter.normal_()
            elif "qkv" in name or ".kv" in name or "pooling.q" in name:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_explains_every_kind_of_vit(kind: str, method: str) -> None:
    variant, config = KINDS[kind]
    model = alive(variant, config).requires_grad_(False)  # a frozen model has gradients too
    image = torch.randn(config.channels, 8, 12)
    heat = METHODS[method](model, image, 3)
    assert heat.shape == (8, 12)
    assert heat.dtype == torch.float32
    assert heat.isfinite().all()
    assert not heat.requires_grad
    if not METHODS[method].is_signed:
        assert heat.min() >= 0
    assert not image.requires_grad
    assert torch.equal(METHODS[method](model, image, 3), heat), "the same every time"
    each = torch.stack([METHODS[method](model, image, target) for target in range(5)])
    assert each.std() > 0  # Grad-CAM of a class that everything speaks against is empty
    assert bool((each == each[0]).all()) == (not METHODS[method].is_class_specific)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_gives_what_its_images_give(method: str) -> None:
    model = alive(*KINDS["class"])
    images = torch.randn(3, 3, 8, 12)
    images[1] *= images.abs().max() / images[1].abs().max()  # the noise of smoothed gradients follows the range
    if method in ("smoothgrad", "shapley"):
        pytest.skip("draws its samples for the whole batch")
    both = METHODS[method](model, images, torch.tensor([0, 1, 2]))
    for index, image in enumerate(images):
        torch.testing.assert_close(METHODS[method](model, image, index), both[index], rtol=1e-4, atol=1e-5)


def test_without_a_target_it_is_the_class_that_the_model_says() -> None:
    model = alive(*KINDS["mean, rotary"])
    image = torch.randn(3, 8, 12)
    said = int(model(image[None]).argmax())
    heats = [METHODS["relevance"](model, image, target) for target in (None, said, (said + 1) % 5)]
    assert torch.equal(heats[0], heats[1])
    assert not torch.equal(heats[0], heats[2])


def test_it_works_inside_inference_mode_and_leaves_a_training_model_training() -> None:
    model = alive("plain", ViTConfig(**TINY, dropout=0.5, drop_path=0.5)).train()
    image = torch.randn(3, 8, 12)
    with torch.inference_mode():
        inside = METHODS["relevance"](model, image * 1, 1)
    assert torch.equal(inside, METHODS["relevance"](model, image, 1))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────


def test_attention_is_the_class_tokens_row_of_that_layer_and_head() -> None:
    model = alive(*KINDS["registers, one channel"])
    image = torch.randn(1, 8, 12)
    trace = model.trace(image[None])
    heat = METHODS["attention"](model, image, layer=1, head=2)
    row = trace.attention[0][0, 1, 0, 4:].view(1, 1, 2, 3)
    wanted = torch.nn.functional.interpolate(row, size=(8, 12), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(heat, wanted.detach())
    default = METHODS["attention"](model, image)
    heads = [METHODS["attention"](model, image, layer=2, head=head) for head in (1, 2)]
    torch.testing.assert_close(default, (heads[0] + heads[1]) / 2)


def test_attention_pooling_is_traced_and_its_answer_is_the_same() -> None:
    model = alive(*KINDS["attention pooling, sincos"])
    images = torch.randn(2, 3, 8, 12)
    trace = model.trace(images)
    assert trace.pooling[0].shape == (2, 2, 1, 6)
    torch.testing.assert_close(trace.pooling[0].sum(dim=-1), torch.ones(2, 2, 1))
    torch.testing.assert_close(trace.logits, model(images), rtol=1e-4, atol=1e-5)
    assert ViT(ViTConfig(**TINY)).trace(images).pooling == []


# ── relevance ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["class", "mean, rotary", "attention pooling, sincos", "distilled", "class and mean"])
def test_relevance_is_that_of_the_papers_equations(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """R = I; R ← R + Ā·R, Ā = E_h[(∇A ⊙ A)⁺]: whole matrices, head by head, gradients by moving each entry of A."""
    model = alive(*KINDS[kind]).double()
    image, target = torch.randn(1, 3, 8, 12).double(), 2
    found: list[Tensor] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        found.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return found[-1] @ v

    def logit_with(layer: int, moved: Tensor) -> float:
        layers = iter(range(9))

        def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            here = next(layers) == layer
            return (moved if here else (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(vitral.models.vit, "attend", attend)
            return float(model(image)[0, target])

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(vitral.models.vit, "attend", noting)
        model(image)
    bars = []
    for layer, A in enumerate(found):
        bar = np.zeros(A.shape[2:])
        for entry in np.ndindex(*A.shape[1:]):
            step = torch.zeros_like(A)
            step[0][entry] = 1e-5
            slope = (logit_with(layer, A + step) - logit_with(layer, A - step)) / 2e-5
            bar[entry[1:]] += max(slope * float(A[0][entry]), 0) / A.shape[1]
        bars.append(bar)
    T = found[0].shape[-1]
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
    wanted = torch.from_numpy(row[prefix:]).view(1, 1, 2, 3).float()
    wanted = torch.nn.functional.interpolate(wanted, size=(8, 12), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(METHODS["relevance"](model, image[0], target), wanted, rtol=1e-3, atol=1e-6)


# ── Grad-CAM ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradcam_of_a_linear_model_is_known() -> None:
    """Without norms and with even attention the logit is w·(z_0 + mean of all x): every patch has the slope w/T, so
    patch n shines with (w·x_n/T)⁺."""
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
    wanted = (model.embed(image[None], (1, 3))[0, 1:] @ w / 4).detach()
    torch.testing.assert_close(METHODS["gradcam"](model, image, 1)[0], wanted.clamp_min(0))
    torch.testing.assert_close(METHODS["gradcam"](model, image, 0)[0], (-wanted).clamp_min(0))


# ── occlusion ────────────────────────────────────────────────────────────────────────────────────────────────


def test_occlusion_of_a_model_that_reads_one_place_finds_it() -> None:
    image = torch.full((1, 28, 28), 0.5)

    def model(images: Tensor) -> Tensor:
        read = images[:, 0, 8:10, 4:6].sum(dim=(1, 2))
        return torch.stack([read, -read], dim=1)

    for target, sign in ((0, 1.0), (1, -1.0)):
        heat = METHODS["occlusion"](model, image, target, window=1)
        patches = heat.unfold(0, 2, 2).unfold(1, 2, 2).sum(dim=(2, 3)) / 4  # 14 × 14
        assert patches.abs().argmax() == 4 * 14 + 2
        far = heat.clone()
        far[6:12, 2:8] = 0
        assert (far == 0).all()
        # log-odds 2·2.0, half a pixel beside the patch's middle: bilinear weights 3/4 · 3/4
        assert heat.abs().max() == pytest.approx(4.0 * 0.75**2)
        assert heat.sum().sign() == sign


def test_occlusion_by_larger_squares_averages_where_they_overlap() -> None:
    def model(images: Tensor) -> Tensor:
        return images[:, 0, :2, :2].mean(dim=(1, 2))[:, None]

    heat = METHODS["occlusion"](model, torch.ones(1, 28, 28), 0, window=2)
    corner = heat[0, 0]
    assert corner == pytest.approx(1.0)  # only one square reaches the corner, and it covers what is read
    assert heat[27, 27] == 0
    assert 0 < heat[3, 3] < 1


# ── by captum ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "options", "a_pixel"), [("integrated-gradients", {"steps": 1000}, 1),
                                                           ("shapley", {"samples": 2}, 16)])  # fmt: skip
def test_shares_add_up_to_the_difference_of_the_logits(method: str, options: dict[str, int], a_pixel: int) -> None:
    model = alive(*KINDS["class"])
    image = torch.randn(3, 8, 12)
    with torch.no_grad():
        whole, gray = model(image[None])[0, 1], model(0 * image[None])[0, 1]
    heat = METHODS[method](model, image, 1, **options)
    torch.testing.assert_close(heat.sum() / a_pixel, whole - gray, rtol=0.01, atol=0.01)


def test_without_captum_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(VitralError, match=r"vitral\[explain\]"):
        METHODS["integrated-gradients"](alive(*KINDS["class"]), torch.randn(3, 8, 12))


# ── what cannot be asked ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "options", "target", "said"),
    [
        ("attention", {"layer": 3}, None, "there is no layer 3: the model has 2, counted from 1 to 2"),
        ("attention", {"layer": 0}, None, "there is no layer 0"),
        ("attention", {"head": 9}, None, "there is no head 9: the model has 2"),
        ("gradcam", {"layer": 5}, None, "there is no layer 5"),
        ("rollout", {"layer": 1}, None, "rollout has no option 'layer'"),
        ("rollout", {"fusio": "max"}, None, "Did you mean fusion"),
        ("relevance", {}, 5, "there is no class 5: the model has 5, counted from 0 to 4"),
        ("occlusion", {"window": 9}, None, "window must be from 1 to 2 patches"),
    ],
)
def test_a_clear_sentence(method: str, options: dict[str, Any], target: int | None, said: str) -> None:
    with pytest.raises(VitralError, match=said):
        METHODS[method](alive(*KINDS["class"]), torch.randn(3, 8, 12), target, **options)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 8, 12), "wants images with 3 channels: 3 height width, not 1 8 12"),
        ((3, 8, 13), "width 13 is not a multiple"),
        ((8, 12), "wants images with 3 channels"),
    ],
)
def test_an_image_that_does_not_fit_is_refused_in_a_sentence(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(VitralError, match=said):
        METHODS["relevance"](alive(*KINDS["class"]), torch.randn(shape))


def test_a_model_that_only_answers_cannot_be_asked_for_gradients_or_attention() -> None:
    model = alive(*KINDS["class"])

    def exported(images: Tensor) -> Tensor:
        return model(images).detach()

    for method in ("relevance", "rollout"):
        with pytest.raises(VitralError, match="only answers"):
            METHODS[method](exported, torch.randn(3, 28, 28))


def test_weights_made_in_inference_mode_have_no_gradients_and_it_says_so() -> None:
    with torch.inference_mode():
        model = ViT(ViTConfig(**TINY))
    with pytest.raises(VitralError, match="needs gradients"):
        METHODS["relevance"](model, torch.randn(3, 8, 12), 0)


def test_scaling_for_a_drawing() -> None:
    heat = torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]])
    assert rescale_for_display(heat).tolist() == [[[0.0, 1.0]], [[0.0, 0.0]]]
    assert rescale_for_display(torch.tensor([[[-4.0, 2.0]]]), signed=True).tolist() == [[[-1.0, 0.5]]]


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def predictor(cpu: Hardware) -> Predictor:
    config = ViTConfig(**{**TINY, "image_size": (16, 16)})
    seen = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
    names = ("ant", "bee", "tench, Tinca tinca", "7", "Wasp")
    card = ModelConfig(architecture=config, preprocessing=seen, classes=names, trained_on="x", epoch=1)
    return Predictor(alive("plain", config), card, cpu)


def test_a_map_is_laid_back_where_it_belongs() -> None:
    """A 40×20 picture is scaled to 40×20 and its middle 16×16 is seen: 12 to 28 across, 2 to 18 down."""
    seen = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
    values = np.zeros((16, 16), dtype=np.float32)
    values[4, 9] = 1
    placed = project_to_image(values, seen, (40, 20), (40, 20))
    assert placed.shape == (20, 40)
    assert np.argwhere(placed == 1).tolist() == [[6, 21]]
    assert np.isnan(placed).sum() == 20 * 40 - 16 * 16
    larger = project_to_image(values, seen, (400, 200), (400, 200))
    peak = np.unravel_index(np.nanargmax(larger), larger.shape)
    assert (abs(peak[0] - 64.5), abs(peak[1] - 214.5)) < (2, 2)
    assert np.nansum(larger) == pytest.approx(100, rel=0.02)


def test_a_picture_is_explained_for_several_classes_and_methods(predictor: Predictor) -> None:
    picture = Image.effect_noise((90, 60), 90).convert("RGB")
    found = explain(predictor, picture, ["rollout", "relevance", "attention"], ["bee", 0, "tench"], {"layer": 1})
    asked = [(heat.method.name, heat.label.name) for heat in found.heatmaps]
    assert asked[:3] == [("rollout", "bee"), ("relevance", "bee"), ("attention", "bee")]
    assert [name for _, name in asked[3::3]] == ["ant", "tench, Tinca tinca"]
    assert all(heat.values.shape == (16, 16) and heat.on_image.shape == (60, 90) for heat in found.heatmaps)
    assert np.nanmax(found.heatmaps[1].display) == pytest.approx(1, abs=0.05)
    chances = predictor.predict(picture)
    assert found.prediction == chances.labels
    pixels = predictor.model_config.preprocessing.resize_and_crop(picture)
    image = predictor.model_config.preprocessing.normalise(pixels[None])[0]
    wanted = METHODS["relevance"](predictor.model, image, 1)
    assert np.array_equal(found.heatmaps[1].values, wanted.numpy())


def test_a_large_picture_is_explained_at_a_size_one_can_look_at(predictor: Predictor) -> None:
    found = explain(predictor, Image.new("RGB", (4000, 3000)), ["rollout"])
    assert found.image.size == (1024, 768)
    assert found.heatmaps[0].on_image.shape == (768, 1024)
    assert found.heatmaps[0].label == found.prediction[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"methods": ["rolout"]}, "no method named 'rolout'. Did you mean rollout?"),
        ({"targets": ["be"]}, "no class named 'be'. Did you mean bee?"),
        ({"targets": [9]}, "no class named '9'"),
        ({"options": {"layr": 1}, "methods": ["attention"]}, "Did you mean layer?"),
    ],
)
def test_what_is_not_there_is_named(predictor: Predictor, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(VitralError, match=said.replace("?", r"\?")):
        explain(predictor, Image.new("RGB", (20, 20)), **arguments)


def test_a_class_is_found_by_its_name_before_its_index(predictor: Predictor) -> None:
    picture = Image.new("RGB", (20, 20))
    for target, name in (("7", "7"), ("wasp", "Wasp"), ("1", "bee"), (2, "tench, Tinca tinca")):
        assert explain(predictor, picture, ["rollout"], [target]).heatmaps[0].label.name == name
