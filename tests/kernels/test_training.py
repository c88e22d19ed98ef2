"""The fused forward pass for training, in Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.triton_interpreter import break_kernel, fake_gpu, requires_interpreter
from vitral.kernels.training import make_training_forward
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig, HybridViT
from vitral.models.vit import ViT

pytestmark = [requires_interpreter, pytest.mark.slow]

SIZES: dict[str, Any] = {
    "image_size": (8, 8), "patch_size": 4, "num_classes": 10, "width": 48, "depth": 1, "heads": 3, "mlp_width": 96,
}  # fmt: skip


def test_models_of_one_shape_share_the_compiled_embedding_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second training in one process neither compiles again nor keeps the first model alive."""
    from torch._dynamo.testing import CompileCounter

    counter, compile_fn = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_fn(function, backend=counter))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the stem's kernel does not work here")

    break_kernel(monkeypatch, "conv_stem", "groupnorm_relu_kernel", fail)  # the stem is then compiled instead
    stem = ConvStemConfig(widths=(8, 16), strides=(2, 2))
    config = HybridConfig(**SIZES | {"positions": "learned+rotary"}, conv=stem)
    hardware = fake_gpu(compile=True, cuda_graphs=True)
    references: list[weakref.ref[ViT]] = []
    for _ in range(2):
        model = HybridViT(config).train()
        torch.nn.init.normal_(model.get_parameter("head.out.weight"))
        images, forward = torch.randn(1, 3, 8, 8), make_training_forward(model, hardware)
        logits = forward(images)
        logits.sum().backward()
        eager_logits = make_training_forward(model, replace(hardware, compile=False))(images)
        assert torch.equal(logits, eager_logits), "not this model's weights"
        assert counter.frame_count == 1
        references.append(weakref.ref(model))
    del model, forward, logits
    gc.collect()
    assert not any(reference() is not None for reference in references)
