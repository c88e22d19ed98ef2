"""Selection of device, precision and compilation, with a reason for each choice."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from support.common import FakeMachine
from vitral.device.cpu import available_cpus
from vitral.device.select import (
    MIN_STEPS_TO_COMPILE,
    MIN_WIDTH_BF16,
    Hardware,
    bf16_is_faster,
    select_hardware,
)
from vitral.errors import VitralError

MANY_TOKENS = 100_000  # per training step

requires_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_gpu_is_selected_if_available(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    hardware = select_hardware(width=64, steps=MIN_STEPS_TO_COMPILE)
    assert (hardware.device, hardware.precision, hardware.compile) == (torch.device("cuda", 0), "bf16", True)
    has_triton = find_spec("triton") is not None
    assert hardware.reasons == {
        "device": "GPU found",
        "precision": "supported by the GPU",
        "compile": "faster kernels from torch.compile",
        "cuda_graphs": "each step is one replayed CUDA graph",
    } | ({"triton": "fused Triton kernels"} if has_triton else {})
    assert (hardware.use_triton, hardware.fp8) == (has_triton, False)


def test_cuda_means_gpu(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    assert select_hardware(device="cuda").device == select_hardware(device="gpu").device == torch.device("cuda", 0)
    fake_machine(gpu=False)
    with pytest.raises(VitralError, match="no GPU found"):
        select_hardware(device="cuda")


def test_an_unknown_device_is_an_error_that_names_the_variable_for_several_gpus(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    with pytest.raises(VitralError, match="'cuda:1'; expected one of auto, cpu, gpu, cuda") as error:
        select_hardware(device="cuda:1")  # type: ignore[arg-type]
    assert "CUDA_VISIBLE_DEVICES" in error.value.hint


def test_fp8_request_means_bf16_with_fp8_gemms(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    if find_spec("triton") is None:
        with pytest.raises(VitralError, match="Triton"):
            select_hardware(precision="fp8")
        return
    hardware = select_hardware(precision="fp8")
    assert (hardware.precision, hardware.fp8, hardware.use_triton) == ("bf16", True, True)
    assert "FP8" in hardware.reasons["precision"]
    with pytest.raises(VitralError, match="--compile auto or yes"):
        select_hardware(precision="fp8", compile="no")


@requires_triton
def test_fp8_is_selected_automatically_for_training_wide_models(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    hardware = select_hardware(width=768, fp8_tokens=MANY_TOKENS)
    assert (hardware.precision, hardware.fp8, hardware.fp8_is_auto) == ("bf16", True, True)
    assert "bf16 (large GEMMs in FP8: faster, same learning curves)" in str(hardware)
    assert not select_hardware(precision="fp8", width=768, fp8_tokens=MANY_TOKENS).fp8_is_auto
    assert select_hardware(width=384, fp8_tokens=MANY_TOKENS).fp8_is_auto
    other_options: tuple[dict[str, Any], ...] = (
        {"width": 384, "fp8_tokens": MANY_TOKENS // 4},
        {"width": 768, "fp8_tokens": MANY_TOKENS // 16},
        {"width": 192},
        {"width": 768, "fp8_tokens": 0},
        {"width": 768, "precision": "bf16"},
        {"width": 768, "compile": "no"},
        {},
    )
    for options in other_options:
        assert not select_hardware(**{"fp8_tokens": MANY_TOKENS} | options).fp8
    fake_machine(gpu=True, capability=(8, 9))
    assert not select_hardware(width=768, fp8_tokens=MANY_TOKENS).fp8


@requires_triton
def test_without_fp8_records_why(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    hardware = select_hardware(width=768, fp8_tokens=MANY_TOKENS).without_fp8("the self-check failed")
    assert (hardware.fp8, hardware.fp8_is_auto, hardware.precision) == (False, False, "bf16")
    assert hardware.reasons["precision"] == "FP8 is unavailable: the self-check failed"


def test_fp8_request_without_fp8_support_is_refused(fake_machine: FakeMachine) -> None:
    fake_machine()
    with pytest.raises(VitralError, match="FP8 is not supported on a CPU"):
        select_hardware(precision="fp8")
    fake_machine(gpu=True, capability=(8, 0), gpu_name="A100")
    with pytest.raises(VitralError, match="FP8 is not supported on the A100"):
        select_hardware(precision="fp8")


def test_each_rank_selects_its_local_gpu_without_joining(
    fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_machine(gpu=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "7"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    hardware = select_hardware()
    assert hardware.device == torch.device("cuda", 3)
    assert (hardware.world.rank, hardware.world.size, hardware.world.is_rank0) == (7, 8, False)
    assert hardware.reasons["world"] == "8 processes over nccl"
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(VitralError, match="no GPU for local rank 3: PyTorch finds 2"):
        select_hardware()


def test_gpu_without_bf16_uses_fp32(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True, gpu_bf16=False)
    hardware = select_hardware()
    assert (hardware.precision, hardware.reasons["precision"]) == ("fp32", "the GPU does not support bf16")


def test_cpu_is_selected_without_a_gpu(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=False)
    hardware = select_hardware(steps=10**9)
    assert (hardware.device, hardware.compile) == (torch.device("cpu"), False)
    assert hardware.reasons["device"] == "no GPU found"
    assert "takes longer than it saves" in hardware.reasons["compile"]


def test_cpu_request_ignores_the_gpu(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    hardware = select_hardware(device="cpu")
    assert (hardware.device, hardware.reasons["device"]) == (torch.device("cpu"), "--device cpu")


def test_gpu_request_without_a_gpu_is_refused_with_a_hint(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=False)
    with pytest.raises(VitralError, match="no GPU") as error:
        select_hardware(device="gpu")
    assert "--device cpu" in error.value.hint


@pytest.mark.parametrize(
    ("cpu_bf16", "width", "precision", "reason"),
    [
        (False, MIN_WIDTH_BF16, "fp32", "the CPU has no bf16 instructions"),
        (True, MIN_WIDTH_BF16 - 1, "fp32", f"faster than bf16 at width {MIN_WIDTH_BF16 - 1}"),
        (True, MIN_WIDTH_BF16, "bf16", "the CPU has bf16 instructions"),
        (True, None, "bf16", "the CPU has bf16 instructions"),
    ],
)
def test_cpu_uses_bf16_only_where_it_is_faster(
    cpu_bf16: bool, width: int | None, precision: str, reason: str, fake_machine: FakeMachine
) -> None:
    fake_machine(cpu_bf16=cpu_bf16)
    hardware = select_hardware(width=width)
    assert (hardware.precision, hardware.reasons["precision"]) == (precision, reason)


def test_bf16_is_faster_on_gpus_and_for_wide_matrices(fake_machine: FakeMachine) -> None:
    fake_machine(cpu_bf16=True)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [bf16_is_faster(cpu, width) for width in (MIN_WIDTH_BF16 - 1, MIN_WIDTH_BF16)] == [False, True]
    assert bf16_is_faster(gpu, 1)
    fake_machine(cpu_bf16=False)
    assert not bf16_is_faster(cpu, 10_000)


@pytest.mark.parametrize("steps", [1, MIN_STEPS_TO_COMPILE - 1])
def test_short_run_is_not_compiled(steps: int, fake_machine: FakeMachine) -> None:
    fake_machine(gpu=True)
    hardware = select_hardware(steps=steps)
    assert not hardware.compile
    assert hardware.reasons["compile"] == f"{steps} steps are too few to amortise compilation"
    assert select_hardware(steps=MIN_STEPS_TO_COMPILE).compile


def test_explicit_options_win_and_are_the_reason(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=False, cpu_bf16=False)
    hardware = select_hardware(precision="bf16", compile="yes", width=8, steps=1)
    assert (hardware.precision, hardware.compile) == ("bf16", True)
    assert (hardware.reasons["precision"], hardware.reasons["compile"]) == ("--precision bf16", "--compile yes")
    assert not select_hardware(compile="no").compile


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_the_selected_precision(precision: Any, dtype: torch.dtype) -> None:
    hardware = select_hardware(device="cpu", precision=precision)
    layer = nn.Linear(4, 4)
    with hardware.autocast():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_rng_state_round_trip(cpu: Hardware) -> None:
    state = cpu.rng_state()
    expected = torch.rand(5)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(5), expected)


def test_hardware_prints_what_is_used_and_why(fake_machine: FakeMachine) -> None:
    fake_machine(gpu=False, cpu_bf16=True)
    hardware = select_hardware(width=16)
    assert str(hardware).replace("cores", "core") == (
        f"{available_cpus()} CPU core, fp32 (faster than bf16 at width 16); no GPU found"
    )
    hardware.synchronize()
