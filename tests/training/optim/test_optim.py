"""Parameter groups, the learning rate over time, averaged weights, Muon."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from vitral.training.optim.build import EMA, learning_rate, make_optimizers, restore_optimizer, set_learning_rate

from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import OptimConfig
from vitral.training.optim import muon
from vitral.training.optim.muon import Muon, orthogonalise

SMALL = {"image_size": (8, 8), "patch_size": 4, "channels": 1, "classes": 3, "width": 16, "depth": 2, "heads": 2}
CONFIGS = [
    ViTConfig(**SMALL, pooling=pooling, positions=positions, registers=registers, qk_norm=qk_norm)  # type: ignore[arg-type]
    for pooling, positions, registers, qk_norm in itertools.product(
        ("class", "mean", "attention"), ("learned", "sincos", "rotary", "learned+rotary", "none"), (0, 3), (False, True)
    )
]
CONFIGS.append(ViTConfig(**SMALL, layer_scale=0.1, head="mlp", qkv_bias=False))  # type: ignore[arg-type]


def is_a_map(module: nn.Module, own_name: str) -> bool:
    return isinstance(module, nn.Linear) and own_name == "weight"


def maps_of(model: nn.Module) -> set[int]:
    """The weights of linear maps: all that weight decay is meant for."""
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_a_map(module, name)
    }


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_decay_falls_on_linear_maps_alone_and_each_parameter_moves_exactly_once(name: str) -> None:
    models: list[nn.Module] = [ViT(config) for config in CONFIGS]
    models.append(DistilledViT(ViTConfig(**SMALL)))  # type: ignore[arg-type]
    for model in models:
        optimizers = make_optimizers(model, OptimConfig(name=name, weight_decay=0.3))  # type: ignore[arg-type]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        moved = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(moved) == sorted(id(parameter) for parameter in model.parameters())
        decayed = {id(p) for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
        spared = {id(p) for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
        assert decayed == maps_of(model)
        assert decayed | spared == set(moved)


def test_muon_moves_the_encoders_matrices_and_adamw_the_rest() -> None:
    for config in CONFIGS:
        model = ViT(config)
        first, second = make_optimizers(model, OptimConfig(name="muon"))
        assert isinstance(first, Muon)
        assert isinstance(second, torch.optim.AdamW)
        in_blocks = {id(p) for p in model.encoder.blocks.parameters() if p.ndim == 2}
        assert {id(p) for group in first.param_groups for p in group["params"]} == in_blocks


def test_the_settings_of_a_recipe_reach_the_optimizer() -> None:
    model = ViT(CONFIGS[0])
    (adamw,) = make_optimizers(model, OptimConfig(lr=0.3, betas=(0.8, 0.7)))
    assert all((g["lr"], g["betas"]) == (0.3, (0.8, 0.7)) for g in adamw.param_groups)
    (sgd,) = make_optimizers(model, OptimConfig(name="sgd", lr=0.2, momentum=0.6))
    assert all((g["lr"], g["momentum"]) == (0.2, 0.6) for g in sgd.param_groups)
    both = make_optimizers(model, OptimConfig(name="muon"))
    set_learning_rate(both, 0.125)
    assert {group["lr"] for optimizer in both for group in optimizer.param_groups} == {0.125}


# ── the learning rate ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("warmup", [0.1, 10.0])
def test_warm_up_is_a_straight_climb_whether_a_share_or_steps(warmup: float) -> None:
    optim = OptimConfig(lr=2.0, warmup=warmup)
    for step in range(10):
        assert learning_rate(step, 100, optim) == pytest.approx(2.0 * (step + 1) / 11)
    assert learning_rate(10, 100, optim) == 2.0


def test_the_schedules_are_their_closed_forms() -> None:
    for step in range(20, 101):
        share = (step - 20) / 80
        forms = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "constant": 1.0}
        for schedule, form in forms.items():
            for final in (0.0, 0.1, 1.0):
                optim = OptimConfig(lr=0.5, warmup=0.2, schedule=schedule, final_lr=final)  # type: ignore[arg-type]
                assert learning_rate(step, 100, optim) == pytest.approx(0.5 * (final + (1 - final) * form))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.37, 0.99, 1.0, 5.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 15, 100, 1234])
def test_the_learning_rate_peaks_at_lr_never_jumps_and_is_never_negative(
    schedule: str, warmup: float, steps: int
) -> None:
    optim = OptimConfig(lr=0.25, warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(step, steps, optim) for step in range(steps + 1)]
    assert all(rate >= 0 for rate in rates)
    climb = round(warmup * steps) if warmup < 1 else int(warmup)
    if climb < steps:
        assert max(rates) == 0.25
        peak = rates.index(0.25)
        assert peak == climb
        assert rates[: peak + 1] == sorted(rates[: peak + 1])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        # No step changes the rate by more than the steepest of climb and fall (a half cosine's is π/2 of a line's).
        largest = max(1 / (climb + 1), math.pi / 2 / max(steps - climb, 1))
        assert all(abs(b - a) <= 0.25 * largest + 1e-12 for a, b in itertools.pairwise(rates))
    else:
        assert max(rates) <= 0.25


def test_the_last_rate_is_the_final_share_of_the_peak() -> None:
    for schedule in ("cosine", "linear"):
        optim = OptimConfig(lr=0.5, schedule=schedule, final_lr=0.1)
        assert learning_rate(300, 300, optim) == pytest.approx(0.05)


# ── averaged weights ───────────────────────────────────────────────────────────────────────────────────────────


class Single(nn.Module):
    """One number that a test can set."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.value.fill_(value)


def test_weights_that_stay_are_their_own_average() -> None:
    model = Single(0.3)
    averaged = EMA(model, 0.1, 1000)
    for step in range(100):
        averaged.update(torch.tensor(step))
    assert averaged.model.value.item() == pytest.approx(0.3, abs=1e-12)  # type: ignore[operator]


def test_the_average_of_a_ramp_lags_by_the_memory() -> None:
    """Of a value that grows by 1 a step, an average with memory m is m - 1 behind."""
    model = Single(0.0)
    averaged = EMA(model, 0.02, 1000)
    for step in range(1000):
        model.set(float(step))
        averaged.update(torch.tensor(step))
    assert averaged.memory == 20
    assert averaged.model.value.item() == pytest.approx(999 - 19, abs=1e-6)  # type: ignore[operator]


def test_the_first_steps_are_followed_closely() -> None:
    model = Single(100.0)
    averaged = EMA(model, 0.5, 10_000)
    for step in range(20):
        model.set(0.0)
        averaged.update(torch.tensor(step))
    assert averaged.model.value.item() < 0.1  # type: ignore[operator]


def test_after_a_short_run_nothing_of_the_random_start_is_left() -> None:
    for share in (0.02, 0.1, 0.3, 0.9):
        model = Single(1000.0)
        averaged = EMA(model, share, 50)
        for step in range(50):
            model.set(1.0)
            averaged.update(torch.tensor(step))
        assert abs(averaged.model.value.item() - 1) < 1, share  # type: ignore[operator]


def test_the_average_is_a_model_of_its_own() -> None:
    model = ViT(CONFIGS[0])
    averaged = EMA(model, 0.1, 100)
    assert not any(parameter.requires_grad for parameter in averaged.model.parameters())
    assert not averaged.model.training
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.head.out.weight.fill_(1.0)  # type: ignore[union-attr, operator]
    assert averaged.model.head.out.weight.abs().max() == 0  # type: ignore[union-attr, operator]


# ── Muon ───────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [(16, 16), (16, 64), (64, 16), (16, 64), (48, 16), (16, 16)]


def matrices(seed: int = 0) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draws)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=draws) * 10.0 ** (step % 3 - 1) for shape in SHAPES]


def go(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("bf16", [False, True])
def test_muon_steps_like_torchs_own(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "bf16_is_faster", lambda *_: bf16)
    ours, theirs = matrices(), matrices()
    before = matrices()
    lr = 0.02
    go(Muon(ours, lr=lr, weight_decay=0.1), ours, range(6))
    reference = torch.optim.Muon(theirs, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    go(reference, theirs, range(6))
    for mine, other, start in zip(ours, theirs, before, strict=True):
        way = (other - start).norm()
        assert (mine - other).norm() < 0.02 * way  # bf16 has three digits; the way has six steps
        assert way > 0.1


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24), (1, 40), (40, 1)])
def test_singular_values_of_an_orthogonalised_matrix_are_near_one(shape: tuple[int, int]) -> None:
    draws = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(shape[0], shape[0], generator=draws)).Q[:, : min(shape)]
    right = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=draws)).Q[:, : min(shape)]
    values = torch.logspace(0, -1.5, min(shape))
    for size in (1e-3, 1.0, 1e4):
        result = orthogonalise((left @ (size * values).diag() @ right.T)[None])[0].float()
        assert result.shape == shape
        found = torch.linalg.svdvals(result)
        assert found.min() > 0.6
        assert found.max() < 1.3
        toward = (left.T @ result @ right).diag()  # the same singular vectors, in the same order
        assert toward.min() > 0.6


def test_matrices_orthogonalised_together_come_out_as_one_by_one() -> None:
    for shape in ((5, 16, 48), (5, 48, 16), (5, 16, 16)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        alone = torch.stack([orthogonalise(matrix[None])[0] for matrix in stack])
        torch.testing.assert_close(orthogonalise(stack), alone, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_zeros_moves_nothing_but_decay() -> None:
    parameter = nn.Parameter(torch.ones(4, 8))
    parameter.grad = torch.zeros(4, 8)
    Muon([parameter], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(parameter.detach(), torch.full((4, 8), 0.95))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_muon_refuses_what_is_not_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Muon needs 2-D parameters"):
        Muon([nn.Parameter(torch.zeros(shape))], lr=0.1, weight_decay=0.0)


def test_an_optimizer_that_begins_early_goes_when_nobody_holds_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    muon = Muon([parameter], lr=0.1, weight_decay=0.0)
    muon.overlap_with_backward()
    gone = [weakref.ref(muon), weakref.ref(parameter)]
    del muon, parameter
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_muon_passes_over_parameters_without_a_gradient() -> None:
    moved, left = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    moved.grad = torch.eye(4)
    Muon([moved, left], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(left, torch.ones(4, 4))
    assert not torch.equal(moved, torch.ones(4, 4))


def test_muon_goes_on_from_its_saved_state_bit_for_bit() -> None:
    straight = matrices()
    go(Muon(straight, lr=0.02, weight_decay=0.1), straight, range(6))
    first = matrices()
    optimizer = Muon(first, lr=0.02, weight_decay=0.1)
    go(optimizer, first, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    again = Muon(second, lr=99.0, weight_decay=0.0)
    again.load_state_dict(saved)
    go(again, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight, second, strict=True))


def test_queries_keys_and_values_are_three_maps() -> None:
    draws = torch.Generator().manual_seed(11)
    start, gradient = (torch.randn(24, 8, generator=draws) for _ in range(2))
    together = nn.Parameter(start.clone())
    together.grad = gradient.clone()
    Muon([{"params": [together], "num_matrices": 3}], lr=0.1, weight_decay=0.1).step()
    apart = [nn.Parameter(part.clone()) for part in start.chunk(3)]
    for part, its in zip(apart, gradient.chunk(3), strict=True):
        part.grad = its.clone()
    Muon(apart, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(together.detach(), torch.cat([part.detach() for part in apart]))
    model = ViT(ViTConfig(**SMALL))  # type: ignore[arg-type]
    parts = {
        id(p): group["num_matrices"]
        for group in make_optimizers(model, OptimConfig(name="muon"))[0].param_groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert parts.get(id(parameter), 1) == (3 if name.endswith("qkv.weight") else 1)


@pytest.mark.parametrize("name", ["sgd", "muon"])  # torch's AdamW takes a tensor on a GPU alone
def test_a_learning_rate_on_the_device_moves_weights_as_a_number_does(name: str) -> None:
    def moved(on_device: torch.device | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = ViT(ViTConfig(**SMALL))  # type: ignore[arg-type]
        optimizers = make_optimizers(model, OptimConfig(name=name, layer_decay=0.8), on_device)  # type: ignore[arg-type]
        for step in range(3):
            set_learning_rate(optimizers, 0.01 * (step + 1))
            for parameter in model.parameters():
                parameter.grad = torch.cos(parameter.detach() * (step + 7))
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for number, tensor in zip(moved(None), moved(torch.device("cpu")), strict=True):
        torch.testing.assert_close(number, tensor)


def test_a_restored_optimizer_keeps_its_tensors_and_its_kind_of_learning_rate() -> None:
    parameters = matrices()
    optimizer = Muon(parameters, lr=0.02, weight_decay=0.1)
    go(optimizer, parameters, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    go(optimizer, parameters, range(2, 4))
    addresses = [optimizer.state[p]["momentum"].data_ptr() for p in parameters]
    restore_optimizer(optimizer, saved)
    assert [optimizer.state[p]["momentum"].data_ptr() for p in parameters] == addresses
    for parameter, before in zip(parameters, saved["state"].values(), strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum"], before["momentum"])
    on_device = Muon(matrices(), lr=torch.tensor(1.0), weight_decay=0.1)
    dial = on_device.param_groups[0]["lr"]
    restore_optimizer(on_device, saved)
    assert on_device.param_groups[0]["lr"] is dial
    assert dial.item() == pytest.approx(0.02)
    restore_optimizer(optimizer, on_device.state_dict())
    assert isinstance(optimizer.param_groups[0]["lr"], float)
