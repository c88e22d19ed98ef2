"""Which device, numbers and compilation are chosen, and that each choice says why."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from vitral.device import hardware
from vitral.device.hardware import STEPS_WORTH_COMPILING, WIDTH_WORTH_BF16, Hardware, bf16_is_faster, choose
from vitral.errors import VitralError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(gpu=…, gpu_bf16=…, cpu_bf16=…)`: what PyTorch will say is there."""

    def is_like(*, gpu: bool = False, gpu_bf16: bool = True, cpu_bf16: bool = True) -> None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: gpu_bf16)
        monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: cpu_bf16)

    return is_like


def test_a_gpu_is_used_where_there_is_one(machine: Any) -> None:
    machine(gpu=True)
    chosen = choose(width=64, steps=STEPS_WORTH_COMPILING)
    assert (chosen.device, chosen.precision, chosen.compile) == (torch.device("cuda", 0), "bf16", True)
    assert chosen.reasons == {
        "device": "GPU found",
        "precision": "the GPU has bf16 units",
        "compile": "the compiler's kernels",
        "graph": "a step is one graph that the GPU replays without Python",
    } | ({"fused": "one kernel for all that stands between two matrix products"} if find_spec("triton") else {})
    assert (chosen.fused, chosen.fp8) == (find_spec("triton") is not None, False)


def test_fp8_is_bf16_with_large_products_in_eight_bits(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    if find_spec("triton") is None:
        with pytest.raises(VitralError, match="Triton"):
            choose(precision="fp8")
        return
    chosen = choose(precision="fp8")
    assert (chosen.precision, chosen.fp8, chosen.fused) == ("bf16", True, True)
    assert "FP8" in chosen.reasons["precision"]
    with pytest.raises(VitralError, match="--compile auto or yes"):
        choose(precision="fp8", compile="no")


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels of our own are Triton's")
def test_wide_models_learn_from_scratch_with_fp8_on_a_gpu_that_has_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpu=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    chosen = choose(width=768, scratch=True)
    assert (chosen.precision, chosen.fp8, chosen.yields) == ("bf16", True, True)
    assert "bf16 (with large products in FP8: faster, and at width 768 it learned as much)" in str(chosen)
    for others in (
        {"width": 384},
        {"width": 768, "scratch": False},
        {"width": 768, "precision": "bf16"},
        {"width": 768, "compile": "no"},
        {},
    ):
        assert not choose(**{"scratch": True} | others).fp8
    assert not choose(precision="fp8", width=768, scratch=True).yields, "whoever asks for it is told if it cannot be"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert not choose(width=768, scratch=True).fp8


def test_fp8_where_there_is_none_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    with pytest.raises(VitralError, match="no FP8 units on a CPU"):
        choose(precision="fp8")
    machine(gpu=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(VitralError, match="no FP8 units on the A100"):
        choose(precision="fp8")


def test_each_process_of_a_group_takes_its_own_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu=True)
    met: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: met.append(str(device)))
    monkeypatch.setattr(hardware, "join", lambda world, backend: met.append(backend))
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "7"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    chosen = choose()
    assert chosen.device == torch.device("cuda", 3)
    assert (chosen.world.rank, chosen.world.size, chosen.world.first) == (7, 8, False)
    assert met == ["cuda:3", "cpu:gloo,cuda:nccl"]
    assert chosen.reasons["world"] == "8 processes, which talk through nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(VitralError, match="process 3 on this machine has no GPU of its own: PyTorch sees 2"):
        choose()


def test_an_old_gpu_computes_in_fp32(machine: Any) -> None:
    machine(gpu=True, gpu_bf16=False)
    chosen = choose()
    assert (chosen.precision, chosen.reasons["precision"]) == ("fp32", "the GPU has no bf16 units")


def test_without_a_gpu_the_cpu_computes_and_says_so(machine: Any) -> None:
    machine(gpu=False)
    chosen = choose(steps=10**9)
    assert (chosen.device, chosen.compile) == (torch.device("cpu"), False)
    assert chosen.reasons["device"] == "no GPU found, computing on the CPU"
    assert "compiling takes longer" in chosen.reasons["compile"]


def test_a_gpu_that_is_not_wanted_is_left_alone(machine: Any) -> None:
    machine(gpu=True)
    chosen = choose(device="cpu")
    assert (chosen.device, chosen.reasons["device"]) == (torch.device("cpu"), "on the CPU, as asked")


def test_asking_for_a_gpu_where_there_is_none_is_an_error_with_a_way_out(machine: Any) -> None:
    machine(gpu=False)
    with pytest.raises(VitralError, match="no GPU") as caught:
        choose(device="gpu")
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("cpu_bf16", "width", "precision", "reason"),
    [
        (False, WIDTH_WORTH_BF16, "fp32", "the CPU has no bf16 instructions"),
        (True, WIDTH_WORTH_BF16 - 1, "fp32", f"at width {WIDTH_WORTH_BF16 - 1} a CPU is faster in fp32"),
        (True, WIDTH_WORTH_BF16, "bf16", "the CPU has bf16 instructions"),
        (True, None, "bf16", "the CPU has bf16 instructions"),
    ],
)
def test_a_cpu_uses_bf16_only_where_it_is_faster(
    cpu_bf16: bool, width: int | None, precision: str, reason: str, machine: Any
) -> None:
    machine(cpu_bf16=cpu_bf16)
    chosen = choose(width=width)
    assert (chosen.precision, chosen.reasons["precision"]) == (precision, reason)


def test_matrices_are_orthogonalised_in_bf16_where_it_is_faster(machine: Any) -> None:
    machine(cpu_bf16=True)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [bf16_is_faster(cpu, width) for width in (WIDTH_WORTH_BF16 - 1, WIDTH_WORTH_BF16)] == [False, True]
    assert bf16_is_faster(gpu, 1)
    machine(cpu_bf16=False)
    assert not bf16_is_faster(cpu, 10_000)


@pytest.mark.parametrize("steps", [1, STEPS_WORTH_COMPILING - 1])
def test_a_short_run_is_not_compiled(steps: int, machine: Any) -> None:
    machine(gpu=True)
    chosen = choose(steps=steps)
    assert (chosen.compile, chosen.reasons["compile"]) == (False, f"{steps} steps are too few to earn it back")
    assert choose(steps=STEPS_WORTH_COMPILING).compile


def test_what_is_asked_for_is_done_and_noted(machine: Any) -> None:
    machine(gpu=False, cpu_bf16=False)
    chosen = choose(precision="bf16", compile="yes", width=8, steps=1)
    assert (chosen.precision, chosen.compile) == ("bf16", True)
    assert chosen.reasons["precision"] == chosen.reasons["compile"] == "as asked"
    assert not choose(compile="no").compile


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_the_numbers_it_names(precision: Any, dtype: torch.dtype) -> None:
    chosen = choose(device="cpu", precision=precision)
    layer = nn.Linear(4, 4)
    with chosen.autocast():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_the_random_state_comes_back_as_it_was(cpu: Hardware) -> None:
    state = cpu.random_state()
    first = torch.rand(5)
    cpu.set_random_state(state)
    assert torch.equal(first, torch.rand(5))


def test_a_person_reads_what_is_used_and_why(machine: Any) -> None:
    machine(gpu=False, cpu_bf16=True)
    chosen = choose(width=16)
    assert str(chosen) == "1 core, fp32 (at width 16 a CPU is faster in fp32) · no GPU found, computing on the CPU"
    chosen.synchronize()


def test_tensors_that_are_gathered_stay_what_they_are() -> None:
    layer, plain = torch.nn.Linear(3, 4), torch.arange(5.0)
    wanted = [tensor.detach().clone() for tensor in (*layer.parameters(), plain)]
    choose(device="cpu").gather([*layer.parameters(), plain])
    assert all(map(torch.equal, (*layer.parameters(), plain), wanted))
    assert layer.weight.requires_grad
