"""The fused encoder supports what fine-tuning needs: layer scale, dropout, checkpointing, frozen parts, FP8.

In Triton's interpreter, in fp32, with few tokens. FP8 GEMMs are emulated.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import lora_layers
from support.triton_interpreter import (
    emulate_fp8_gemms,
    relative_difference,
    requires_interpreter,
)
from vitral.kernels.dropout.op import Dropout, apply_dropout, draw_seeds
from vitral.kernels.dropout.reference import same_dropout
from vitral.kernels.encoder import FusedEncoder, unsupported_architecture
from vitral.models.lora import LoRAConfig, add_lora
from vitral.models.vit import ViT, ViTConfig
from vitral.training.activation_checkpointing import checkpoint_activations
from vitral.training.optim.param_groups import set_trainable

pytestmark = requires_interpreter
GRID = (2, 2)
TOLERANCE = 1e-4


def make_model(tune: str = "full", lora_dropout: float = 0.0, noise: float = 0.1, **overrides: Any) -> ViT:
    sizes: dict[str, Any] = {
        "image_size": (8, 8), "patch_size": 4, "num_classes": 3, "width": 32, "depth": 2, "heads": 2, "mlp_width": 48,
    }  # fmt: skip
    torch.manual_seed(0)
    model = ViT(ViTConfig(**sizes | overrides)).eval()
    if tune == "lora":
        add_lora(model, LoRAConfig(rank=3, dropout=lora_dropout))
        for layer in lora_layers(model).values():
            torch.nn.init.normal_(layer.lora_B.weight, std=noise)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    set_trainable(model, tune)
    return model


def gradients(encoder: Any, model: ViT, num_outputs: int | None = None) -> dict[str, Tensor]:
    """The output, and the gradients of the tokens and of every parameter that trains."""
    model.zero_grad()
    torch.manual_seed(1)
    trains_tokens = model.patch_embedding.project.weight.requires_grad
    tokens = torch.randn(3, 4 + model.config.num_prefix_tokens, 32, requires_grad=trains_tokens)
    out = encoder(tokens, GRID)[:, :num_outputs]
    torch.manual_seed(2)
    out.backward(torch.randn(3, tokens.shape[1], 32)[:, :num_outputs])
    grads = {name: p.grad.clone() for name, p in model.encoder.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **({} if tokens.grad is None else {"tokens": tokens.grad}), **grads}


def assert_same(fused: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert fused.keys() == reference.keys()
    errors = {name: relative_difference(fused[name], reference[name]) for name in reference}
    assert max(errors.values()) < tolerance, errors


CASES: dict[str, dict[str, Any]] = {
    "layer scale": {"layer_scale": 0.5, "depth": 1},
    "DINOv2": {"layer_scale": 0.5, "registers": 2, "drop_path": 0.4},
    "DINOv3": {"layer_scale": 0.5, "registers": 1, "positions": "rotary", "rope": "centered", "key_bias": False},
    "CLIP": {"activation": "quick_gelu"},
    "SwiGLU": {"activation": "swiglu", "layer_scale": 0.5},
    "dropout": {"dropout": 0.3},
    "dropout, SwiGLU": {"dropout": 0.3, "activation": "swiglu", "depth": 1},
    "dropout, layer scale": {"dropout": 0.3, "layer_scale": 0.5, "depth": 1},
}


@pytest.mark.parametrize(
    ("case", "cls_only"),
    [
        ("layer scale", False),
        *(
            pytest.param(case, cls_only, marks=pytest.mark.slow)
            for cls_only, case in zip(cycle([True, False]), CASES, strict=False)
        ),
    ],
)
def test_output_and_gradients_match_the_reference(case: str, cls_only: bool) -> None:
    model = make_model(**CASES[case])
    assert unsupported_architecture(model) is None
    fused = FusedEncoder(model.encoder, dtype=torch.float32, cls_only=cls_only, recompute_threshold=0)
    with same_dropout(fused):
        reference = gradients(model.encoder, model, 1 if cls_only else None)
        assert_same(gradients(fused, model, 1 if cls_only else None), reference)


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lora", "last-1", "bias"])
def test_layer_scale_with_frozen_weights(tune: str) -> None:
    model = make_model(tune, layer_scale=0.5, key_bias=False)
    assert unsupported_architecture(model) is None
    fused = FusedEncoder(model.encoder, dtype=torch.float32)
    assert_same(gradients(fused, model), gradients(model.encoder, model))


@pytest.mark.slow
@pytest.mark.parametrize("cls_only", [False, True])
def test_lora_with_dropout_matches_the_reference(cls_only: bool) -> None:
    model = make_model("lora", lora_dropout=0.4, layer_scale=0.5, dropout=0.2)
    assert unsupported_architecture(model) is None
    fused = FusedEncoder(model.encoder, dtype=torch.float32, cls_only=cls_only)
    with same_dropout(fused):
        reference = gradients(model.encoder, model, 1 if cls_only else None)
        assert_same(gradients(fused, model, 1 if cls_only else None), reference)


def test_a_scale_that_trains_alone_has_its_gradient() -> None:
    model = make_model(layer_scale=0.5, depth=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("residual2.scale"))
    fused = FusedEncoder(model.encoder, dtype=torch.float32)
    reference = gradients(model.encoder, model)
    assert set(reference) == {"out", "blocks.0.residual2.scale"}
    assert_same(gradients(fused, model), reference)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"dropout": 0.3, "drop_path": 0.5, "layer_scale": 0.5}], ids=str)
def test_activation_checkpointing_saves_only_inputs_and_has_the_same_gradients(overrides: dict[str, Any]) -> None:
    """Also with random draws, which must be the same when a block is computed again."""
    model = make_model(depth=3, **overrides).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model)
        fused = FusedEncoder(model.encoder, dtype=torch.float32)
        fused.dropout_seeds = torch.arange(36, dtype=torch.int32).view(9, 4)
        results.append(gradients(fused, model))
        saved = fused(torch.randn(3, 5, 32), GRID).grad_fn.forward_pass.saved  # type: ignore[union-attr]
        sizes = [sum(x.numel() for x in record if isinstance(x, Tensor)) for record in saved]
        assert checkpointing == (sizes[0] == 3 * 5 * 32)
    assert_same(results[1], results[0], tolerance=1e-6)


@pytest.mark.slow
def test_attention_dropout_drops_attention_weights_in_training_only() -> None:
    model = make_model(dropout_attention=0.5)
    assert unsupported_architecture(model) is None
    fused = FusedEncoder(model.encoder, dtype=torch.float32)
    assert_same(gradients(fused, model), gradients(model.encoder, model))
    tokens = torch.randn(1, 5, 32).expand(40, -1, -1).contiguous()
    with torch.no_grad():
        model.train()
        samples, expected = fused(tokens, GRID), model.encoder(tokens, GRID)
    assert samples.std(dim=0).mean() == pytest.approx(float(expected.std(dim=0).mean()), rel=0.2)
    checkpoint_activations(model)
    reason = "attention dropout cannot be recomputed with activation checkpointing"
    assert unsupported_architecture(model) == reason


@pytest.mark.slow
def test_dropout_masks_have_the_requested_rate_and_are_independent() -> None:
    seeds = draw_seeds(8, torch.device("cpu"))
    for p in (0.1, 0.5, 0.9):
        masks = torch.stack([apply_dropout(torch.ones(64, 300), Dropout(seed, p)) for seed in seeds])
        kept = (masks > 0).double()
        assert torch.equal(masks.unique(), torch.tensor([0.0, 1 / (1 - p)]))
        assert kept.mean() == pytest.approx(1 - p, abs=0.005)
        variance = p * (1 - p)
        flat = kept.flatten(1) - (1 - p)
        correlations = torch.stack(
            [(flat[:, shift:] * flat[:, :-shift]).mean(dim=1) / variance for shift in (1, 2, 32, 300, 301)]
        )
        assert correlations.abs().max() < 0.04
        between_seeds = torch.corrcoef(flat) - torch.eye(8)
        assert between_seeds.abs().max() < 0.04


FP8_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "layer scale": ("full", {"layer_scale": 0.5}),
    "dropout": ("full", {"dropout": 0.3}),
    "quick GELU": ("full", {"activation": "quick_gelu"}),
    "SwiGLU": ("full", {"activation": "swiglu"}),
    "LoRA": ("lora", {"layer_scale": 0.5}),
    "last block": ("last-1", {"key_bias": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8_agrees_with_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a number of tokens, 15, that is not a multiple of 16, and with weights that do not train."""
    gemms = emulate_fp8_gemms(monkeypatch)
    monkeypatch.setattr("vitral.kernels.short_attention.op.MAX_SHORT_TOKENS", 4)  # its gradients of qkv are not FP8
    tune, overrides = FP8_CASES[case]
    model = make_model(tune, noise=0.02, **overrides)  # large weights amplify rounding in the softmax
    assert unsupported_architecture(model, fp8=True) is None
    fused = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, fp8_wgrad=True)
    with same_dropout(fused):
        reference = gradients(model.encoder, model)
        result = gradients(fused, model)
    assert fused.weights.uses_fp8_wgrad(fused.blocks[-1]) == (tune != "lora")
    assert ((96, 16, 32) in gemms) == (tune != "lora")  # qkv weight gradient over 15 tokens and one of padding
    assert result.keys() == reference.keys()
    for rank in {x.ndim for x in reference.values()}:  # tokens, matrices, vectors; LoRA trains no vectors
        pairs = [(result[name], reference[name]) for name in reference if reference[name].ndim == rank]
        fused_grads, reference_grads = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
        assert relative_difference(fused_grads, reference_grads) < 0.3, rank


@pytest.mark.slow
def test_frozen_weights_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_fp8_gemms(monkeypatch)
    model = make_model("last-1")
    fused = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32)
    fused.weights.cast(training=True)
    frozen, trained = (block.attention.qkv.weight for block in fused.blocks)
    before = dict(fused.weights.quantized_t)
    fused.weights.cast(training=True)
    assert fused.weights.quantized_t[frozen] is before[frozen]
    assert fused.weights.quantized_t[trained] is not before[trained]


def test_scaled_weights_remain_when_inference_frees_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_fp8_gemms(monkeypatch)
    model = make_model(layer_scale=0.5, depth=1).requires_grad_(False)
    fused, tokens = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32), torch.randn(1, 5, 32)
    with torch.no_grad():
        before = fused(tokens, GRID)
        assert relative_difference(before, model.encoder(tokens, GRID)) < 0.15
        fused.weights.free_unquantized(lambda fp8_data: None)
        assert torch.equal(fused(tokens, GRID), before)
