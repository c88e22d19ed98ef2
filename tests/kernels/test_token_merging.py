"""Token merging with fused kernels against the reference, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.triton_interpreter import (
    break_kernel,
    emulate_fp8_gemms,
    fake_gpu,
    relative_difference,
    requires_interpreter,
    small_model,
)
from vitral.data.preprocess import Preprocessing
from vitral.inference.cuda_engine import CudaEngine
from vitral.kernels.attention.kernel import attention_forward_kernel
from vitral.kernels.attention.op import BLOCK_M, FEW_TOKENS
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.token_merging import FusedTokenMerging, unsupported_reason
from vitral.models.token_merging import TokenMergingViT

pytestmark = [requires_interpreter, pytest.mark.slow]


@pytest.mark.parametrize(
    ("image_size", "fp8", "overrides"),
    [
        (16, False, {"depth": 3}),
        (36, False, {"depth": 2, "pooling": "mean", "registers": 2, "qk_norm": True}),
        (68, False, {"depth": 2}),
        (16, True, {"depth": 3}),
        (36, True, {"depth": 2, "pooling": "mean"}),
    ],
    ids=str,
)  # 17, 82 or 84, and 290 tokens
def test_the_fused_encoder_merges_like_the_reference(
    image_size: int, fp8: bool, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(image_size, **overrides)
    merging, p = TokenMergingViT.from_model(model.eval(), r=4), model.config.num_prefix_tokens
    cls_only = model.config.pooling == "class"
    fused = FusedTokenMerging(FusedEncoder(model.encoder, fp8, torch.float32, cls_only=cls_only), 4, p)
    with torch.no_grad():
        expected, expected_sizes = merging.encode(tokens)
        actual, sizes = fused(tokens)
        pooled = [merging.pool_by_size(actual, sizes), merging.pool_by_size(expected, expected_sizes)]
    # FP8 changes which tokens are the most similar; tokens of other images would differ by more than 1.
    assert relative_difference(*pooled) < (0.5 if fp8 else 1e-4)
    if not (cls_only or fp8):
        assert sizes is not None
        assert expected_sizes is not None
        assert torch.equal(sizes, expected_sizes)
        assert relative_difference(actual, expected) < 1e-4


def test_attention_to_many_tokens_is_checked_if_the_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention_forward_kernel

    def launch(*args: Any, NUM_TOKENS: int, NUM_HEADS: int, BLOCK_N: int, **options: Any) -> None:
        if NUM_TOKENS > FEW_TOKENS:
            raise RuntimeError("out of shared memory")
        grid = len(args[0]) // NUM_TOKENS * NUM_HEADS * -(-NUM_TOKENS // BLOCK_M)
        kernel[(grid,)](*args, NUM_TOKENS=NUM_TOKENS, NUM_HEADS=NUM_HEADS, BLOCK_N=BLOCK_N, **options)

    break_kernel(monkeypatch, "attention", "attention_forward_kernel", launch)
    reasons = [unsupported_reason(small_model(image_size)[0], fake_gpu(precision="fp32")) for image_size in (16, 68)]
    assert reasons == [None, "the kernel failed: out of shared memory"]


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_cuda_engine_merges_tokens(pooling: Any) -> None:
    model = small_model(16, depth=3, pooling=pooling)[0].eval()
    merging = TokenMergingViT.from_model(model, r=3)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.4,) * 3, std=(0.25,) * 3)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    engine = CudaEngine(merging, preprocessing, fake_gpu(precision="fp32"))
    assert engine.description == "fused kernels"
    with torch.inference_mode():
        expected = merging(preprocessing.normalise(images))
        assert relative_difference(engine(images), expected) < 1e-4
        assert relative_difference(engine.features(images), merging.features(preprocessing.normalise(images))) < 1e-4
