"""Every registered vit_* architecture of timm is read with the right settings, or refused with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.references import timm
from timm_coverage import check_architecture
from vitral.models.vit import ViTConfig

REFUSED = {
    r"relpos": "relative positions",
    r"_r26_|_r50_|_resnet|_r_s16": "convolutional stem before the patches",
    r"_mci_": "a convolutional network with batch norms",
    r"_18x2_|_xp_|_pwee_|_dpwee_": "parallel attention and MLP branches",
    r"_rope_mixed_": "rotary positions with learned frequencies",
    r"_dlittle_|_dwee_": "differential attention",
    r"sapiens2": "separate projections to q, k and v",
    r"vit_pe_core": "attention pooling with heads of its own",
    r"_rpn_": "post-norm",
}
ACTIVATION_NAMES = {
    "GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "swiglu"
}  # fmt: skip


def expected_settings(model: Any) -> dict[str, Any]:
    """Settings that the tensors do not contain, from timm's modules."""
    block = model.blocks[0]
    rope = getattr(model, "rope", None)
    return {
        "heads": block.attn.num_heads,
        "activation": ACTIVATION_NAMES[type(block.mlp.act).__name__],
        "norm_eps": block.norm1.eps,
        "pooling": {"token": "class", "avg": "mean", "map": "attention"}[model.global_pool],
        "has_class_token": model.cls_token is not None,
        "rotary": rope is not None,
        "rope_base": ViTConfig().rope_base if rope is None else rope.temperature,
    }


def check_settings(name: str) -> None:
    coverage = check_architecture(name)
    reason = next((reason for pattern, reason in REFUSED.items() if re.search(pattern, name)), None)
    if reason is not None:
        assert coverage.config is None, name
        assert reason in coverage.reason, (name, coverage.reason)
        return
    config = coverage.config
    assert config is not None, (name, coverage.reason)
    expected = expected_settings(coverage.model)
    actual = {key: "rotary" in config.positions if key == "rotary" else getattr(config, key) for key in expected}
    assert actual == expected, name


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3_qkvb", "vit_base_patch16_gap_224", "vit_base_patch32_clip_quickgelu_224"]
)
def test_settings_of_an_architecture_match_timm(name: str) -> None:
    check_settings(name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_architecture_is_read_with_its_settings_or_refused_with_the_reason() -> None:
    for name in [*timm.list_models("vit_*"), *timm.list_models("deit*")]:
        check_settings(name)
