"""The estimates against what PyTorch really keeps, the real models' parameters, and closed forms of the rings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitral.analysis import cost as estimate
from vitral.analysis.cost import GB, GIB, GPUS, CostEstimate
from vitral.analysis.model_summary import summarise
from vitral.cli.main import main
from vitral.models.presets import PRESETS, preset
from vitral.models.vit import ViT, ViTConfig

B = 4
SMALL: dict[str, Any] = {
    "image_size": (28, 14),
    "patch_size": 7,
    "channels": 2,
    "classes": 10,
    "width": 48,
    "depth": 3,
    "heads": 4,
    "mlp_width": 112,
}


def kept(config: ViTConfig, bf16: bool) -> int:
    """Bytes that autograd keeps of a real forward pass, besides weights and their bf16 copies."""
    model = ViT(config)
    found: dict[int, int] = {}
    shapes = {(p.shape[::-1]) for p in model.parameters() if p.ndim == 2}  # autocast keeps copies transposed

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copy = tensor.dtype == torch.bfloat16 and tensor.shape in shapes and tensor.numel() == storage.nbytes() // 2
        if not copy:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.rand(B, config.channels, *config.image_size)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(images)
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    assert logits.requires_grad
    return sum(found.values())


def outside(config: ViTConfig) -> int:
    """What the estimate counts and the model does not keep: the image itself, and the loss's two rows."""
    return 4 * config.channels * config.image_size[0] * config.image_size[1] + 8 * config.num_classes


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"positions": "rotary"},
        {"qk_norm": True, "positions": "learned+rotary"},
        {"pooling": "mean", "head": "mlp", "positions": "sincos", "registers": 2},
        {"pooling": "attention"},
        {"layer_scale": 0.1, "drop_path": 0.2},
        {"dropout": 0.1, "dropout_embedding": 0.1},
    ],
    ids=str,
)
def test_activations_are_what_autograd_keeps(extra: dict[str, Any], bf16: bool) -> None:
    config = ViTConfig(**SMALL | extra)
    said = B * (estimate.activation_bytes(config, "bf16" if bf16 else "fp32", "cpu").total - outside(config))
    assert said == pytest.approx(kept(config, bf16), rel=0.005)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([16, 48, 96]),
    heads=st.sampled_from([1, 2, 4]),
    depth=st.integers(1, 4),
    hidden=st.integers(1, 200),
    pooling=st.sampled_from(["class", "mean"]),
)
def test_activations_of_any_size(rows: int, width: int, heads: int, depth: int, hidden: int, pooling: Any) -> None:
    config = ViTConfig(
        image_size=(4 * rows, 8),
        patch_size=4,
        num_classes=7,
        width=width,
        heads=heads,
        depth=depth,
        mlp_width=hidden,
        pooling=pooling,
    )
    said = B * (estimate.activation_bytes(config, "fp32", "cpu").total - outside(config))
    assert said == pytest.approx(kept(config, bf16=False), rel=0.005)


def test_checkpointed_activations_are_what_checkpointed_blocks_keep() -> None:
    """Block by block through torch's own checkpointing; the block that is computed again is the last addition."""
    from torch.utils.checkpoint import checkpoint

    config = ViTConfig(**SMALL)
    model = ViT(config)
    for block in model.encoder.blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)  # type: ignore[method-assign]
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.rand(B, config.channels, *config.image_size))
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    said = estimate.activation_bytes(config, "fp32", "cpu")
    without_a_block = said.total_with_checkpointing - (said.block - said.block_input) - outside(config)
    assert sum(found.values()) == pytest.approx(B * without_a_block, rel=0.005)
    assert said.total_with_checkpointing < said.total


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    with torch.device("meta"):
        model = ViT(preset(name))
    found = estimate.count_parameters(preset(name))
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.matrices == sum(p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2)


@pytest.mark.parametrize("name", ["Ti/16", "plain-S/16"])
def test_arithmetic_is_what_pytorch_counts(name: str) -> None:
    assert estimate.multiply_adds(preset(name)) == summarise(preset(name), depth=1).multiply_adds


def test_arithmetic_with_attention_pooling() -> None:
    config = ViTConfig(**SMALL | {"pooling": "attention", "registers": 1})
    assert estimate.multiply_adds(config) == pytest.approx(summarise(config).multiply_adds, rel=0.02)


def test_memory_of_a_published_measurement() -> None:
    """timm 1.0.29's B/16, batch 256, bf16, AdamW, compiled, on one H200: 17.4 GiB were allocated."""
    plan = CostEstimate(config=preset("B/16"), gpus=1, batch_size=256, ema=False, gpu=GPUS["H200"])
    assert plan.memory("ddp").total / GIB == pytest.approx(17.4, rel=0.05)


def a_plan(**changes: Any) -> CostEstimate:
    return replace(CostEstimate(config=preset("H/14"), gpus=64, batch_size=4096, gpu=GPUS["H100"]), **changes)


def test_state_of_the_optimizers_is_what_they_hold() -> None:
    """Real optimizers after a real step, on a small model; averaged weights as large as the model."""
    from vitral.recipes.schema import OptimConfig
    from vitral.training.optim.build import make_optimizers

    config = ViTConfig(**SMALL)
    for name in ("adamw", "sgd", "muon"):
        model = ViT(config)
        optimizers = make_optimizers(model, OptimConfig(name=name))  # type: ignore[arg-type]
        model(torch.rand(2, 2, 28, 14)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        held = sum(
            value.nbytes
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim
        )
        plan = a_plan(config=config, optimizer=name)
        assert plan.memory("ddp").optimizer == held
        assert plan.memory("ddp").weights == sum(p.nbytes for p in model.parameters()) == plan.memory("ddp").ema
        assert plan.memory("fsdp").optimizer == held / 64


def test_fsdp_divides_what_ddp_repeats() -> None:
    whole, part = a_plan().memory("ddp"), a_plan().memory("fsdp")
    for name in ("weights", "gradients", "optimizer", "averaged"):
        assert getattr(part, name) == getattr(whole, name) / 64
    assert part.activations == whole.activations


def test_communication_is_that_of_the_rings() -> None:
    """All-reduce: 2(n-1)/n of the gradients. fsdp in fp32: gather twice but for the root, reduce-scatter once."""
    P = estimate.count_parameters(preset("H/14"))
    for n in (1, 2, 8, 64):
        plan = a_plan(gpus=n, precision="fp32")
        assert plan.communication("ddp").total == pytest.approx(2 * (n - 1) / n * 4 * P.total)
        sharded = plan.communication("fsdp")
        assert sharded.reduce_scatter == pytest.approx((n - 1) / n * 4 * P.total)
        assert sharded.all_gather == pytest.approx((n - 1) / n * 4 * (2 * P.total - P.outside_blocks))
    half = a_plan().communication("fsdp").all_gather
    assert half == pytest.approx(a_plan(precision="fp32").communication("fsdp").all_gather / 2)
    assert a_plan(accumulate=4).communication("fsdp").all_gather == pytest.approx(4 * half)
    assert a_plan(accumulate=4).communication("ddp") == a_plan().communication("ddp")
    muon = a_plan(optimizer="muon").communication("fsdp").all_gather
    assert muon - half == pytest.approx(63 / 64 * 4 * P.matrices)


def test_the_slowest_link_decides() -> None:
    assert a_plan(gpus=8).bandwidth == GPUS["H100"].link
    assert a_plan(gpus=16).bandwidth == 50e9
    assert a_plan(gpus=16).communication_seconds("ddp") == pytest.approx(
        a_plan(gpus=16).communication("ddp").total / 50e9
    )


def test_time_follows_from_the_arithmetic() -> None:
    plan = a_plan()
    flops = 6 * estimate.multiply_adds(plan.config) * 4096
    assert plan.compute_seconds() == pytest.approx(flops / (64 * 989e12 * 0.4))
    assert plan.compute_seconds(checkpointing=True) == pytest.approx(plan.compute_seconds() * 4 / 3)
    best, worst = plan.days(1e9, "ddp")
    assert best == pytest.approx(plan.step_seconds("ddp")[0] * 1e9 / 4096 / 86400)
    assert worst > best
    uneven = a_plan(gpus=3, batch=4)  # one GPU has two images, and the others wait for it
    assert uneven.compute_seconds() == pytest.approx(a_plan(gpus=1, batch=2).compute_seconds())


def test_what_fits_is_chosen_and_what_costs_least_first() -> None:
    def choice(**changes: Any) -> tuple[str, bool]:
        return a_plan(**changes).recommend()[:2]

    assert choice() == ("ddp", False)
    assert choice(gpu=replace(GPUS["H100"], memory=38 * GB)) == ("fsdp", False)
    assert choice(gpu=replace(GPUS["H100"], memory=24 * GB)) == ("ddp", True)
    assert choice(gpu=replace(GPUS["H100"], memory=12 * GB)) == ("fsdp", True)
    kind, recomputed, reason = a_plan(gpu=replace(GPUS["H100"], memory=3 * GB)).recommend()
    assert (kind, recomputed, reason) == ("fsdp", True, "it does not fit")
    assert a_plan(gpus=1, batch=8).recommend()[0] == "ddp"
    assert a_plan().recommend("fsdp")[0] == "fsdp"


@pytest.mark.parametrize("memory", [16, 24, 40, 80])
def test_the_smallest_number_fits_and_half_of_it_does_not(memory: int) -> None:
    plan = a_plan(gpu=replace(GPUS["H100"], memory=memory * GB))
    least = plan.min_gpus()
    assert least is not None
    gpus, kind, recomputed = least
    assert replace(plan, gpus=gpus).fits(kind, recomputed)
    if gpus > 1:
        half = replace(plan, gpus=gpus // 2)
        assert not any(half.fits(k, c) for k in ("ddp", "fsdp") for c in (False, True))  # type: ignore[arg-type]


def test_a_largest_share_fits_and_one_more_does_not() -> None:
    plan = a_plan(gpus=1, batch=1)
    room = plan.max_micro_batch("ddp", False)
    assert replace(plan, batch=room).fits("ddp")
    assert not replace(plan, batch=room + 1).fits("ddp")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    out = capsys.readouterr()
    return out.out if not stop.value.code else out.err


def test_the_command_says_it_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "H/14", "--gpus", "64", "--batch-size", "4096")
    for figure in ("632.0 M parameters", "all-reduce", "4.98", "Strategy   DDP", "with checkpointing"):
        assert figure in text
    found = json.loads(said(capsys, "H/14", "--gpus", "64", "--batch-size", "4096", "--json"))
    assert found["memory"]["ddp"]["total"] == a_plan().memory("ddp").total
    assert found["communication"]["fsdp"]["total"] == a_plan().communication("fsdp").total
    tight = said(capsys, "G/14", "--batch-size", "4096", "--image-size", "518")
    assert "does not fit" in tight
    assert "--grad-accum" in tight
    assert "Strategy   FSDP" in said(capsys, "G/14", "--batch-size", "64", "--gpu-memory", "24")


def test_the_command_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpus must be at least 1" in said(capsys, "B/16", "--gpus", "0")
    assert "Did you mean 'H100'" in said(capsys, "B/16", "--gpu", "h1")
    assert "mfu must be" in said(capsys, "B/16", "--mfu", "1.5")
    assert "missing argument PRESET" in said(capsys)
