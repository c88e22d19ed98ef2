"""Tokens from pixels, and a block behind attention as one kernel: in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.triton_interpreter import a_gpu, a_model, interpreted, products_in_fp32
from vitral.data.preprocess import Preprocessing
from vitral.inference.cuda_engine import GpuEngine
from vitral.kernels import fused_model as fused
from vitral.kernels import ops as launch
from vitral.kernels.embed.op import OWN, Embed, embedding_of, learning_embedding_of
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.ops import Small
from vitral.models.vit import ViT, ViTConfig, patchify

pytestmark = interpreted
GPU = a_gpu(precision="fp32")


def patched(**changes: Any) -> tuple[ViT, Preprocessing]:
    sizes: dict[str, Any] = {"image_size": (32, 48), "patch_size": 8, "classes": 3, "width": 48, "depth": 2, "heads": 2}
    torch.manual_seed(0)
    model = ViT(ViTConfig(**sizes | changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    C = model.config.channels
    seen = Preprocessing(
        image_size=model.config.image_size, channels=C, mean=(0.4, 0.5, 0.6)[:C], std=(0.2, 0.25, 0.3)[:C]
    )
    return model, seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"pooling": "mean"}, {"positions": "none"}, {"positions": "sincos"}, {"registers": 3}, {"channels": 1},
     {"patch_size": 16, "channels": 1}],
    ids=str,
)  # fmt: skip
def test_tokens_from_pixels_are_the_model_s(changes: dict[str, Any]) -> None:
    model, preprocessing = patched(**changes)
    images = torch.randint(0, 256, (3, model.config.channels, 32, 48), dtype=torch.uint8)
    wanted = model.embed(preprocessing.normalise(images), model.config.grid)
    torch.testing.assert_close(Embed(model, preprocessing)(images), wanted, atol=2e-5, rtol=0)
    assert embedding_of(model, preprocessing, GPU, preprocessing.normalise) is not None


@pytest.mark.parametrize("changes", [{}, {"pooling": "mean"}, {"positions": "sincos"}, {"registers": 2}], ids=str)
def test_learning_tokens_have_the_gradients_of_pytorch(changes: dict[str, Any]) -> None:
    model, _ = patched(**changes)
    model.requires_grad_(True)
    said: list[str] = []
    embed = learning_embedding_of(model, GPU, said.append)
    assert embed is not None, said
    images, grid = torch.randn(3, 3, 32, 48), model.config.grid
    pull = torch.randn_like(model.embed(images, grid))
    own = [p for name, p in model.named_parameters() if name.startswith(OWN)]
    found = torch.autograd.grad((embed(images) * pull).sum(), own)
    wanted = torch.autograd.grad((model.embed(images, grid) * pull).sum(), own)
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"pooling": "mean"}, {"positions": "none"}, {"registers": 2}], ids=str)
def test_what_bf16_rounds_speaks_against_no_learning_kernel(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter knows no bf16: PyTorch in the kernels' place, with its roundings."""

    def tokens_of(images: Tensor, weight: Tensor, front: Tensor, rows: Tensor, patch: int) -> Tensor:
        patches = patchify(images, patch).float() @ weight.float().t() + rows
        return torch.cat([front.float().expand(len(images), -1, -1), patches], dim=1).to(images.dtype)

    def unfolded(images: Tensor, patch: int, front: int) -> Tensor:
        return F.pad(patchify(images, patch), (0, 0, front, 0)).flatten(0, 1)

    monkeypatch.setattr("vitral.kernels.embed.op.tokens_of", tokens_of)
    monkeypatch.setattr("vitral.kernels.embed.op.unfolded", unfolded)
    model, _ = patched(**changes)
    said: list[str] = []
    assert learning_embedding_of(model.requires_grad_(True), a_gpu(precision="bf16"), said.append) is not None, said


@pytest.mark.parametrize("changes", [{"dropout_embedding": 0.1}, {"patch_size": 4}], ids=str)
def test_tokens_that_the_kernel_cannot_learn_are_left_to_pytorch(changes: dict[str, Any]) -> None:
    model, _ = patched(**changes)
    assert learning_embedding_of(model.requires_grad_(True), GPU, print) is None
    model, _ = patched()
    assert learning_embedding_of(model, GPU, print) is None, "nothing learns"


@pytest.mark.parametrize("changes", [{"patch_size": 4}, {"width": 24}], ids=str)
def test_patches_that_the_kernel_does_not_know_are_pytorch_s(changes: dict[str, Any]) -> None:
    model, preprocessing = patched(**changes)
    assert embedding_of(model, preprocessing, GPU, preprocessing.normalise) is None


def test_a_kernel_that_gives_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preprocessing = patched()
    real = Embed.__call__
    monkeypatch.setattr(Embed, "__call__", lambda self, images: real(self, images).flip(1))
    assert embedding_of(model, preprocessing, GPU, preprocessing.normalise) is None


BLOCKS: dict[str, dict[str, Any]] = {
    "class token": {"width": 96, "heads": 3},
    "a power of two, tanh, no bias": {"width": 64, "gelu": "tanh", "qkv_bias": False, "pooling": "mean"},
    "rotary, norms": {"width": 64, "positions": "learned+rotary", "qk_norm": True},
    "Ti/16's width": {"width": 192, "heads": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("changes", BLOCKS.values(), ids=BLOCKS)
def test_a_block_behind_attention_in_one_kernel_is_the_block(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = a_model(20, **{"depth": 3, "mlp_width": 128} | changes)
    model.eval()
    given, calls, real = tokens.clone(), list[int](), launch.rows
    monkeypatch.setattr(launch, "rows", lambda *a: (calls.append(1), real(*a)))
    front = model.config.pooling == "class"
    encoder = FusedEncoder(model.encoder, number=torch.float32, front=front, rows=0)
    found, wanted = encoder(tokens, model.config.grid), model.encoder(tokens, model.config.grid)
    torch.testing.assert_close(found, wanted[:, :1] if front else wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(tokens, given), "the caller's"
    assert len(calls) == 2  # of three blocks: the last asks nobody
    encoder.rows = tokens[..., 0].numel() + 1
    encoder(tokens, model.config.grid)
    assert len(calls) == 2, "few tokens go through the other kernels, which are quicker for them"


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("a power of two, tanh, no bias", 20),
        ("rotary, norms", 20),
        ("class token", 36),
        pytest.param("Ti/16's width", 20, marks=pytest.mark.slow),
    ],
)
def test_it_learns_as_the_block_does(name: str, image: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more tokens than attention has at once."""
    model, tokens = a_model(image, **{"depth": 3, "mlp_width": 128} | BLOCKS[name])
    calls, real = list[int](), launch.rows
    monkeypatch.setattr(launch, "rows", lambda *a: (calls.append(1), real(*a)))
    front, parameters, tokens = (
        model.config.pooling == "class",
        list(model.encoder.parameters()),
        tokens.requires_grad_(),
    )
    ours = FusedEncoder(model.encoder, number=torch.float32, spare=0, front=front, rows=0)
    found = ours(tokens, model.config.grid)
    wanted = model.encoder(tokens, model.config.grid)[:, : found.shape[1]]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert len(calls) == 2
    pull = torch.randn_like(wanted)
    gradients = (torch.autograd.grad((out * pull).sum(), [tokens, *parameters]) for out in (found, wanted))
    for own, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(own, plain, atol=2e-3, rtol=1e-3)


def test_where_norms_are_kept_or_branches_dropped_it_learns_with_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(launch, "rows", lambda *a: calls.append(1))
    for changes, spare in (({}, 2**25), ({"drop_path": 0.3}, 0)):
        model, tokens = a_model(20, width=64, mlp_width=128, depth=3, **changes)
        encoder = FusedEncoder(model.train().encoder, number=torch.float32, spare=spare, front=True, rows=0)
        encoder(tokens.requires_grad_(), model.config.grid)
        assert calls == []


@torch.no_grad()
def test_an_mlp_that_is_wider_than_all_else_has_room() -> None:
    model, tokens = a_model(8, width=64, mlp_width=2048, depth=3)
    encoder = FusedEncoder(model.eval().encoder, number=torch.float32, front=True, rows=0)
    wanted = model.encoder(tokens, model.config.grid)[:, :1]
    torch.testing.assert_close(encoder(tokens, model.config.grid), wanted, atol=1e-4, rtol=1e-4)


def test_it_is_tried_for_training_only_where_training_would_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "tried_out", lambda *given: "")
    model, _ = patched(width=64)
    dropping, _ = patched(width=64, drop_path=0.1)
    tokens = 25 * model.config.hidden_width
    assert fused.rows_of(model, GPU, learning=True, batch=fused.SPARE // tokens + 1) == fused.MANY
    assert fused.rows_of(model, GPU, learning=True, batch=fused.SPARE // tokens) is None, "norms are kept"
    assert fused.rows_of(dropping, GPU, learning=True, batch=fused.SPARE) is None
    assert fused.rows_of(dropping, GPU) == fused.MANY, "answers drop nothing"
    wide, _ = patched(width=256, heads=4)
    assert fused.rows_of(wide, GPU) == fused.MANY
    assert fused.rows_of(wide, GPU, learning=True, batch=fused.SPARE) is None, "registers would not suffice"
    monkeypatch.setattr(fused, "tried_out", lambda *given: "its kernels fail here")
    said: list[str] = []
    assert fused.rows_of(model, GPU, True, fused.SPARE, said.append) is None
    assert said == ["blocks are computed kernel by kernel: its kernels fail here"]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"width": 96, "heads": 3}, {"width": 64, "gelu": "tanh", "pooling": "mean"}])
def test_in_fp8_expansion_and_gelu_are_one_kernel(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what the product and GELU behind it give, but that the hidden numbers were not rounded between."""
    model, tokens = a_model(20, **{"depth": 3, "mlp_width": 256} | changes)
    products, calls, real = products_in_fp32(monkeypatch), list[Small](), launch.expand
    monkeypatch.setattr(launch, "expand", lambda *a: (calls.append(real(*a)), calls[-1])[1])
    front = model.config.pooling == "class"
    encoder = FusedEncoder(model.eval().encoder, fp8=True, number=torch.float32, front=front, rows=0)
    found = encoder(tokens, model.config.grid)
    assert len(calls) == (2 if front else 3), "all but first tokens that are left alone"
    assert not any(shape[1:] == (model.config.width, 256) for shape in products)
    encoder.rows = tokens[..., 0].numel() + 1
    torch.testing.assert_close(found, encoder(tokens, model.config.grid), atol=0.02, rtol=0.02)
    assert any(shape[1:] == (model.config.width, 256) for shape in products)
    wanted = model.encoder(tokens, model.config.grid)[:, : found.shape[1]]
    assert (found - wanted).norm() / wanted.norm() < 0.3  # what FP8 rounds


def test_of_fp8_numbers_it_is_gelu_of_the_product() -> None:
    M, D, H = 150, 96, 256  # more tokens than a program has
    torch.manual_seed(0)
    x, weight, bias = torch.randn(M, D), 0.1 * torch.randn(H, D), torch.randn(H)
    x8 = launch.add_norm(x, None, None, None, (torch.ones(D), torch.zeros(D), 1e-6), fp8=True, plain=False).small
    w8 = launch.shrink(weight, bias, torch.zeros(2))
    assert x8 is not None
    g8 = launch.expand(x8, w8, bias, tanh=False)
    product = (x8.numbers.float() * x8.scales) @ (w8.numbers.float() * w8.scales).t()
    found, wanted = g8.numbers.float() * g8.scales, F.gelu(product + bias)
    near = torch.isclose(found, wanted, atol=0.003, rtol=0.07)
    assert near.float().mean() > 0.97  # Triton's interpreter halves what should be rounded up to a power of two


def test_it_is_for_answers_of_fp8_and_tokens_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [D for D in range(16, 1024, 16) if launch.expands(D, 4 * D)] == [
        32,
        64,
        96,
        128,
        160,
        192,
        256,
        288,
        320,
        384,
    ]
    assert not launch.expands(384, 1000)
    monkeypatch.setattr(fused, "tried_out", lambda *given: "")
    eight = a_gpu(fp8=True)
    model, _ = patched(width=384, heads=6)
    assert fused.rows_of(model, eight) == fused.ENOUGH
    assert fused.rows_of(model, eight, learning=True, batch=fused.SPARE) is None
    assert fused.rows_of(model, GPU) is None, "too wide for a whole block"
    assert fused.rows_of(patched(width=512, heads=8)[0], eight) is None
    assert fused.rows_of(patched(width=384, heads=6, depth=1)[0], eight) is None, "its one block asks first tokens"


@pytest.mark.parametrize("lie", [1.0, 1.1])
def test_it_is_compared_with_the_product_and_gelu_behind_it(lie: float, monkeypatch: pytest.MonkeyPatch) -> None:
    products_in_fp32(monkeypatch)
    model, _ = patched(width=64, depth=2, mlp_width=128)
    real = fused.expand
    monkeypatch.setattr(fused, "compile_ahead", lambda rehearsal: None)
    monkeypatch.setattr(fused, "expand", lambda *a: (g8 := real(*a))._replace(scales=g8.scales * lie))
    off = fused.difference_of_expansion(model, a_gpu(precision="fp32", fp8=True))
    assert off < 0.01 if lie == 1 else 0.09 < off < 0.11
    assert fused.rows_of(model, a_gpu(precision="fp32", fp8=True)) == (fused.ENOUGH if lie == 1 else None)


def test_widths_that_are_no_two_powers_of_two_have_no_such_kernel() -> None:
    assert [D for D in range(16, 1024, 16) if launch.narrow(D, 4 * D)] == [32, 64, 96, 128, 160, 192, 256]
    assert not launch.narrow(192, 100)


def test_the_engine_takes_both_and_a_kernel_that_lies_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preprocessing = patched(width=64, depth=3)
    images = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    monkeypatch.setattr("vitral.kernels.fused_model.MANY", 1)
    wanted = model(preprocessing.normalise(images))
    calls, real, embed = list[str](), launch.rows, Embed.__call__
    monkeypatch.setattr(launch, "rows", lambda *a: (calls.append("rows"), real(*a)))
    monkeypatch.setattr(Embed, "__call__", lambda *a: (calls.append("embed"), embed(*a))[1])
    engine = GpuEngine(model, preprocessing, GPU)
    calls.clear()  # of the trials
    torch.testing.assert_close(engine(images), wanted, atol=1e-4, rtol=1e-4)
    assert calls == ["embed", "rows", "rows"]
    monkeypatch.setattr(launch, "rows", lambda o, x, out, *rest: out.zero_())
    assert fused.rows_of(model, GPU) is None
    torch.testing.assert_close(GpuEngine(model, preprocessing, GPU)(images), wanted, atol=1e-4, rtol=1e-4)
