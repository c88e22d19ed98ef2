"""Self-checks decide which fused kernels a model uses. In Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.triton_interpreter import (
    break_kernel,
    emulate_fp8_gemms,
    fake_gpu,
    requires_interpreter,
    small_model,
    spy_on,
)
from vitral.kernels import encoder_checks
from vitral.kernels.block.op import MIN_BLOCK_TOKENS, MIN_EXPAND_TOKENS
from vitral.kernels.encoder import RECOMPUTE_THRESHOLD, FusedEncoder
from vitral.kernels.encoder_checks import fused_block_min_tokens, unsupported_reason, use_fp8_wgrad
from vitral.kernels.precompile import dry_run_active, precompile
from vitral.models.vit import ViT, ViTConfig
from vitral.utils.progress import no_log

pytestmark = [requires_interpreter, pytest.mark.slow]
GPU = fake_gpu(precision="fp32")
SUPPORT = Path(__file__).parents[1] / "support"


def fail(*args: Any, **kwargs: Any) -> None:
    raise KeyError("out of shared memory")


def test_a_supported_model_has_no_reason_and_is_left_unchanged() -> None:
    model, rng_state = small_model(8, drop_path=0.5, depth=2)[0].train(), torch.get_rng_state()
    assert unsupported_reason(model, fake_gpu()) is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert unsupported_reason(model.eval(), fake_gpu(), training=False) is None


def test_an_unsupported_architecture_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = spy_on(monkeypatch, "layernorm_gelu", "add_layernorm_kernel")
    reason = unsupported_reason(small_model(16, activation="relu")[0], fake_gpu())
    assert reason == "the activation relu is not supported"
    assert (kernel.variants, kernel.launches) == (0, 0)


def test_a_kernel_with_wrong_results_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(8)[0]
    break_kernel(monkeypatch, "layernorm_gelu", "bias_gelu_backward_kernel", lambda *args, **kwargs: args[4].zero_())
    assert "differs by" in str(unsupported_reason(model, GPU))
    assert unsupported_reason(model, GPU, training=False) is None


def test_a_kernel_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(16)[0].train()
    break_kernel(monkeypatch, "layernorm_gelu", "bias_gelu_kernel", fail)
    assert "out of shared memory" in str(unsupported_reason(model, GPU))
    assert model.training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_dry_run_requests_kernels_without_launching_them(
    training: bool, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(16, depth=2, pooling=pooling, drop_path=0.5)[0]
    forward = [
        ("layernorm_gelu", "add_layernorm"),
        ("layernorm_gelu", "bias_gelu"),
        ("short_attention", "short_attention"),
    ]
    backward = [(package, f"{name}_backward") for package, name in forward]
    backward += [("qk_norm_rope", "qk_norm_rope_backward"), ("reduce", "column_sums")]
    names = forward + backward * training
    kernels = {name: spy_on(monkeypatch, package, f"{name}_kernel", run=False) for package, name in names}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    precompile(lambda: encoder_checks.run_dry(model, fake_gpu(), training, batch_size=40))
    assert all(kernel.variants and not kernel.launches for kernel in kernels.values())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        FusedEncoder(model.encoder)(torch.zeros(1, 17, 48), (4, 4))
    assert kernels["add_layernorm"].launches == 5, "launches after the dry run are real"


def test_an_error_in_a_dry_run_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_dry_run(model: ViT, *args: object) -> None:
        model.eval()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(encoder_checks, "run_dry", broken_dry_run)
    model = small_model(8)[0].train()
    assert unsupported_reason(model, fake_gpu(), batch_size=64) is None
    assert model.training
    assert not dry_run_active.get()


@pytest.mark.parametrize("batch_size", [16, 963, 964, 2**20])  # 963·17·2048 is just below the threshold 2**25
def test_the_checked_encoder_saves_the_same_activations_as_the_whole_batch(batch_size: int) -> None:
    model = small_model(16, mlp_width=2048)[0]
    num_images = encoder_checks.check_batch_size(model)
    encoder = encoder_checks.make_check_encoder(model, fake_gpu(), num_images, batch_size)
    assert (encoder.recompute_threshold >= num_images * 17 * 2048) == (batch_size <= 963)


def test_fp8_weight_gradients_are_for_wide_models_and_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms, messages = emulate_fp8_gemms(monkeypatch), list[str]()
    model = small_model(8)[0]
    gpu = fake_gpu(precision="fp32", fp8=True)
    assert not use_fp8_wgrad(model, gpu, 16, messages.append), "the model is too narrow"
    assert (gemms, messages) == ([], [])
    monkeypatch.setattr(encoder_checks, "FP8_WGRAD_MIN_WIDTH", 48)
    assert use_fp8_wgrad(model, gpu, 9, messages.append)
    assert messages == []
    assert model.training


def test_faulty_fp8_weight_gradients_fall_back_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_fp8_gemms(monkeypatch)
    monkeypatch.setattr(encoder_checks, "FP8_WGRAD_MIN_WIDTH", 48)
    break_kernel(monkeypatch, "fp8_wgrad", "layernorm_transposed_kernel", lambda *args, **kwargs: args[6].zero_())
    messages: list[str] = []
    assert not use_fp8_wgrad(small_model(8)[0], fake_gpu(precision="fp32", fp8=True), 16, messages.append)
    assert messages[0].startswith("weight-gradient GEMMs in bf16: the kernel's result differs by 100%")


def block_model(**overrides: Any) -> ViT:
    settings: dict[str, Any] = {"image_size": (32, 48), "patch_size": 8, "num_classes": 3, "depth": 2, "heads": 2}
    return ViT(ViTConfig(**settings | {"width": 64} | overrides))


@pytest.fixture
def checks_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check's comparison itself is tested elsewhere; here only when it is made."""
    monkeypatch.setattr(encoder_checks, "run_self_check", lambda *args: None)


@pytest.mark.usefixtures("checks_pass")
def test_fused_blocks_in_training_need_a_narrow_model_that_saves_little() -> None:
    model = block_model()
    largest_saved = RECOMPUTE_THRESHOLD // (25 * model.config.hidden_width)
    assert fused_block_min_tokens(model, GPU, training=True, batch_size=largest_saved + 1) == MIN_BLOCK_TOKENS
    assert fused_block_min_tokens(model, GPU, training=True, batch_size=largest_saved) is None, "norms are saved"
    dropping = block_model(drop_path=0.1)
    assert fused_block_min_tokens(dropping, GPU, training=True, batch_size=2**25) is None
    assert fused_block_min_tokens(dropping, GPU) == MIN_BLOCK_TOKENS, "inference drops nothing"
    wide = block_model(width=256, heads=4)
    assert fused_block_min_tokens(wide, GPU) == MIN_BLOCK_TOKENS
    assert fused_block_min_tokens(wide, GPU, training=True, batch_size=2**25) is None, "not enough registers"


@pytest.mark.usefixtures("checks_pass")
def test_fused_expansion_is_for_fp8_inference_of_narrow_models() -> None:
    fp8 = fake_gpu(fp8=True)
    model = block_model(width=384, heads=6)
    assert fused_block_min_tokens(model, fp8) == MIN_EXPAND_TOKENS
    assert fused_block_min_tokens(model, fp8, training=True, batch_size=2**25) is None
    assert fused_block_min_tokens(model, GPU) is None, "too wide for a whole block"
    assert fused_block_min_tokens(block_model(width=512, heads=8), fp8) is None
    one_block = block_model(width=384, heads=6, depth=1)
    assert fused_block_min_tokens(one_block, fp8) is None, "its only block expands class tokens alone"


@pytest.mark.parametrize("fault", ["none", "fails", "differs"])
def test_a_faulty_post_attention_kernel_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault != "none":
        launch = fail if fault == "fails" else lambda *args, **kwargs: args[2].zero_()
        break_kernel(monkeypatch, "block", "post_attention_kernel", launch)
    messages: list[str] = []
    minimum = fused_block_min_tokens(block_model().requires_grad_(False), GPU, log=messages.append)
    assert minimum == (MIN_BLOCK_TOKENS if fault == "none" else None)
    assert [message.partition(":")[0] for message in messages] == ["blocks without their fused kernel"] * (
        fault != "none"
    )


@pytest.mark.parametrize("scale_error", [1.0, 1.1])
def test_the_fused_expansion_is_compared_with_gemm_and_gelu(
    scale_error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitral.kernels.block import kernel as block_kernel

    emulate_fp8_gemms(monkeypatch)
    real_kernel, gpu = block_kernel.expand_gelu_fp8_kernel, fake_gpu(precision="fp32", fp8=True)

    def with_wrong_scales(*args: Any, **kwargs: Any) -> None:
        real_kernel[(kwargs["COL_SPLITS"] * -(-args[9] // kwargs["BLOCK_ROWS"]),)](*args, **kwargs)
        args[8].mul_(scale_error)

    break_kernel(monkeypatch, "block", "expand_gelu_fp8_kernel", with_wrong_scales)
    model = block_model(mlp_width=128, image_size=(16, 16))
    error = encoder_checks.expand_gelu_error(model, gpu)
    assert error < 0.01 if scale_error == 1 else 0.09 < error < 0.11
    assert fused_block_min_tokens(model, gpu, log=no_log) == (MIN_EXPAND_TOKENS if scale_error == 1 else None)


@pytest.mark.timeout(1800)
def test_precompilation_covers_every_kernel_of_training_and_inference() -> None:
    done = run_support_script("compile_precompiled.py")
    count, threads, *missing = done.split()
    assert int(count) > 40
    assert int(threads) == 4
    assert not missing


@pytest.mark.timeout(1800)
def test_every_kernel_compiles_without_a_gpu() -> None:
    """Every specialisation for an H100; for older GPUs, one per kernel and argument types."""
    for count in run_support_script("compile_kernels.py").split():
        assert int(count) > 50


def run_support_script(name: str) -> str:
    """Output of a script in its own process. Compiling takes a minute, and several on a busy machine."""
    done = subprocess.run([sys.executable, str(SUPPORT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
