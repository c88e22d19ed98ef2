"""The fused patch embedding against PyTorch, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.triton_interpreter import break_kernel, fake_gpu, requires_interpreter
from vitral.data.preprocess import Preprocessing
from vitral.kernels.embed.kernel import embed_patches_kernel
from vitral.kernels.embed.op import (
    BLOCK_M,
    BOTH_TILES,
    EMBEDDING_PARAMETERS,
    SMALL_BLOCK_M,
    InferenceEmbedding,
    make_inference_embedding,
    make_training_embedding,
)
from vitral.models.vit import ViT, ViTConfig, patchify
from vitral.utils.progress import no_log

pytestmark = requires_interpreter
GPU = fake_gpu(precision="fp32")


def make_model(**overrides: Any) -> tuple[ViT, Preprocessing]:
    sizes: dict[str, Any] = {
        "image_size": (32, 48), "patch_size": 8, "num_classes": 3, "width": 48, "depth": 1, "heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = ViT(ViTConfig(**sizes | overrides)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    C = model.config.channels
    mean, std = (0.4, 0.5, 0.6)[:C], (0.2, 0.25, 0.3)[:C]
    return model, Preprocessing(image_size=model.config.image_size, channels=C, mean=mean, std=std)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"pooling": "mean"}, {"positions": "none"}, {"positions": "sincos"}, {"registers": 3}, {"channels": 1},
     {"patch_size": 16, "channels": 1}, {"image_size": (28, 42), "patch_size": 14}],
    ids=str,
)  # fmt: skip
def test_tokens_of_uint8_images_match_the_model(overrides: dict[str, Any]) -> None:
    model, preprocessing = make_model(**overrides)
    images = torch.randint(0, 256, (3, model.config.channels, *model.config.image_size), dtype=torch.uint8)
    expected = model.embed(preprocessing.normalise(images), model.config.grid)
    embed = InferenceEmbedding(model, preprocessing)
    for min_programs in BOTH_TILES:
        torch.testing.assert_close(embed(images, min_programs), expected, atol=2e-5, rtol=0)
    assert make_inference_embedding(model, preprocessing, GPU, preprocessing.normalise) is not None


@pytest.mark.parametrize(
    "overrides",
    [{}, {"pooling": "mean"}, {"positions": "sincos"}, {"registers": 2}, {"image_size": (28, 42), "patch_size": 14}],
    ids=str,
)
def test_training_gradients_match_pytorch(overrides: dict[str, Any]) -> None:
    model, _ = make_model(**overrides)
    model.requires_grad_(True)
    messages: list[str] = []
    embed = make_training_embedding(model, GPU, messages.append)
    assert embed is not None, messages
    images, grid = torch.randn(3, 3, *model.config.image_size), model.config.grid
    grad_out = torch.randn_like(model.embed(images, grid))
    parameters = [p for name, p in model.named_parameters() if name.startswith(EMBEDDING_PARAMETERS)]
    grads = torch.autograd.grad(embed(images), parameters, grad_out)
    expected_grads = torch.autograd.grad(model.embed(images, grid), parameters, grad_out)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("overrides", [{}, {"pooling": "mean"}, {"positions": "none"}, {"registers": 2}], ids=str)
def test_bf16_rounding_passes_the_self_check(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not support bf16: PyTorch replaces the kernels, with the same rounding."""

    def embed_patches(
        images: Tensor, weight: Tensor, prefix: Tensor, offsets: Tensor, patch_size: int, **_: Any
    ) -> Tensor:
        patches = patchify(images, patch_size).float() @ weight.float().t() + offsets
        return torch.cat([prefix.float().expand(len(images), -1, -1), patches], dim=1).to(images.dtype)

    def unfold_patches(images: Tensor, patch_size: int, num_prefix: int) -> Tensor:
        return F.pad(patchify(images, patch_size), (0, 0, num_prefix, 0)).flatten(0, 1)

    monkeypatch.setattr("vitral.kernels.embed.op.embed_patches", embed_patches)
    monkeypatch.setattr("vitral.kernels.embed.op.unfold_patches", unfold_patches)
    model, _ = make_model(**overrides)
    messages: list[str] = []
    gpu = fake_gpu(precision="bf16")
    assert make_training_embedding(model.requires_grad_(True), gpu, messages.append) is not None, messages


def test_small_patches_have_no_fused_training_embedding() -> None:
    model, _ = make_model(patch_size=4)
    assert make_training_embedding(model.requires_grad_(True), GPU, no_log) is None


def test_frozen_weights_of_the_embedding_get_no_gradient() -> None:
    model, _ = make_model()
    embed = make_training_embedding(model.requires_grad_(False), GPU, no_log)
    assert embed is not None
    images = torch.randn(2, model.config.channels, *model.config.image_size)
    assert not embed(images).requires_grad
    model.patch_embedding.project.bias.requires_grad_(True)
    embed = make_training_embedding(model, GPU, no_log)
    assert embed is not None
    embed(images).sum().backward()
    num_patches = model.config.grid[0] * model.config.grid[1]
    torch.testing.assert_close(
        model.patch_embedding.project.bias.grad, torch.full((model.config.width,), 2.0 * num_patches)
    )
    assert model.patch_embedding.project.weight.grad is None


@pytest.mark.parametrize("overrides", [{"patch_size": 4}, {"width": 24}], ids=str)
def test_unsupported_sizes_have_no_fused_inference_embedding(overrides: dict[str, Any]) -> None:
    model, preprocessing = make_model(**overrides)
    assert make_inference_embedding(model, preprocessing, GPU, preprocessing.normalise) is None


def programs(num_patches: int, DIM: int, BLOCK_M: int, BLOCK_N: int, **_: Any) -> tuple[int, int]:
    return DIM // BLOCK_N, -(-num_patches // BLOCK_M)


@pytest.mark.parametrize("block_m", [BLOCK_M, SMALL_BLOCK_M])
def test_a_kernel_that_is_faulty_for_many_or_few_patches_is_not_used(
    block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, preprocessing = make_model()
    kernel = embed_patches_kernel

    def launch(*args: Any, **kwargs: Any) -> None:
        kernel[programs(args[6], **kwargs)](*args, **kwargs)
        if kwargs["BLOCK_M"] == block_m:
            args[5].zero_()

    break_kernel(monkeypatch, "embed", "embed_patches_kernel", launch)
    assert make_inference_embedding(model, preprocessing, GPU, preprocessing.normalise) is None
    messages: list[str] = []
    assert make_training_embedding(model.requires_grad_(True), GPU, messages.append) is None
    assert messages[0].startswith("patch embedding without fused kernel: ")
