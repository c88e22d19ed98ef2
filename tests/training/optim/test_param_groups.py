from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

from vitral.models.lora import LoRAConfig, add_lora
from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import OptimConfig
from vitral.training.optim.builder import make_optimizers
from vitral.training.optim.muon import Muon
from vitral.training.optim.param_groups import layer_index, param_settings, set_trainable

SMALL: dict[str, Any] = {
    "image_size": (8, 8), "patch_size": 4, "channels": 1, "num_classes": 3, "width": 16, "depth": 2, "heads": 2,
}  # fmt: skip
CONFIGS = [
    ViTConfig(**SMALL, pooling=pooling, positions=positions, registers=registers, qk_norm=qk_norm)  # type: ignore[arg-type]
    for pooling, positions, registers, qk_norm in itertools.product(
        ("class", "mean", "attention"), ("learned", "sincos", "rotary", "learned+rotary", "none"), (0, 3), (False, True)
    )
]
CONFIGS.append(ViTConfig(**SMALL, layer_scale=0.1, head="mlp", qkv_bias=False))


def linear_weights(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_only_linear_weights_decay_and_every_parameter_is_in_one_group(name: Any) -> None:
    models: list[nn.Module] = [*(ViT(config) for config in CONFIGS), DistilledViT(ViTConfig(**SMALL))]
    for model in models:
        optimizers = make_optimizers(model, OptimConfig(name=name, weight_decay=0.3))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        grouped = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
        decayed = {id(p) for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
        not_decayed = {id(p) for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
        assert decayed == linear_weights(model)
        assert decayed | not_decayed == set(grouped)


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_others() -> None:
    for config in CONFIGS:
        model = ViT(config)
        muon, adamw = make_optimizers(model, OptimConfig(name="muon"))
        assert isinstance(muon, Muon)
        assert isinstance(adamw, torch.optim.AdamW)
        block_matrices = {id(p) for p in model.encoder.blocks.parameters() if p.ndim == 2}
        assert {id(p) for group in muon.param_groups for p in group["params"]} == block_matrices


def test_qkv_weights_are_three_matrices_and_muon_has_its_own_weight_decay() -> None:
    optim = OptimConfig(name="muon", weight_decay=0.1, muon_weight_decay=0.4)
    for name, parameter in ViT(ViTConfig(**SMALL)).named_parameters():
        settings = param_settings(name, parameter, optim, depth=2)
        assert settings.num_matrices == (3 if name.endswith("qkv.weight") else 1)
        assert settings.weight_decay == (
            0.4 if settings.use_muon else 0.1 if name == "head.out.weight" else settings.weight_decay
        )


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("patch_embedding.project.weight", 0),
        ("class_token", 0),
        ("position_embedding.table", 0),
        ("encoder.blocks.0.norm1.weight", 1),
        ("encoder.blocks.11.mlp.expand.weight", 12),
        ("encoder.norm.weight", 13),
        ("attention_pooling.probe", 13),
        ("head.out.weight", 13),
        ("student.vit.patch_embedding.project.weight", 0),
        ("student.vit.encoder.blocks.0.norm1.weight", 1),
        ("student.vit.encoder.norm.weight", 13),
        ("student.mask_token", 13),
        ("student.head.0.weight", 13),
        ("predictor.0.weight", 13),
        ("decoder.encoder.blocks.0.mlp.expand.weight", 13),
        ("pooled_projection.0.weight", 13),
        ("patch_projection.0.weight", 13),
    ],
)
def test_layer_index_counts_from_the_embedding_to_the_head(name: str, index: int) -> None:
    assert layer_index(name, depth=12) == index


def test_layer_decay_lowers_the_learning_rate_towards_the_embedding() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optim = OptimConfig(layer_decay=0.5)
    names = (
        "head.out.weight",
        "encoder.blocks.1.mlp.expand.weight",
        "encoder.blocks.0.mlp.expand.weight",
        "class_token",
    )
    scales = [param_settings(name, parameter, optim, depth=2).lr_scale for name in names]
    assert scales == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("tune", "trainable"),
    [
        ("full", ""),  # every name
        ("head", r"head\."),
        ("bias", r"head\.|.*bias$"),
        ("lora", r"head\.|.*lora_[AB]\.weight$"),
        ("last-0", r"head\.|encoder\.norm\."),
        ("last-1", r"head\.|encoder\.norm\.|encoder\.blocks\.1\."),
        ("last-2", r"head\.|encoder\."),
    ],
)
def test_tune_selects_the_trainable_parameters(tune: str, trainable: str) -> None:
    model = ViT(ViTConfig(**SMALL))
    add_lora(model, LoRAConfig(rank=2))
    set_trainable(model, tune)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {name for name, _ in model.named_parameters() if re.match(trainable, name)}


def test_muon_leaves_the_factors_of_lora_to_adamw() -> None:
    model = ViT(ViTConfig(**SMALL))
    add_lora(model, LoRAConfig(rank=2))
    set_trainable(model, "lora")
    (optimizer,) = make_optimizers(model, OptimConfig(name="muon"))
    assert isinstance(optimizer, torch.optim.AdamW)
