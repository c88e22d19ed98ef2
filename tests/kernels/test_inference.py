"""The fused forward pass for inference: engine, memory and freed weights. In Triton's interpreter."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.triton_interpreter import (
    break_kernel,
    emulate_fp8_gemms,
    fake_gpu,
    relative_difference,
    requires_interpreter,
    small_model,
    spy_on,
)
from vitral.data.preprocess import Preprocessing
from vitral.device.memory import defragment
from vitral.inference.cuda_engine import CudaEngine
from vitral.kernels.encoder import FusedEncoder

pytestmark = [requires_interpreter, pytest.mark.slow]
GPU = fake_gpu(precision="fp32")


def preprocessing_for(image_size: int) -> Preprocessing:
    return Preprocessing(image_size=(image_size, image_size), channels=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


@pytest.mark.parametrize("kernels_work", [True, False])
def test_the_cuda_engine_matches_the_model_with_and_without_the_fused_kernels(
    kernels_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(16, patch_size=8, width=64, heads=2, mlp_width=128, depth=3)[0].eval()
    preprocessing = preprocessing_for(16)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    monkeypatch.setattr("vitral.kernels.block.op.MIN_BLOCK_TOKENS", 1)
    with torch.inference_mode():
        expected = model(preprocessing.normalise(images))
    if not kernels_work:
        break_kernel(monkeypatch, "block", "post_attention_kernel", lambda *args, **kwargs: args[2].zero_())
        break_kernel(monkeypatch, "embed", "embed_patches_kernel", lambda *args, **kwargs: args[5].zero_())
    engine = CudaEngine(model, preprocessing, GPU)
    block = spy_on(monkeypatch, "block", "post_attention_kernel")
    embed = spy_on(monkeypatch, "embed", "embed_patches_kernel")
    torch.testing.assert_close(engine(images), expected, atol=1e-4, rtol=1e-4)
    assert (embed.launches, block.launches) == ((1, 2) if kernels_work else (0, 0))


def test_the_cuda_engine_supports_dropout_qk_norm_and_rope() -> None:
    model = small_model(16, qk_norm=True, positions="learned+rotary", dropout=0.1, depth=2)[0].eval()
    preprocessing = preprocessing_for(16)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(preprocessing.normalise(images))
    assert relative_difference(CudaEngine(model, preprocessing, GPU)(images), expected) < 5e-5


def test_the_fused_kernels_compute_in_fp16_where_close_calls_are_computed_again() -> None:
    model = small_model(16, depth=2)[0].eval()
    preprocessing = preprocessing_for(16)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(preprocessing.normalise(images))
    engine = CudaEngine(model, preprocessing, GPU, dtype=torch.float16)
    assert engine.description == "fused kernels"
    assert relative_difference(engine(images), expected) < 5e-3


@pytest.mark.parametrize(
    ("image_size", "overrides"),
    [
        (16, {}),
        (32, {}),
        (68, {}),
        (32, {"width": 80, "heads": 1}),
    ],
    ids=str,
)  # 17, 65 and 290 tokens, and heads of 80 columns: each implementation of attention
def test_fp8_inference_frees_the_unquantized_weights(
    image_size: int, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(image_size, depth=2, **overrides)
    encoder = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, cls_only=True)
    copies_held: list[int] = []

    def defragment_and_count(fp8_data: list[torch.Tensor]) -> None:
        copies_held.append(len(encoder.weights.compute))
        defragment([*model.parameters(), *fp8_data], torch.device("cpu"))

    with torch.no_grad():
        before = encoder(tokens, model.config.grid)
        encoder.weights.free_unquantized(defragment_and_count)
        assert copies_held == [0], "copies keep memory from being returned"
        for weight, copy in encoder.weights.compute.items():
            assert copy.data_ptr() == weight.data_ptr(), "the old weights are still alive"
        assert torch.equal(encoder(tokens, model.config.grid), before)
    remaining = [name for name, p in model.encoder.named_parameters() if p.ndim == 2 and p.numel()]
    class_token_layers = [f"blocks.1.{name}.weight" for name in ("attention.project", "mlp.expand", "mlp.contract")]
    assert remaining == ["blocks.0.attention.project.weight", *class_token_layers]


def test_peak_memory_is_the_widest_matrix_and_four_times_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens four times: norm output, attention output, branch output and residual sum."""
    for package, kernel in (
        ("layernorm_gelu", "add_layernorm"), ("layernorm_gelu", "bias_gelu"), ("attention", "attention_forward"),
    ):  # fmt: skip
        spy_on(monkeypatch, package, f"{kernel}_kernel", run=False)
    model, tokens = small_model(32, depth=3, mlp_width=768)
    encoder = FusedEncoder(model.encoder, dtype=torch.float32)
    with torch.no_grad(), PeakMemory([*model.parameters(), tokens]) as memory:
        encoder(tokens, model.config.grid)
    hidden_bytes = tokens.shape[0] * tokens.shape[1] * 768 * 4
    assert memory.peak_bytes < hidden_bytes + 4.2 * tokens.numel() * 4


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes held at once by tensors that were allocated inside the context."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in existing}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (address := result.untyped_storage()._cdata) not in self.sizes:
            self.sizes[address] = result.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))
            weakref.finalize(result.untyped_storage(), self.sizes.pop, address, None)
        return result
