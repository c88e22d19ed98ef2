"""Cost estimates against what PyTorch saves, the parameters of real models, and closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitral.analysis import cost
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
    "num_classes": 10,
    "width": 48,
    "depth": 3,
    "heads": 4,
    "mlp_width": 112,
}


def saved_bytes(config: ViTConfig, bf16: bool) -> int:
    """Bytes that autograd saves in a real forward pass, without weights and their bf16 copies."""
    model = ViT(config)
    by_storage: dict[int, int] = {}
    shapes = {(p.shape[::-1]) for p in model.parameters() if p.ndim == 2}  # autocast saves transposed copies

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_copy = tensor.dtype == torch.bfloat16 and tensor.shape in shapes and tensor.numel() == storage.nbytes() // 2
        if not is_copy:
            by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.rand(B, config.channels, *config.image_size)
    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(images)
    for parameter in model.parameters():
        by_storage.pop(parameter.untyped_storage().data_ptr(), None)
    assert logits.requires_grad
    return sum(by_storage.values())


def not_saved_by_model(config: ViTConfig) -> int:
    """Bytes that the estimate includes and the model's forward pass does not save: the image and the loss."""
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
        {"activation": "swiglu", "positions": "rotary", "rope": "centered", "key_bias": False, "registers": 2},
        {"activation": "quick_gelu", "pre_norm": True},
    ],
    ids=str,
)
def test_activation_bytes_equal_what_autograd_saves(extra: dict[str, Any], bf16: bool) -> None:
    config = ViTConfig(**SMALL | extra)
    expected = B * (cost.activation_bytes(config, "bf16" if bf16 else "fp32", "cpu").total - not_saved_by_model(config))
    assert expected == pytest.approx(saved_bytes(config, bf16), rel=0.005)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([16, 48, 96]),
    heads=st.sampled_from([1, 2, 4]),
    depth=st.integers(1, 4),
    hidden=st.integers(1, 200),
    pooling=st.sampled_from(["class", "mean"]),
)
def test_activation_bytes_any_size(rows: int, width: int, heads: int, depth: int, hidden: int, pooling: Any) -> None:
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
    expected = B * (cost.activation_bytes(config, "fp32", "cpu").total - not_saved_by_model(config))
    assert expected == pytest.approx(saved_bytes(config, bf16=False), rel=0.005)


def test_activation_bytes_with_checkpointing_equal_what_autograd_saves() -> None:
    """Every block through torch.utils.checkpoint; the estimate adds the block that is being recomputed."""
    from torch.utils.checkpoint import checkpoint

    config = ViTConfig(**SMALL)
    model = ViT(config)
    for block in model.encoder.blocks:
        forward = block.forward
        block.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)
    by_storage: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(torch.rand(B, config.channels, *config.image_size))
    for parameter in model.parameters():
        by_storage.pop(parameter.untyped_storage().data_ptr(), None)
    estimated = cost.activation_bytes(config, "fp32", "cpu")
    recomputed = estimated.block - estimated.block_input
    without_a_block = estimated.total_with_checkpointing - recomputed - not_saved_by_model(config)
    assert sum(by_storage.values()) == pytest.approx(B * without_a_block, rel=0.005)
    assert estimated.total_with_checkpointing < estimated.total


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_equals_the_real_model(name: str) -> None:
    with torch.device("meta"):
        model = ViT(preset(name))
    count = cost.count_parameters(preset(name))
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.matrices == sum(p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2)


@pytest.mark.parametrize("name", ["Ti/16", pytest.param("plain-S/16", marks=pytest.mark.slow)])
def test_multiply_adds_equal_the_count_of_pytorch(name: str) -> None:
    assert cost.multiply_adds(preset(name)) == summarise(preset(name), depth=1).multiply_adds


def test_multiply_adds_of_swiglu_equal_the_count_of_pytorch() -> None:
    config = ViTConfig(**SMALL | {"activation": "swiglu", "positions": "rotary", "rope": "centered", "registers": 4})
    assert cost.multiply_adds(config) == summarise(config, depth=1).multiply_adds


def test_multiply_adds_with_attention_pooling() -> None:
    config = ViTConfig(**SMALL | {"pooling": "attention", "registers": 1})
    assert cost.multiply_adds(config) == pytest.approx(summarise(config).multiply_adds, rel=0.02)


def test_memory_matches_a_measurement() -> None:
    """timm 1.0.29 B/16, batch size 256, bf16, AdamW, compiled, on one H200: 17.4 GiB allocated."""
    training = CostEstimate(config=preset("B/16"), gpus=1, batch_size=256, ema=False, gpu=GPUS["H200"])
    assert training.memory("ddp").total / GIB == pytest.approx(17.4, rel=0.05)


def make_estimate(**changes: Any) -> CostEstimate:
    return replace(CostEstimate(config=preset("H/14"), gpus=64, batch_size=4096, gpu=GPUS["H100"]), **changes)


def test_optimizer_state_size_equals_real_optimizers() -> None:
    """Real optimizers after one step of a small model."""
    from vitral.recipes.schema import OptimConfig
    from vitral.training.optim.builder import make_optimizers

    config = ViTConfig(**SMALL)
    for name in ("adamw", "sgd", "muon"):
        model = ViT(config)
        optimizers = make_optimizers(model, OptimConfig(name=name))
        model(torch.rand(2, 2, 28, 14)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        state_bytes = sum(
            value.nbytes
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim
        )
        training = make_estimate(config=config, optimizer=name)
        assert training.memory("ddp").optimizer == state_bytes
        assert training.memory("ddp").weights == sum(p.nbytes for p in model.parameters()) == training.memory("ddp").ema
        assert training.memory("fsdp").optimizer == state_bytes / 64


def test_fsdp_shards_what_ddp_replicates() -> None:
    replicated, sharded = make_estimate().memory("ddp"), make_estimate().memory("fsdp")
    for name in ("weights", "gradients", "optimizer", "ema"):
        assert getattr(sharded, name) == getattr(replicated, name) / 64
    assert sharded.activations == replicated.activations


def test_communication_volume_of_ring_algorithms() -> None:
    """All-reduce: 2(n-1)/n of the gradients. FSDP: blocks are gathered twice, the rest once; one reduce-scatter."""
    P = cost.count_parameters(preset("H/14"))
    for n in (1, 2, 8, 64):
        training = make_estimate(gpus=n, precision="fp32")
        assert training.communication("ddp").total == pytest.approx(2 * (n - 1) / n * 4 * P.total)
        sharded = training.communication("fsdp")
        assert sharded.reduce_scatter == pytest.approx((n - 1) / n * 4 * P.total)
        assert sharded.all_gather == pytest.approx((n - 1) / n * 4 * (2 * P.total - P.outside_blocks))
    bf16 = make_estimate().communication("fsdp").all_gather
    assert bf16 == pytest.approx(make_estimate(precision="fp32").communication("fsdp").all_gather / 2)
    assert make_estimate(grad_accum=4).communication("fsdp").all_gather == pytest.approx(4 * bf16)
    assert make_estimate(grad_accum=4).communication("ddp") == make_estimate().communication("ddp")
    muon = make_estimate(optimizer="muon").communication("fsdp").all_gather
    assert muon - bf16 == pytest.approx(63 / 64 * 4 * P.matrices)


def test_bandwidth_is_that_of_the_slowest_link() -> None:
    assert make_estimate(gpus=8).bandwidth == GPUS["H100"].link
    assert make_estimate(gpus=16).bandwidth == 50e9
    assert make_estimate(gpus=16).communication_seconds("ddp") == pytest.approx(
        make_estimate(gpus=16).communication("ddp").total / 50e9
    )


def test_compute_time_follows_from_flops_and_mfu() -> None:
    training = make_estimate()
    flops = 6 * cost.multiply_adds(training.config) * 4096
    assert training.compute_seconds() == pytest.approx(flops / (64 * 989e12 * 0.4))
    assert training.compute_seconds(checkpointing=True) == pytest.approx(training.compute_seconds() * 4 / 3)
    best, worst = training.days(1e9, "ddp")
    assert best == pytest.approx(training.step_seconds("ddp")[0] * 1e9 / 4096 / 86400)
    assert worst > best
    uneven = make_estimate(gpus=3, batch_size=4)  # the other GPUs wait for the one with two images
    assert uneven.compute_seconds() == pytest.approx(make_estimate(gpus=1, batch_size=2).compute_seconds())


def test_recommendation_is_the_cheapest_that_fits() -> None:
    def recommend(**changes: Any) -> tuple[str, bool]:
        return make_estimate(**changes).recommend()[:2]

    assert recommend() == ("ddp", False)
    assert recommend(gpu=replace(GPUS["H100"], memory=38 * GB)) == ("fsdp", False)
    assert recommend(gpu=replace(GPUS["H100"], memory=24 * GB)) == ("ddp", True)
    assert recommend(gpu=replace(GPUS["H100"], memory=12 * GB)) == ("fsdp", True)
    strategy, checkpointing, reason = make_estimate(gpu=replace(GPUS["H100"], memory=3 * GB)).recommend()
    assert (strategy, checkpointing, reason) == ("fsdp", True, "does not fit")
    assert make_estimate(gpus=1, batch_size=8).recommend()[0] == "ddp"
    assert make_estimate().recommend("fsdp")[0] == "fsdp"


@pytest.mark.parametrize("memory", [16, 24, 40, 80])
def test_min_gpus_fit_and_half_of_them_do_not(memory: int) -> None:
    training = make_estimate(gpu=replace(GPUS["H100"], memory=memory * GB))
    min_gpus = training.min_gpus()
    assert min_gpus is not None
    gpus, strategy, checkpointing = min_gpus
    assert replace(training, gpus=gpus).fits(strategy, checkpointing)
    if gpus > 1:
        half = replace(training, gpus=gpus // 2)
        assert not any(half.fits(k, c) for k in ("ddp", "fsdp") for c in (False, True))


def test_max_micro_batch_fits_and_one_more_image_does_not() -> None:
    training = make_estimate(gpus=1, batch_size=1)
    capacity = training.max_micro_batch("ddp", False)
    assert replace(training, batch_size=capacity).fits("ddp")
    assert not replace(training, batch_size=capacity + 1).fits("ddp")


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    out = capsys.readouterr()
    return out.out if not stop.value.code else out.err


def test_plan_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_plan(capsys, "H/14", "--gpus", "64", "--batch-size", "4096")
    for figure in ("632.0 M parameters", "all-reduce", "4.98", "Strategy   DDP", "with checkpointing"):
        assert figure in text
    content = json.loads(run_plan(capsys, "H/14", "--gpus", "64", "--batch-size", "4096", "--json"))
    assert content["memory"]["ddp"]["total"] == make_estimate().memory("ddp").total
    assert content["communication"]["fsdp"]["total"] == make_estimate().communication("fsdp").total
    tight = run_plan(capsys, "G/14", "--batch-size", "4096", "--image-size", "518")
    assert "does not fit" in tight
    assert "--grad-accum" in tight
    assert "Strategy   FSDP" in run_plan(capsys, "G/14", "--batch-size", "64", "--gpu-memory", "24")


def test_plan_command_refuses_invalid_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpus must be at least 1" in run_plan(capsys, "B/16", "--gpus", "0")
    assert "Did you mean 'H100'" in run_plan(capsys, "B/16", "--gpu", "h10")
    assert "mfu must be" in run_plan(capsys, "B/16", "--mfu", "1.5")
    assert "missing argument PRESET" in run_plan(capsys)
