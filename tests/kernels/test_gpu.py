"""Tests that need an NVIDIA GPU: captured training steps and fused kernels agree with eager PyTorch."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import textures
from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.datasets import Dataset
from vitral.data.image_ops import GEOMETRIC_OPS, OPS, apply_ops
from vitral.data.loader import Loader
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import resize_pixels
from vitral.device.select import Hardware, PrecisionOption, select_hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.errors import Interrupted, VitralError
from vitral.inference.cuda_cascade import build_fp8_cascade
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.engine import ReferenceEngine
from vitral.models.token_merging import TokenMergingViT
from vitral.models.variants import VARIANTS
from vitral.models.variants.hybrid import HybridViT
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run
from vitral.training.backend import make_backend
from vitral.training.callbacks import Callback
from vitral.training.optim.muon import Muon, fits_kernels
from vitral.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import triton

    from vitral.kernels import encoder_checks
    from vitral.kernels.augment.checks import OP_ARGS
    from vitral.kernels.augment.op import fused_apply_ops
    from vitral.kernels.block.op import MIN_BLOCK_TOKENS, MIN_EXPAND_TOKENS, expand_gelu_fp8
    from vitral.kernels.conv_stem.op import FusedConvStem
    from vitral.kernels.embed.op import make_inference_embedding, make_training_embedding
    from vitral.kernels.fp8.op import GemmBound, quantize_weight
    from vitral.kernels.layernorm_gelu.op import LayerNormParams, add_layernorm, bias_gelu
    from vitral.kernels.muon import op as muon_op
    from vitral.kernels.training import make_fused_stem, make_training_forward

TrainFn = Callable[..., Run]
ALL_FEATURES: dict[str, Any] = {
    "optim.name": "muon", "augment.shift": 1, "augment.flip": True, "augment.mixup": 0.4, "augment.cutmix": 1.0,
    "augment.erase": 0.3, "model.drop_path": 0.2, "model.qk_norm": True, "model.positions": "learned+rotary",
    "label_smoothing": 0.1, "ema": 0.3, "grad_accum": 2, "class_weights": "balanced", "epochs": 3,
}  # fmt: skip
OVERLAPPED_MUON = {"grad_accum": 1, "optim.grad_clip": 0.0}  # Muon starts during the backward pass


@pytest.fixture
def gpu() -> Hardware:
    hardware = select_hardware(device="gpu", precision="fp32", compile="auto", steps=10)
    assert hardware.cuda_graphs
    assert not hardware.compile
    return hardware


@pytest.fixture
def train(tmp_path: Path, dataset: Dataset, preprocessing: Preprocessing) -> TrainFn:
    """train(name, hardware, recipe): train in the run folder `name`, resuming what is there."""

    def train_run(name: str, hardware: Hardware, recipe: Recipe, *callbacks: Callback) -> Run:
        path = tmp_path / name
        run = Run(path) if path.exists() else Run.create(path.parent, path.name, path)
        Trainer(recipe, dataset, preprocessing, run, hardware, callbacks=callbacks).fit()
        return run

    return train_run


def losses(run: Run) -> list[float]:
    return [row[name] for row in run.load_metrics() for name in ("train_loss", "validation_loss")]


@pytest.mark.parametrize("overrides", [{"optim.name": "adamw"}, {"optim.name": "sgd"}, {}, OVERLAPPED_MUON], ids=str)
def test_captured_steps_train_like_eager_steps(
    gpu: Hardware, recipe: Recipe, train: TrainFn, overrides: dict[str, Any]
) -> None:
    recipe = recipe.with_overrides(ALL_FEATURES | overrides)
    eager = train("eager", replace(gpu, cuda_graphs=False), recipe)
    captured = train("captured", gpu, recipe)
    assert losses(captured) == pytest.approx(losses(eager), rel=2e-3)


def test_an_interrupted_captured_run_resumes_to_the_same_losses(gpu: Hardware, recipe: Recipe, train: TrainFn) -> None:
    class InterruptAfterFirstEpoch(Callback):
        def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
            if metrics["epoch"] == 1:
                signal.raise_signal(signal.SIGINT)

    recipe = recipe.with_overrides(ALL_FEATURES)
    uninterrupted = train("uninterrupted", gpu, recipe)
    with pytest.raises(Interrupted):
        train("resumed", gpu, recipe, InterruptAfterFirstEpoch())
    resumed = train("resumed", gpu, recipe)
    assert losses(resumed) == pytest.approx(losses(uninterrupted), rel=2e-3)
    assert load_weights(resumed.model_dir / "weights.safetensors").keys()


@pytest.mark.parametrize(
    "overrides",
    [
        {"augment.crop": 0.5},
        {"augment.rotate": 10.0, "augment.scale": 0.1},
        {"augment.policy.name": "randaugment"},
        {"augment.policy.name": "randaugment", "augment.policy.increasing": True, "augment.policy.magnitude_std": 0.5},
        {"augment.policy.name": "trivialaugment"},
        {"augment.jitter": 0.3},
        {"sampling": "balanced"},
        {"loss": "sigmoid"},
        {"activation_checkpointing": True},
        {"augment.repeat": 2},
    ],
    ids=str,
)
def test_every_augmentation_and_setting_can_be_captured(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, overrides: dict[str, Any]
) -> None:
    rgb = replace(dataset, train=textures(96, seed=1, channels=3), validation=textures(40, seed=2, channels=3))
    recipe = recipe.with_overrides({"model.channels": 3, "epochs": 2} | overrides)
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    run = Run.create(tmp_path, "run", tmp_path / "run")
    Trainer(recipe, rgb, preprocessing, run, gpu).fit()
    assert len(losses(run)) == 4


def test_bf16_losses_agree_with_fp32(gpu: Hardware, recipe: Recipe, train: TrainFn) -> None:
    fp32 = train("fp32", gpu, recipe)
    bf16 = train("bf16", replace(gpu, precision="bf16"), recipe)
    assert losses(bf16) == pytest.approx(losses(fp32), rel=0.1, abs=0.02)


@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
def test_a_diverged_captured_run_stops_and_names_the_step(
    gpu: Hardware, recipe: Recipe, train: TrainFn, on_nan: str
) -> None:
    recipe = recipe.with_overrides({"optim.lr": 1e12, "optim.grad_clip": 0.0, "on_nan": on_nan})
    with pytest.raises(VitralError, match="step"):
        train("run", gpu, recipe)


@pytest.mark.parametrize("overrides", [{}, {"repeat": 2}, {"sampling": "balanced"}], ids=str)
def test_prefetched_batches_equal_batches_from_gpu_memory(overrides: dict[str, Any], gpu: Hardware) -> None:
    images = torch.randint(0, 256, (500, 3, 40, 40), dtype=torch.uint8)
    settings: dict[str, Any] = {"labels": (torch.arange(500) % 7).to(gpu.device), "batch_size": 32, "seed": 0}
    on_host, on_gpu = (Loader(images=data, **settings | overrides) for data in (images, images.to(gpu.device)))
    load = torch.randn(4096, 4096, device=gpu.device)
    mismatches = torch.zeros((), device=gpu.device)
    for epoch in range(3):
        for (sent, labels), (resident, expected_labels) in zip(on_host.epoch(epoch), on_gpu.epoch(epoch), strict=True):
            for _ in range(10):  # keep the GPU behind the host, so that it would see a buffer that is reused too early
                load = load @ load * 1e-3
            mismatches += (sent != resident).any() | (labels != expected_labels).any()
    assert mismatches == 0


def test_training_from_host_memory_equals_training_from_gpu_memory(
    gpu: Hardware, recipe: Recipe, train: TrainFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = train("on_gpu", gpu, recipe)
    monkeypatch.setattr("vitral.data.loader.dataset_budget_bytes", lambda device: 0.0)
    on_host = train("on_host", gpu, recipe)
    assert losses(on_host) == pytest.approx(losses(on_gpu), rel=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"qk_norm": True, "positions": "learned+rotary", "pooling": "mean", "activation": "gelu_tanh"},
        {"image_size": (64, 64), "qk_norm": True, "positions": "rotary"},  # 257 tokens: PyTorch's attention
        {"image_size": (64, 64), "width": 192, "heads": 3, "registers": 4},
        {"width": 96, "heads": 4, "mlp_width": 208, "drop_path": 0.3},
        {"heads": 8, "qkv_bias": False},  # 65 tokens, head width 32
        {"heads": 8, "qk_norm": True, "positions": "learned+rotary"},
        {"image_size": (224, 224), "patch_size": 16, "width": 768, "heads": 12},  # 197 tokens, head width 64
        {"image_size": (224, 224), "patch_size": 16, "width": 384, "heads": 12, "qk_norm": True, "registers": 4},
        {"image_size": (64, 64), "pooling": "mean"},  # 256 tokens, head width 64
        {"image_size": (64, 64), "heads": 8, "pooling": "mean", "positions": "rotary", "qkv_bias": False},
        {"image_size": (64, 64), "layer_scale": 0.1, "registers": 4, "width": 768, "heads": 12},  # DINOv2
        {"layer_scale": 0.1, "positions": "rotary", "rope": "centered", "key_bias": False, "registers": 4},  # DINOv3
        {"activation": "quick_gelu", "pooling": "mean"},
        {"activation": "swiglu", "mlp_width": 688, "layer_scale": 0.1, "dropout": 0.1},
        {"dropout": 0.1, "layer_scale": 0.1, "width": 768, "heads": 12},
    ],
    ids=str,
)
def test_the_fused_encoder_agrees_with_the_reference(overrides: dict[str, Any], precision: PrecisionOption) -> None:
    hardware = select_hardware(device="gpu", precision=precision)
    sizes: dict[str, Any] = {
        "image_size": (32, 32),
        "patch_size": 4,
        "num_classes": 10,
        "width": 256,
        "depth": 3,
        "heads": 4,
    }
    torch.manual_seed(0)
    model = ViT(ViTConfig(**sizes | overrides)).to(hardware.device)
    assert encoder_checks.unsupported_reason(model, hardware) is None
    for batch_size in (16, 2**20):  # norms and GELU saved, and recomputed
        error = encoder_checks.encoder_error(model.eval(), hardware, training=True, batch_size=batch_size)
        assert error < (0.3 if hardware.fp8 else 0.05)
        if hardware.fp8:
            assert encoder_checks.fp8_wgrad_error(model.eval(), hardware, batch_size) < 0.1
    error = encoder_checks.encoder_error(model.bfloat16(), hardware, training=False)
    assert error < (0.2 if hardware.fp8 else 0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("image_size", "patch_size", "heads"), [(32, 4, 4), (32, 8, 4), (72, 4, 4), (32, 4, 2)]
)  # 65, 17 and 325 tokens, and head width 128: each implementation of attention
def test_the_cuda_engine_agrees_with_the_model_for_any_batch_size(
    image_size: int, patch_size: int, heads: int, precision: PrecisionOption
) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(image_size, image_size), patch_size=patch_size, num_classes=10, width=256, depth=3, heads=heads
    )
    model = ViT(config).eval()
    torch.nn.init.normal_(model.get_parameter("head.out.weight"), std=0.05)  # a new head is zero
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    images = torch.randint(0, 256, (300, 3, image_size, image_size), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(preprocessing.normalise(images))
    engine = CudaEngine(model, preprocessing, select_hardware(device="gpu", precision=precision))
    assert engine.description == "fused kernels"
    with torch.inference_mode():
        engine(images[:1])  # captures a graph that is replayed outside this mode
    for count in (300, 1, 33):
        error = (engine(images[:count]) - expected[:count]).norm() / expected[:count].norm()
        assert error < (0.2 if precision == "fp8" else 0.03)


def test_close_calls_of_fp8_are_computed_again_in_fp16(gpu: Hardware) -> None:
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 32), patch_size=4, num_classes=10, width=256, depth=3, heads=4)
    model = ViT(config).eval().to(gpu.device)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"), std=0.05)
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    images = torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8)
    fp32 = select_hardware(device="gpu", precision="fp32", compile="no")
    expected = ReferenceEngine(model, preprocessing, fp32)(images)
    cascade = build_fp8_cascade(model, preprocessing, fp32, margin=0.0)
    fast = cascade.fast(images)
    top = fast.topk(2).values
    cascade.margin = float((top[:, 0] - top[:, 1]).quantile(0.3))
    again = cascade.is_ambiguous(fast)
    assert 80 <= int(again.sum()) <= 95
    actual = cascade(images)
    assert (actual[again] - expected[again]).norm() < 5e-3 * expected[again].norm()
    assert (actual[~again] - fast[~again]).norm() < 1e-2 * fast.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_token_merging_on_the_gpu_agrees_with_the_reference(pooling: Any, precision: PrecisionOption) -> None:
    """Rounding changes which tokens are merged, so that the tolerance is wider than without merging."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 32), patch_size=4, num_classes=10, width=256, depth=4, heads=4, pooling=pooling)
    model = ViT(config).eval()
    torch.nn.init.normal_(model.get_parameter("head.out.weight"), std=0.05)
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    images = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    merging = TokenMergingViT.from_model(model, r=4)
    with torch.inference_mode():
        expected = merging(preprocessing.normalise(images))
    engine = CudaEngine(merging, preprocessing, select_hardware(device="gpu", precision=precision))
    assert engine.description == "fused kernels"
    for count in (40, 1):
        error = (engine(images[:count]) - expected[:count]).norm() / expected[:count].norm()
        assert error < (0.4 if precision == "fp8" else 0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("pooling", "width", "patch_size", "dropout"),
    [
        ("class", 192, 4, 0.0),
        ("mean", 192, 8, 0.0),
        ("class", 512, 8, 0.0),
        ("mean", 512, 4, 0.0),
        ("mean", 512, 4, 0.1),
    ],
)
def test_a_training_step_compiles_nothing_after_the_self_checks(
    pooling: Any,
    width: int,
    patch_size: int,
    dropout: float,
    precision: PrecisionOption,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = select_hardware(device="gpu", precision=precision)
    sizes: dict[str, Any] = {"width": width, "depth": 3, "heads": width // 64, "drop_path": 0.1, "pooling": pooling}
    sizes |= {"dropout": dropout, "layer_scale": 0.1 if dropout else None}
    config = ViTConfig(image_size=(32, 32), patch_size=patch_size, num_classes=10, **sizes)
    model = ViT(config).to(hardware.device).train()
    assert encoder_checks.unsupported_reason(model, hardware, batch_size=48) is None
    messages, compiled = list[str](), list[str]()
    forward = make_training_forward(model, hardware, messages.append, batch_size=48)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **kwargs: compiled.append(kwargs["src"].name))
    forward(torch.zeros(48, 3, 32, 32, device=hardware.device)).sum().backward()
    assert (messages, compiled) == ([], [])


@pytest.mark.parametrize("recompute_threshold", [0, 2**25])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_training_agrees_with_the_reference(
    recipe: Recipe,
    train: TrainFn,
    precision: PrecisionOption,
    recompute_threshold: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitral.kernels.encoder.RECOMPUTE_THRESHOLD", recompute_threshold)
    monkeypatch.setattr("vitral.kernels.block.op.MIN_BLOCK_TOKENS", 1)
    recipe = recipe.with_overrides({"model.width": 64, "model.heads": 2, "model.mlp_width": 128, "epochs": 3})
    hardware = select_hardware(device="gpu", precision=precision, steps=10)
    fused = train("fused", hardware, recipe)
    reference = train("reference", replace(hardware, use_triton=False, fp8=False), recipe)
    assert losses(fused) == pytest.approx(losses(reference), rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"activation_checkpointing": True, "model.drop_path": 0.2},
        {"model.layer_scale": 0.1, "optim.layer_decay": 0.75, "ema": 0.3, "optim.grad_clip": 0.5},
        {"tune": "lora", "lora.rank": 4, "optim.lr": 0.01},
        {"tune": "last-1", "batch_size": 31},
        {"model.dropout": 0.05, "model.dropout_attention": 0.05, "model.dropout_embedding": 0.05},
    ],
    ids=str,
)
def test_fused_fine_tuning_agrees_with_the_reference(
    recipe: Recipe, train: TrainFn, precision: PrecisionOption, overrides: dict[str, Any]
) -> None:
    recipe = recipe.with_overrides({"model.width": 64, "model.heads": 2, "model.mlp_width": 128, "epochs": 3})
    recipe = recipe.with_overrides(overrides)
    hardware = select_hardware(device="gpu", precision=precision, steps=10)
    fused = train("fused", hardware, recipe)
    reference = train("reference", replace(hardware, use_triton=False, fp8=False), recipe)
    rel = 0.2 if "model.dropout" in overrides else 0.1
    assert losses(fused) == pytest.approx(losses(reference), rel=rel, abs=0.01)  # losses end near 0


@pytest.mark.parametrize("name", ["cifar10-94", "fashion-mnist-94"])
def test_the_fused_stem_agrees_with_the_reference(gpu: Hardware, name: str) -> None:
    torch.manual_seed(0)
    model = HybridViT(get_recipe(name).model).to(gpu.device)
    messages: list[str] = []
    assert make_fused_stem(model, gpu, messages.append) is not None, messages
    images = torch.randn(8, model.config.channels, *model.config.image_size, device=gpu.device)
    stem: Any = model.patch_embedding.stem
    with torch.no_grad():
        expected, out = stem(images), FusedConvStem(stem)(images)
    assert (out.float() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["cifar10-94", "fashion-mnist-94"])
def test_the_triton_backend_uses_every_kernel(gpu: Hardware, name: str, precision: Literal["fp32", "bf16"]) -> None:
    """Its self-checks compare each kernel with the reference and log the ones that are dropped."""
    recipe = get_recipe(name)
    C = recipe.model.channels
    preprocessing = Preprocessing(image_size=recipe.model.image_size, channels=C, mean=(0.45,) * C, std=(0.25,) * C)
    model = VARIANTS[recipe.variant](recipe.model).to(gpu.device)
    hardware = replace(gpu, use_triton=True, precision=precision)
    single = ParallelPlan(mode="single", reason="one process")
    messages: list[str] = []
    make_backend(model, recipe, preprocessing, hardware, single, micro_batch_size=256, log=messages.append)
    assert messages == []


@pytest.mark.parametrize(("width", "heads", "patch_size"), [(192, 3, 16), (256, 4, 8), (384, 6, 16)])
def test_fused_embedding_and_blocks_pass_their_self_checks(width: int, heads: int, patch_size: int) -> None:
    hardware, messages = select_hardware(device="gpu", precision="bf16", steps=10), list[str]()
    config = ViTConfig(image_size=(64, 96), patch_size=patch_size, num_classes=10, width=width, depth=3, heads=heads)
    model = ViT(config).to(hardware.device)
    assert make_training_embedding(model, hardware, messages.append) is not None, messages
    minimum = encoder_checks.fused_block_min_tokens(model, hardware, training=True, batch_size=2**14)
    assert minimum == (MIN_BLOCK_TOKENS if width <= 192 else None)
    preprocessing = Preprocessing(image_size=(64, 96), channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    model = model.bfloat16().eval().requires_grad_(False)

    def normalise(images: Tensor) -> Tensor:
        return preprocessing.normalise(images).bfloat16()

    assert make_inference_embedding(model, preprocessing, hardware, normalise) is not None
    minimum = encoder_checks.fused_block_min_tokens(model, hardware)
    assert minimum == (MIN_BLOCK_TOKENS if width <= 256 else None)


@pytest.mark.parametrize(("width", "activation"), [(192, "gelu"), (256, "gelu_tanh"), (384, "gelu")])
def test_fp8_expansion_with_gelu_agrees_with_fp32(width: int, activation: Literal["gelu", "gelu_tanh"]) -> None:
    """The self-check compares it with the unfused FP8 kernels; this test with fp32 on the same operands."""
    hardware = select_hardware(device="gpu", precision="fp8")
    config = ViTConfig(
        image_size=(64, 96),
        patch_size=16,
        num_classes=10,
        width=width,
        depth=3,
        heads=width // 64,
        activation=activation,
    )
    model = ViT(config).to(hardware.device).bfloat16().eval().requires_grad_(False)
    assert encoder_checks.fused_block_min_tokens(model, hardware) == MIN_EXPAND_TOKENS
    M, H = 1000, 4 * width
    x, weight = torch.randn(M, width, device=hardware.device), torch.randn(H, width, device=hardware.device) * 0.05
    bias, ones = torch.randn(H, device=hardware.device), torch.ones(width, device=hardware.device)
    norm = LayerNormParams(ones, 0 * ones, 1e-6)
    x_fp8 = add_layernorm(x.bfloat16(), None, None, None, norm, fp8=True, store_normed=False).normed_fp8
    weight_fp8 = quantize_weight(weight, bias, torch.zeros(2, device=hardware.device))
    assert x_fp8 is not None
    product = (x_fp8.data.float() * x_fp8.scales) @ (weight_fp8.data.float() * weight_fp8.scales).t()
    expected = F.gelu(product + bias, approximate="tanh" if activation == "gelu_tanh" else "none")
    fused = expand_gelu_fp8(x_fp8, weight_fp8, bias, activation)
    unfused = bias_gelu(product.bfloat16(), bias, activation, GemmBound(x_fp8.row_norms, weight_fp8.bound))[1]
    for out, equal_share in ((fused, 0.94), (unfused, 0.9)):  # the unfused product is rounded to bf16
        assert out is not None
        rounded = (expected / out.scales).to(torch.float8_e4m3fn)
        assert (out.data.view(torch.uint8) == rounded.view(torch.uint8)).float().mean() > equal_share
        error = out.data.float() * out.scales - expected
        assert error.norm() < 0.03 * expected.norm()
        assert error.mean().abs() < 1e-3


@pytest.mark.parametrize("image_size", [32, 64, 224])
@pytest.mark.parametrize("channels", [1, 3])
def test_fused_augmentation_operations_agree_with_pytorch(gpu: Hardware, image_size: int, channels: int) -> None:
    rng = torch.Generator(gpu.device).manual_seed(1)
    shape = (4, channels, image_size, image_size)
    images = torch.randint(0, 256, shape, generator=rng, device=gpu.device, dtype=torch.uint8)
    images[1] //= 3
    images[2] = 77
    centers = torch.rand(2, 4, generator=rng, device=gpu.device)
    for index, (name, value) in enumerate(zip(OPS, OP_ARGS, strict=True)):
        ops, args = (torch.full((4,), x, device=gpu.device) for x in (index, float(value)))
        fused, expected = fused_apply_ops(images, ops, args, centers), apply_ops(images, ops, args, centers)
        difference = (fused.int() - expected.int()).abs()
        assert difference.max() <= (1 if name in GEOMETRIC_OPS else 0), name
        assert (difference > 0).float().mean() < 0.02, name


@pytest.mark.parametrize(
    "policy",
    [
        AutoAugmentPolicy(name="randaugment", magnitude=9, magnitude_std=0.5, increasing=True),
        AutoAugmentPolicy(name="trivialaugment"),
    ],
    ids=str,
)
def test_training_with_fused_colour_augmentation_agrees_with_the_reference(
    policy: AutoAugmentPolicy, recipe: Recipe, train: TrainFn
) -> None:
    hardware = select_hardware(device="gpu", precision="bf16", steps=10)
    augment = AugmentConfig(shift=1, flip=True, cutmix=1.0, jitter=0.2, policy=policy)
    recipe = recipe.with_overrides({"model.width": 64, "model.heads": 2, "model.mlp_width": 128})
    recipe = replace(recipe, augment=augment)
    fused = train("fused", hardware, recipe)
    reference = train("reference", replace(hardware, use_triton=False), recipe)
    assert losses(fused) == pytest.approx(losses(reference), rel=0.1)


def flat_weights(optimizer: Muon) -> Tensor:
    return torch.cat([weight.flatten() for group in optimizer.param_groups for weight in group["params"]])


def flat_momentum(optimizer: Muon) -> Tensor:
    return torch.cat([state["momentum"].flatten() for state in optimizer.state.values()])


def test_fused_muon_agrees_with_the_reference_eagerly_and_captured(gpu: Hardware) -> None:
    shapes = [[(288, 96), (576, 192)], [(96, 96), (200, 96), (96, 200), (33, 65)], [(96, 200), (65, 33), (192, 192)]]
    rng = torch.Generator(gpu.device).manual_seed(0)
    initial = [[torch.randn(shape, device=gpu.device, generator=rng) for shape in group] for group in shapes]
    gradients = [[[torch.randn_like(weight) for weight in group] for group in initial] for _ in range(5)]

    def make_muon(fused: bool) -> Muon:
        groups: list[dict[str, Any]] = [{"params": [weight.clone() for weight in group]} for group in initial]
        for group, num_matrices in zip(groups, (3, 1, 1), strict=True):
            group |= {"num_matrices": num_matrices, "lr": torch.zeros((), device=gpu.device)}
        optimizer = Muon(groups, lr=0.0, weight_decay=0.1)
        optimizer.found_inf = torch.zeros((), device=gpu.device)
        optimizer.kernels = muon_op if fused else None
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        return optimizer

    def set_gradients(optimizer: Muon, step: int) -> None:
        for group, group_gradients in zip(optimizer.param_groups, gradients[step], strict=True):
            group["lr"].fill_(0.01 * (step + 1))
            for weight, gradient in zip(group["params"], group_gradients, strict=True):
                weight.grad.copy_(gradient)

    reference, eager, captured = make_muon(fused=False), make_muon(fused=True), make_muon(fused=True)
    assert fits_kernels(eager.active_groups(), eager.found_inf)
    before, graph = flat_weights(reference), torch.cuda.CUDAGraph()
    for step in range(5):
        for optimizer in (reference, eager, captured):
            set_gradients(optimizer, step)
        reference.step()
        eager.step()
        if step == 2:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured.step()
        if step >= 2:
            graph.replay()
        else:
            captured.step()
    change = (flat_weights(reference) - before).norm()
    assert (flat_weights(eager) - flat_weights(reference)).norm() < 0.03 * change  # bf16 rounding
    assert (flat_weights(captured) - flat_weights(eager)).norm() < 1e-3 * change
    torch.testing.assert_close(flat_momentum(eager), flat_momentum(reference), rtol=1e-5, atol=1e-6)
    assert captured.found_inf is not None
    captured.found_inf.fill_(1)
    for group in captured.param_groups:
        group["params"][0].grad[0, -1] = torch.nan
    before_nan = flat_weights(captured)
    graph.replay()
    assert torch.equal(flat_weights(captured), before_nan), "a step with non-finite gradients changed the weights"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_pixels_are_resized_on_the_gpu_as_on_the_cpu(dtype: torch.dtype) -> None:
    """PyTorch resizes no integers on a GPU."""
    pixels = (torch.rand(2, 3, 40, 50, generator=torch.Generator().manual_seed(0)) * 255).to(dtype)
    expected = resize_pixels(pixels, (24, 32), "bilinear").float()
    actual = resize_pixels(pixels.cuda(), (24, 32), "bilinear").float().cpu()
    assert (actual - expected).abs().max() <= 1  # rounding
