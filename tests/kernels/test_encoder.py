"""The fused encoder computes what the reference encoder computes: in Triton's interpreter, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import lora_layers
from support.triton_interpreter import relative_difference, requires_interpreter
from vitral.kernels.encoder import MAX_WIDTH, FusedEncoder, unsupported_architecture
from vitral.models.lora import LoRAConfig, add_lora
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim.param_groups import set_trainable

pytestmark = requires_interpreter

SIZES: dict[str, Any] = {
    "image_size": (16, 16), "patch_size": 4, "num_classes": 10, "width": 48, "depth": 2, "heads": 3, "mlp_width": 96,
}  # fmt: skip
GRID = (4, 4)
TOLERANCE = 5e-5
SLOW = pytest.mark.slow
ATTENTION = ("short", "flash", "pytorch")


def make_model(**overrides: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SIZES | overrides)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no bias is 0, no norm weight is 1
    return model


def embed_random_images(model: ViT) -> Tensor:
    return model.embed(torch.randn(3, 3, 16, 16), GRID).detach()


def forward_backward(encoder: Any, model: ViT, tokens: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """The output, the gradient of the tokens and the gradient of every parameter."""
    model.zero_grad()
    inputs = tokens.clone().requires_grad_(model.patch_embedding.project.bias.requires_grad)
    torch.manual_seed(7)  # stochastic depth
    out = encoder(inputs, GRID)
    if out.requires_grad:
        out.backward(grad_out)
    grads = {name: p.grad.clone() for name, p in model.encoder.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **({} if inputs.grad is None else {"tokens": inputs.grad}), **grads}


def assert_same_results(fused: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert fused.keys() == reference.keys()
    for name in reference:
        if reference[name].norm() > 1e-4:  # the key bias has no gradient: it cancels in the softmax
            assert relative_difference(fused[name], reference[name]) < TOLERANCE, name


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three attention implementations, selected by lowering the limits on the number of tokens."""
    if request.param != "short":
        monkeypatch.setattr("vitral.kernels.short_attention.op.MAX_SHORT_TOKENS", 4)
    if request.param == "pytorch":
        monkeypatch.setattr("vitral.kernels.attention.op.MAX_TOKENS", 4)
    return str(request.param)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "plain": {"depth": 1},
    "depth 2": {"qk_norm": True, "positions": "learned+rotary"},
    "rotary": {"positions": "rotary", "activation": "gelu_tanh", "pooling": "mean", "qkv_bias": False, "depth": 1},
    "registers": {"qk_norm": True, "positions": "sincos", "registers": 2, "depth": 1},
    "drop path": {"drop_path": 0.5},
    "narrow": {"width": 24, "heads": 1, "mlp_width": 56, "depth": 1},
}
CLASS_TOKEN: dict[str, tuple[dict[str, Any], int]] = {
    "depth 2": ({"qk_norm": True, "positions": "learned+rotary", "drop_path": 0.5}, 0),
    "saved activations": ({"depth": 1}, 2**25),
    "registers": ({"depth": 1, "registers": 2}, 0),
}


def with_each_attention(cases: dict[str, Any], quick: set[tuple[str, str]]) -> list[Any]:
    """Every case with every attention implementation; all but the `quick` pairs are slow tests."""
    return [
        pytest.param(attention, case, id=f"{attention}-{name}", marks=[] if (attention, name) in quick else [SLOW])
        for attention in ATTENTION
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(
    ("attention", "overrides"),
    with_each_attention(
        ARCHITECTURES,
        {("short", "rotary"), ("flash", "registers"), ("pytorch", "narrow")},
    ),
    indirect=["attention"],
)
def test_output_and_gradients_match_the_reference(overrides: dict[str, Any], attention: str) -> None:
    model = make_model(**overrides)
    assert unsupported_architecture(model) is None
    tokens = embed_random_images(model)
    grad_out = torch.randn_like(tokens)
    reference = forward_backward(model.encoder, model, tokens, grad_out)
    fused = forward_backward(FusedEncoder(model.encoder, dtype=torch.float32), model, tokens, grad_out)
    assert_same_results(fused, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "case"),
    with_each_attention(CLASS_TOKEN, {("short", "depth 2"), ("flash", "saved activations"), ("pytorch", "registers")}),
    indirect=["attention"],
)
def test_cls_only_returns_the_class_token_of_the_reference(case: tuple[dict[str, Any], int], attention: str) -> None:
    overrides, recompute_threshold = case
    model = make_model(**overrides)
    tokens = embed_random_images(model)
    grad_out = torch.randn(3, 1, 48)
    reference = forward_backward(lambda *args: model.encoder(*args)[:, :1], model, tokens, grad_out)
    encoder = FusedEncoder(model.encoder, dtype=torch.float32, recompute_threshold=recompute_threshold, cls_only=True)
    assert_same_results(forward_backward(encoder, model, tokens, grad_out), reference)
    with torch.no_grad():
        model.eval()
        out = encoder(tokens, GRID)
        assert out.shape == (3, 1, 48)
        assert relative_difference(out, model.encoder(tokens, GRID)[:, :1]) < TOLERANCE


@pytest.mark.slow
def test_sums_over_tokens_are_complete_when_programs_take_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.kernels.reduce.op.MAX_PROGRAMS", 3)
    model = make_model(depth=1)
    tokens = torch.randn(3, 17, 48)
    grad_out = torch.randn_like(tokens)
    reference = forward_backward(model.encoder, model, tokens, grad_out)
    encoder = FusedEncoder(model.encoder, dtype=torch.float32, recompute_threshold=0)
    assert_same_results(forward_backward(encoder, model, tokens, grad_out), reference)


def test_changed_weights_are_cast_again() -> None:
    model = make_model(depth=1)
    tokens = torch.randn(1, 17, 48)
    encoder = FusedEncoder(model.encoder)
    before = encoder(tokens, GRID)
    with torch.no_grad():
        model.encoder.blocks[0].mlp.expand.weight.mul_(2)  # type: ignore[union-attr, operator]
    assert not torch.equal(encoder(tokens, GRID), before)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_inference_matches_the_reference_and_drops_no_branch(pooling: str, attention: str) -> None:
    model = make_model(pooling=pooling, qk_norm=True, positions="learned+rotary", drop_path=0.5).eval()
    tokens = torch.randn(2, 16 + (pooling == "class"), 48)
    with torch.inference_mode():
        out = FusedEncoder(model.encoder, dtype=torch.float32)(tokens, GRID)
        assert relative_difference(out, model.encoder(tokens, GRID)) < TOLERANCE


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"activation": "relu"}, "the activation relu is not supported"),
        ({"final_norm": False}, "the final norm is not a LayerNorm"),
        ({"width": 36, "heads": 3}, "the head width 12 is not a multiple of 8"),
        ({"width": 24, "heads": 1}, "the widths are not multiples of 16, which FP8 GEMMs require"),
    ],
)
def test_unsupported_architectures_are_named(overrides: dict[str, Any], reason: str) -> None:
    assert unsupported_architecture(make_model(**overrides), fp8=True) == reason


TUNING: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"depth": 1}),
    "lora with drop path": ("lora", {"qk_norm": True, "drop_path": 0.5}),
    "head": ("head", {"drop_path": 0.5}),
    "last-1": ("last-1", {"drop_path": 0.5}),
    "last-2": ("last-2", {"registers": 2}),
    "last-0": ("last-0", {"depth": 1}),
    "bias": ("bias", {"depth": 1}),
}


def tuned_model(tune: str, **overrides: Any) -> ViT:
    model = make_model(**overrides)
    if tune == "lora":
        add_lora(model, LoRAConfig(rank=3, targets=("qkv", "expand", "contract")))
        for layer in lora_layers(model).values():
            torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    set_trainable(model, tune)
    return model


@pytest.mark.parametrize(
    ("attention", "case", "cls_only"),
    [
        ("pytorch", TUNING["lora"], True),
        pytest.param("short", TUNING["last-1"], False, marks=SLOW),
        pytest.param("flash", TUNING["lora with drop path"], True, marks=SLOW),
        pytest.param("short", TUNING["lora with drop path"], False, marks=SLOW),
        pytest.param("flash", TUNING["last-1"], True, marks=SLOW),
        *(pytest.param("pytorch", TUNING[name], True, marks=SLOW) for name in ("head", "last-2", "last-0", "bias")),
    ],
    indirect=["attention"],
)
def test_partial_tuning_matches_the_reference(case: tuple[str, dict[str, Any]], attention: str, cls_only: bool) -> None:
    """Output and gradients of exactly the weights that train, with and without saved norms and GELU."""
    tune, overrides = case
    model = tuned_model(tune, **overrides)
    assert unsupported_architecture(model) is None
    tokens = embed_random_images(model)
    num_outputs = 1 if cls_only else tokens.shape[1]
    grad_out = torch.randn(3, num_outputs, 48)
    reference = forward_backward(lambda *args: model.encoder(*args)[:, :num_outputs], model, tokens, grad_out)
    for threshold in (0, 2**25) if tune == "lora" else (0,):
        encoder = FusedEncoder(model.encoder, dtype=torch.float32, recompute_threshold=threshold, cls_only=cls_only)
        assert_same_results(forward_backward(encoder, model, tokens, grad_out), reference)


@pytest.mark.slow
@pytest.mark.parametrize(("tune", "num_gemms"), [("full", 8), ("lora", 12), ("last-1", 4), ("bias", 0)])
def test_frozen_weights_have_no_weight_gradient_gemm(
    tune: str, num_gemms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of four layers; LoRA on three layers per block needs two thin GEMMs each."""
    shapes = []

    def count(grad_out: Tensor, x: Tensor) -> Tensor:
        shapes.append((grad_out.shape[1], x.shape[1]))
        return grad_out.t() @ x

    for module in ("encoder_backward", "linear"):
        monkeypatch.setattr(f"vitral.kernels.{module}.weight_gradient", count)
    model = tuned_model(tune)
    tokens = embed_random_images(model)
    forward_backward(FusedEncoder(model.encoder, dtype=torch.float32), model, tokens, torch.randn_like(tokens))
    assert len(shapes) == num_gemms
    assert tune != "lora" or all(3 in shape for shape in shapes)


@pytest.mark.slow
def test_frozen_blocks_save_no_activations() -> None:
    model = tuned_model("last-1", depth=3)
    encoder = FusedEncoder(model.encoder, dtype=torch.float32)
    out = encoder(embed_random_images(model), GRID)
    assert len(out.grad_fn.forward_pass.saved) == 1  # type: ignore[union-attr]
    set_trainable(model, "head")
    assert not FusedEncoder(model.encoder, dtype=torch.float32)(embed_random_images(model), GRID).requires_grad


def test_lora_and_bf16_weights_follow_the_factors() -> None:
    """The frozen weight is cast once, the sum with the low-rank update in every step."""
    model = tuned_model("lora", depth=1)
    encoder = FusedEncoder(model.encoder)
    layer = next(iter(lora_layers(model).values()))
    torch.nn.init.ones_(layer.lora_B.weight)
    encoder.weights.cast(training=True)
    torch.testing.assert_close(encoder.weights.compute[layer.weight], layer.merged_weight().bfloat16())


def test_lora_dropout_is_unsupported_in_fp8() -> None:
    model = make_model()
    add_lora(model, LoRAConfig(dropout=0.1))
    assert unsupported_architecture(model, fp8=True) == "LoRA uses dropout, which needs bf16"
    assert unsupported_architecture(model) is None


def test_a_model_that_overrides_the_forward_pass_is_unsupported() -> None:
    class Subclass(ViT):
        def features(self, images_BCHW: Tensor) -> Tensor:
            return super().features(images_BCHW) * 2

    assert unsupported_architecture(Subclass(ViTConfig(**SIZES))) == "the model overrides the forward pass of ViT"


def test_models_of_the_builtin_recipes_are_supported() -> None:
    from vitral.models.variants import VARIANTS
    from vitral.recipes.builtin import GROUPS

    recipes = [make() for name in ("Built-in datasets", "Speed runs") for make in GROUPS[name].values()]
    for recipe in recipes:
        model = VARIANTS[recipe.variant](recipe.model)
        assert unsupported_architecture(model, fp8=recipe.model.width % 16 == 0) is None, recipe.name
    assert MAX_WIDTH >= 1664  # G/14
