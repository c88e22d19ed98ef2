"""The fused encoder against the plain one: on a CPU, in Triton's interpreter and fp32, where both agree to rounding."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.triton_interpreter import a_gpu, interpreted
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.distributed.parallel import Way, forward_of
from vitral.errors import VitralError
from vitral.inference.engine_selection import choose_on_gpu
from vitral.kernels import encoder as fused_encoder
from vitral.kernels import fused_model as fused
from vitral.kernels import ops as launch
from vitral.kernels.encoder import FusedEncoder, unknown
from vitral.kernels.layernorm_gelu import kernel as kernels
from vitral.kernels.precompile import compile_ahead, rehearsing
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig, HybridViT
from vitral.models.vit import ViT, ViTConfig

pytestmark = interpreted

SMALL: dict[str, Any] = {
    "image_size": (16, 16), "patch_size": 4, "classes": 10, "width": 48, "depth": 2, "heads": 3, "mlp_width": 96,
}  # fmt: skip
GRID = (4, 4)


def a_model(**changes: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL | changes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no shift at zero, no gain at one
    return model


def outcome(encoder: Any, model: ViT, tokens: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What comes out, and every gradient."""
    model.zero_grad()
    given = tokens.clone().requires_grad_()
    torch.manual_seed(7)  # stochastic depth
    out = encoder(given, GRID)
    out.backward(dy)
    assert given.grad is not None
    found = {name: p.grad.clone() for name, p in model.encoder.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "tokens": given.grad, **found}


def largest_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-4)).item()


def leave_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, where numbers are bf16: the interpreter cannot multiply such matrices."""
    monkeypatch.setattr(launch, "SHORT", 4)
    monkeypatch.setattr(launch, "LONG", 4)


@pytest.fixture(params=["short", "long", "PyTorch's"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways: our own kernels for few tokens and for more, and PyTorch's attention with ours around it."""
    if request.param != "short":
        monkeypatch.setattr(launch, "SHORT", 4)
    if request.param == "PyTorch's":
        monkeypatch.setattr(launch, "LONG", 4)
    return str(request.param)


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 1},
        {"qk_norm": True, "positions": "learned+rotary"},
        {"positions": "rotary", "gelu": "tanh", "pooling": "mean", "qkv_bias": False, "depth": 1},
        {"qk_norm": True, "positions": "sincos", "registers": 2, "depth": 1},
        {"drop_path": 0.5},
        {"width": 24, "heads": 1, "mlp_width": 56, "depth": 1},
    ],
    ids=",".join,
)
def test_the_fused_encoder_is_the_encoder(changes: dict[str, Any], attention: str) -> None:
    model = a_model(**changes)
    assert not unknown(model)
    tokens = model.embed(torch.randn(3, 3, 16, 16), GRID).detach()
    dy = torch.randn_like(tokens)
    plain = outcome(model.encoder, model, tokens, dy)
    fused = outcome(FusedEncoder(model.encoder, number=torch.float32), model, tokens, dy)
    assert fused.keys() == plain.keys()
    for name in plain:
        if plain[name].norm() > 1e-4:  # a key's bias moves nothing: softmax does not see it
            assert largest_difference(fused[name], plain[name]) < 5e-5, name


@pytest.mark.parametrize(
    ("changes", "spare"),
    [
        ({"qk_norm": True, "positions": "learned+rotary", "drop_path": 0.5}, 0),
        ({"depth": 1}, 2**25),
        ({"depth": 1, "registers": 2}, 0),
    ],
)
def test_where_the_class_token_is_asked_the_last_block_computes_no_other(
    changes: dict[str, Any], spare: int, attention: str
) -> None:
    model = a_model(**changes)
    tokens = model.embed(torch.randn(3, 3, 16, 16), GRID).detach()
    dy = torch.randn(3, 1, 48)
    plain = outcome(lambda *given: model.encoder(*given)[:, :1], model, tokens, dy)
    encoder = FusedEncoder(model.encoder, number=torch.float32, spare=spare, front=True)
    fused = outcome(encoder, model, tokens, dy)
    for name in plain:
        if plain[name].norm() > 1e-4:
            assert largest_difference(fused[name], plain[name]) < 5e-5, name
    with torch.no_grad():
        assert encoder(tokens, GRID).shape == (3, 1, 48)
        model.eval()
        assert largest_difference(encoder(tokens, GRID), model.encoder(tokens, GRID)[:, :1]) < 5e-5


def test_sums_over_many_rows_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take several turns, and a last one that is not full."""
    monkeypatch.setattr(launch, "shares", lambda *given: 3)
    monkeypatch.setattr(fused_encoder, "SPARE", 0)  # GELU computed again
    model = a_model(depth=1)
    tokens = torch.randn(3, 17, 48)
    dy = torch.randn_like(tokens)
    plain = outcome(model.encoder, model, tokens, dy)
    fused = outcome(FusedEncoder(model.encoder, number=torch.float32), model, tokens, dy)
    assert all(largest_difference(fused[name], plain[name]) < 5e-5 for name in plain)


def test_weights_that_changed_are_rounded_anew() -> None:
    model = a_model(depth=1)
    tokens = torch.randn(1, 17, 48)
    encoder = FusedEncoder(model.encoder)
    before = encoder(tokens, GRID)
    with torch.no_grad():
        model.encoder.blocks[0].mlp.expand.weight.mul_(2)  # type: ignore[union-attr, operator]
    assert not torch.equal(encoder(tokens, GRID), before)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_without_gradients_nothing_is_kept_and_no_image_dropped(pooling: str, attention: str) -> None:
    model = a_model(pooling=pooling, qk_norm=True, positions="learned+rotary", drop_path=0.5).eval()
    tokens = torch.randn(2, 16 + (pooling == "class"), 48)
    with torch.inference_mode():
        found = FusedEncoder(model.encoder, number=torch.float32)(tokens, GRID)
        assert largest_difference(found, model.encoder(tokens, GRID)) < 5e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_scale": 0.1}, "layer scale"),
        ({"dropout": 0.1}, "dropout"),
        ({"dropout_attention": 0.1}, "dropout"),
        ({"width": 36, "heads": 3}, "multiple of 8"),
        ({"width": 24, "heads": 1}, "multiples of 16"),
    ],
)
def test_what_it_does_not_know_it_says(changes: dict[str, Any], reason: str) -> None:
    assert reason in unknown(a_model(**changes), fp8=True)


def test_frozen_weights_are_left_to_the_plain_encoder() -> None:
    model = a_model()
    next(model.encoder.parameters()).requires_grad_(False)
    assert "do not learn" in unknown(model)


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_and_its_slope(tanh: bool) -> None:
    x = torch.cat([torch.linspace(-12, 12, 255), torch.tensor([-300.0, 300.0, 0.0])]).reshape(2, 129).requires_grad_()
    none = torch.zeros(129)
    with np.errstate(over="ignore"):  # far out the exponential is infinite, as on a GPU
        g, _ = launch.act(x.detach(), none, tanh, None)
        sums = launch.Sums()
        again, dh, _, summed = launch.act_back(x.detach().clone(), none, torch.ones_like(x), tanh, None, None, sums)
        sums.take()
    wanted = torch.nn.functional.gelu(x.double(), approximate="tanh" if tanh else "none")
    assert g is not None
    assert (g - wanted).abs().max() < 2e-5 + 1e-6 * 300
    assert (g - wanted)[x.abs() < 13].abs().max() < 5e-6
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    assert (dh - slope).abs().max() < 8e-6
    assert torch.equal(again, g)
    assert torch.allclose(summed, dh.sum(0), atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_as_fp8(turned: bool) -> None:
    matrix = torch.randn(40, 70) * torch.logspace(-3, 3, 40)[:, None]
    given = matrix.t().contiguous().t() if turned else matrix
    small = launch.shrink(given, torch.linspace(-5, 4, 40), torch.zeros(2))
    again = small.numbers.float() * small.scales
    off = (again - matrix).abs().amax(dim=1) / matrix.abs().amax(dim=1)
    assert off.max() < 0.15  # Triton's interpreter cuts the fourth bit off, a GPU rounds it
    assert small.norms.tolist() == pytest.approx([matrix.norm(dim=1).max().item(), 5.0], rel=1e-6)


def test_rows_as_fp8_and_the_bound_of_their_products() -> None:
    """No product is larger than its bound: nothing is cut off, whatever the weights are."""
    torch.manual_seed(0)
    x, weight = torch.randn(33, 48), torch.randn(56, 48) * 3
    bias = torch.randn(56)
    _, _, normed, small = launch.add_norm(x, None, None, None, (torch.rand(48) + 0.5, torch.randn(48), 1e-6), True)
    assert normed is not None
    assert small is not None
    assert largest_difference(small.numbers.float() * small.scales, normed) < 0.1
    most = launch.shrink(weight, bias, torch.zeros(2)).norms
    bound = small.norms * most[0]
    assert ((normed @ weight.t()).abs() <= bound).all()
    with np.errstate(over="ignore"):
        g, g8 = launch.act(normed @ weight.t(), bias, False, (small.norms, most))
    assert g is None
    assert g8 is not None
    assert g8.numbers.float().abs().max() < 448


def test_weights_that_are_all_zero_have_fp8_products_too() -> None:
    """As they are at first where a recipe starts with the identity: no bound is zero, nothing is divided by it."""
    h, none, rows = torch.randn(5, 64), torch.zeros(64), torch.ones(5, 1)
    most = launch.shrink(torch.zeros(64, 16), none, torch.zeros(2)).norms
    assert most.tolist() == [0, 0]
    with np.errstate(over="ignore"):
        _, g8 = launch.act(torch.zeros_like(h), none, False, (rows, most))
        _, _, dh8, _ = launch.act_back(h, none, torch.zeros_like(h), False, (rows, most), None, launch.Sums())
    for small in (g8, dh8):
        assert small is not None
        assert (small.scales > 0).all()
        assert not small.numbers.float().any()


def test_what_is_not_a_number_is_infinitely_far_off() -> None:
    fine, broken = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert fused.largest([fine, fine], [fine, fine]) == 0
    assert fused.largest([fine, broken], [fine, fine]) == float("inf")
    assert fused.largest([fine, fine], [fine, torch.zeros(3)]) == float("inf")


def test_it_refuses_nothing_that_the_recipes_train() -> None:
    from vitral.models.variants import VARIANTS
    from vitral.recipes.builtin import GROUPS

    known = [make() for name in ("Known sets", "Against the clock") for make in GROUPS[name].values()]
    for recipe in known:
        assert not unknown(VARIANTS[recipe.variant](recipe.model), fp8=recipe.model.width % 16 == 0), recipe.name
    assert fused_encoder.MOST_COLUMNS >= 1664  # G/14


def test_a_model_with_a_way_of_its_own_is_left_alone() -> None:
    class Own(ViT):
        def features(self, images_BCHW: Tensor) -> Tensor:
            return super().features(images_BCHW) * 2

    assert "of its own" in unknown(Own(ViTConfig(**SMALL)))


def test_the_engine_for_gpus_answers_with_fused_kernels_what_the_model_answers() -> None:
    model = a_model(qk_norm=True, positions="learned+rotary", dropout=0.1).eval()
    seen = Preprocessing(image_size=(16, 16), channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    pretended = Hardware(device=torch.device("cpu"), precision="fp32", compile=True, reasons=reasons, fused=True)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch.inference_mode():
        wanted = model(seen.normalise(images))
    chosen = choose_on_gpu(model, seen, pretended)
    assert "fused kernels" in str(chosen)
    assert chosen.run is not None
    assert largest_difference(chosen.run(images), wanted) < 5e-5


@pytest.mark.parametrize(
    ("changes", "recompute", "reason"), [({"layer_scale": 0.1}, False, "layer scale"), ({}, True, "again")]
)
def test_fp8_that_cannot_be_is_said(changes: dict[str, Any], recompute: bool, reason: str) -> None:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    pretended = Hardware(
        device=torch.device("cpu"),
        precision="bf16",
        compile=False,
        reasons=reasons,
        fused=True,
        fp8=True,
    )
    with pytest.raises(VitralError, match=reason):
        forward_of(a_model(**changes), Way(name="alone", reason="one process"), pretended, recompute)


def test_kernels_are_compared_with_the_plain_encoder_before_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to_pytorch(monkeypatch)
    model, state = a_model(drop_path=0.5, depth=1), torch.get_rng_state()
    assert fused.why_not(model, a_gpu()) == ""
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fused.why_not(model.eval(), a_gpu(), learning=False) == ""


def test_kernels_that_fail_or_lie_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to_pytorch(monkeypatch)
    said: list[str] = []
    real = launch.act_back

    def lies(*given: Any) -> Any:
        g, dh, *rest = real(*given)
        return g * 2, dh * 2, *rest

    monkeypatch.setattr(launch, "act_back", lies)
    forward, _ = forward_of(a_model(depth=1), Way(name="alone", reason="one process"), a_gpu(), False, said.append)
    assert forward(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    assert "off by" in said[0]

    def fails(*given: object, **named: object) -> None:
        raise KeyError("out of shared memory")

    monkeypatch.setattr(launch, "act", fails)
    forward_of(a_model(depth=1), Way(name="alone", reason="one process"), a_gpu(), False, said.append)
    assert "fail here: 'out of shared memory'" in said[1]
    with pytest.raises(VitralError, match="no FP8 products: its kernels fail"):
        forward_of(a_model(), Way(name="alone", reason="one process"), a_gpu(fp8=True), False)


@interpreted
def test_fp8_that_nobody_asked_for_yields_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """First with fused kernels, then without."""
    said, alone, ours = list[str](), Way(name="alone", reason="one process"), a_gpu(fp8=True, yields=True)

    def fails(*given: object, **named: object) -> None:
        raise KeyError("no such units")

    monkeypatch.setattr(launch, "shrink", fails)
    forward, used = forward_of(a_model(depth=1), alone, ours, False, said.append)
    assert (used.fp8, used.yields, used.fused) == (False, False, True)
    assert "no such units" in used.reasons["precision"]
    assert said == ["products of bf16, not of FP8: its kernels fail here: 'no such units'"]
    assert forward(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    forward_of(a_model(depth=1), alone, ours, True, said.append)
    assert said[1:] == ["products of bf16, not of FP8: activations are computed again"]
    forward_of(a_model(depth=1), alone, replace(ours, fused=False), False, said.append)
    assert said[2:] == ["products of bf16, not of FP8: it needs fused kernels"]


class Asked:
    """In a kernel's place: what was asked for, and what was launched."""

    def __init__(self) -> None:
        self.variants, self.launches = 0, 0

    def warmup(self, *given: Any, grid: Any, **named: Any) -> None:
        self.variants += 1

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return lambda *given, **named: None


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_rehearsal_asks_for_kernels_and_launches_none(
    learning: bool, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(pooling=pooling, drop_path=0.5)
    names = ["norm", "act", "short"] + ["norm_back", "act_back", "short_back", "turn_back", "totals"] * learning
    asked = {name: Asked() for name in names}
    for name, kernel in asked.items():
        monkeypatch.setattr(kernels, name, kernel)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    compile_ahead(lambda: fused.rehearse(model, a_gpu(), learning, 40))
    assert all(kernel.variants and not kernel.launches for kernel in asked.values())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        FusedEncoder(model.encoder, front=True)(torch.zeros(1, 17, 48), GRID)
    assert asked["norm"].launches == 5, "and what follows is no rehearsal"


def test_what_fails_in_a_rehearsal_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to_pytorch(monkeypatch)

    def fails(model: ViT, *given: object) -> None:
        model.eval()
        raise RuntimeError("no memory")

    monkeypatch.setattr(fused, "rehearse", fails)
    model = a_model(depth=1)
    assert fused.why_not(model, a_gpu(), batch=64) == ""
    assert model.training
    assert not rehearsing.get()


@pytest.mark.parametrize("batch", [16, 963, 964, 2**20])  # 963·17·2048 is just below 2²⁵
def test_what_is_tried_keeps_what_the_batch_will(batch: int) -> None:
    model = a_model(mlp_width=2048)
    spare = fused.compared(model, a_gpu(), fused.tried(model), batch).spare
    assert (spare >= 16 * 17 * 2048) == (batch <= 963)


@pytest.mark.slow
def test_after_a_rehearsal_nothing_is_left_to_compile() -> None:
    script = [sys.executable, str(Path(__file__).parents[1] / "support" / "compile_precompiled.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count, threads, *missing = done.stdout.split()
    assert int(count) > 40
    assert int(threads) == 4
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles_for_gpus_that_are_not_here(capability: int) -> None:
    script = [sys.executable, str(Path(__file__).parents[1] / "support" / "compile_kernels.py"), str(capability)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


def test_models_of_one_shape_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second training in one process neither compiles again nor keeps the first one's model."""
    from torch._dynamo.testing import CompileCounter

    counter, compile = CompileCounter(), torch.compile  # type: ignore[no-untyped-call]
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    leave_to_pytorch(monkeypatch)
    monkeypatch.setattr(fused, "stem_of", lambda *given: None)  # what the compiler gets otherwise
    stem = ConvStemConfig(widths=(8, 16), strides=(2, 2))
    config = HybridConfig(**SMALL | {"depth": 1, "image_size": (8, 8), "positions": "learned+rotary"}, conv=stem)
    hardware = Hardware(device=torch.device("cpu"), precision="bf16", compile=True, reasons={}, graph=True, fused=True)
    seen: list[weakref.ref[ViT]] = []
    for _ in range(2):
        model = HybridViT(config).train()
        torch.nn.init.normal_(model.head.out.weight)
        images, forward = torch.randn(1, 3, 8, 8), fused.forward(model, hardware)
        logits = forward(images)
        logits.sum().backward()
        assert torch.equal(logits, fused.forward(model, replace(hardware, compile=False))(images)), "its own weights"
        assert counter.frame_count == 1
        seen.append(weakref.ref(model))
    del model, forward, logits
    gc.collect()
    assert not any(reference() is not None for reference in seen)
