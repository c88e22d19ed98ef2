"""LoRA: the arithmetic of the paper, and that training it costs neither gradients nor memory for frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.models import lora_layers
from vitral.models.lora import LoRAConfig, LoRALinear, add_lora, merge_lora
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim.param_groups import set_trainable

SMALL: dict[str, Any] = {
    "image_size": (8, 8), "patch_size": 4, "channels": 1, "num_classes": 3, "width": 16, "depth": 2, "heads": 2,
}  # fmt: skip


def lora_model(**settings: Any) -> ViT:
    """A model with random, nonzero factors and head."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL))
    add_lora(model, LoRAConfig(rank=2, **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "head.out" in name:
            nn.init.normal_(parameter)
    return model.eval()


def test_output_is_that_of_the_papers_formula() -> None:
    torch.manual_seed(0)
    plain, config = nn.Linear(6, 4), LoRAConfig(rank=3, alpha=12)
    layer = LoRALinear(plain, config)
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(5, 6)
    A, B = layer.lora_A.weight, layer.lora_B.weight
    expected = x @ plain.weight.T + plain.bias + (12 / 3) * (x @ A.T) @ B.T
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(torch.nn.functional.linear(x, layer.merged_weight(), layer.bias), expected)


def test_training_starts_from_the_model_itself() -> None:
    model, images = ViT(ViTConfig(**SMALL)).eval(), torch.randn(2, 1, 8, 8)
    nn.init.normal_(model.get_parameter("head.out.weight"))
    before = model(images)
    add_lora(model, LoRAConfig())
    assert torch.equal(model(images), before)


def test_a_is_random_within_one_over_the_root_of_its_inputs_and_b_is_zero() -> None:
    for layer in lora_layers(_with_lora()).values():
        A, limit = layer.lora_A.weight, layer.in_features**-0.5
        assert 0.5 * limit < A.abs().max() <= limit
        assert not layer.lora_B.weight.any()


def _with_lora() -> ViT:
    model = ViT(ViTConfig(**SMALL))
    add_lora(model, LoRAConfig(rank=4))
    return model


def test_targets_select_the_layers_of_every_block() -> None:
    model = lora_model(targets=("qkv", "contract"))
    expected = [f"encoder.blocks.{b}.{layer}" for b in (0, 1) for layer in ("attention.qkv", "mlp.contract")]
    assert list(lora_layers(model)) == expected


def test_merged_weights_give_the_same_logits_and_have_the_names_of_the_plain_model() -> None:
    model, plain, images = lora_model(), ViT(ViTConfig(**SMALL)).eval(), torch.randn(4, 1, 8, 8)
    plain.load_state_dict(merge_lora(model.state_dict(), LoRAConfig(rank=2).scaling))
    torch.testing.assert_close(plain(images), model(images), rtol=1e-4, atol=1e-4)


def test_dropout_acts_on_the_update_only_and_only_in_training() -> None:
    layer = LoRALinear(nn.Linear(8, 8), LoRAConfig(rank=2, dropout=0.5))
    x = torch.randn(64, 8)
    frozen = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), frozen), "B is zero"
    nn.init.normal_(layer.lora_B.weight)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("plain", {"activation": "swiglu"}),
        ("plain", {"key_bias": False, "pre_norm": True, "layer_scale": 0.5}),
        ("distilled", {}),
        ("late-norm", {"pooling": "mean"}),
        ("patch-norm", {}),
        ("class-and-mean", {}),
    ],
)
def test_variants_are_adapted_and_merged(variant: str, options: dict[str, Any]) -> None:
    config = ViTConfig(**SMALL, **options)
    model = VARIANTS[variant](config).eval()
    add_lora(model, LoRAConfig(rank=2))
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B.weight)
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
    merged, images = VARIANTS[variant](config).eval(), torch.randn(2, 1, 8, 8)
    merged.load_state_dict(merge_lora(model.state_dict(), LoRAConfig(rank=2).scaling))
    torch.testing.assert_close(merged.features(images), model.features(images), rtol=1e-4, atol=1e-4)


def test_a_target_that_is_not_a_linear_layer_is_refused_with_the_reason() -> None:
    model = ViT(ViTConfig(**SMALL))
    model.get_submodule("encoder.blocks.1.mlp").expand = nn.Identity()
    with pytest.raises(ValueError, match="expand is a Identity, not a linear layer in block 1"):
        add_lora(model, LoRAConfig())


@pytest.mark.parametrize(
    ("tune", "largest"),
    [("full", 3 * 16 * 16), ("lora", 2 * 64), ("bias", 64), ("head", 3 * 16), ("last-1", 64 * 16)],
)
def test_backward_computes_no_gradient_of_a_frozen_weight(tune: str, largest: int) -> None:
    """Frozen weights have no gradient, and nothing as large as one is returned by any node of the graph."""
    model = lora_model() if tune == "lora" else ViT(ViTConfig(**SMALL))
    set_trainable(model, tune)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    sizes = [p.grad.numel() for p in model.parameters() if p.grad is not None]
    assert max(sizes) <= max(largest, 64 * 16 if tune == "full" else 0)


def saved_bytes(model: ViT) -> int:
    """Bytes of activations that autograd keeps for the backward pass."""
    sizes: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.randn(4, 1, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images).sum()
    assert loss.requires_grad
    return sum(sizes.values())


def test_frozen_blocks_save_no_activations_and_a_frozen_backbone_runs_without_a_graph() -> None:
    sizes = {}
    for tune in ("full", "last-1", "head"):
        model = ViT(ViTConfig(**SMALL))
        set_trainable(model, tune)
        sizes[tune] = saved_bytes(model)
    assert sizes["last-1"] < 0.6 * sizes["full"]
    assert sizes["head"] <= 4 * 5 * 16 * 4  # at most the encoder's output, (4, 5, 16) in fp32
    set_trainable(model, "head")
    assert not model.features(torch.randn(2, 1, 8, 8)).requires_grad


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": ()}, {"targets": ("qkv", "qkv")}]
)
def test_invalid_settings_are_refused_and_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"lora\.{next(iter(settings))} must be"):
        LoRAConfig(**settings)
