"""Run Triton kernels on the CPU: in Triton's interpreter, with a Hardware that claims to be a GPU."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitral.device.select import Hardware
from vitral.models.vit import ViT, ViTConfig

pytest.importorskip("triton", reason="Triton is part of PyTorch's CUDA builds, and of the dev extra on Linux")

from triton.runtime import interpreter

requires_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1; test_gpu.py runs on a GPU"
)

builtin_names: dict[Any, list[str]] = {}


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Replace the builtins of a part of triton.language, as the interpreter does, but search for them only once.

    The interpreter searches in every launch and whenever a kernel calls another function, such as `tl.sum`, which
    takes a third of its time.
    """
    is_builtin = interpreter.tl.core.is_builtin
    if package not in builtin_names:
        builtin_names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
    names = builtin_names[package]
    if names and is_builtin(getattr(package, names[0])):  # otherwise the caller has replaced all of them
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


interpreter._patch_builtin = patch_builtins

ROUNDED_WITH_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}
convert_float = interpreter._convert_float


def convert_float_as_on_a_gpu(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Round fp32 to the nearest FP8 or bf16 value. The interpreter truncates to bf16 unless told otherwise, and halves
    every second value whose rounding carries into the exponent: 125 becomes 64 instead of 128 in FP8."""
    dtype = ROUNDED_WITH_TORCH.get(target.name)
    if source.name != "fp32" or dtype is None:
        return convert_float(values, source, target, rounding_mode)
    tensor = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(dtype)
    bits = tensor.view(torch.uint8).numpy() if dtype.itemsize == 1 else tensor.view(torch.uint16).numpy()
    return bits.reshape(values.shape)


interpreter._convert_float = convert_float_as_on_a_gpu
create_dot = interpreter.InterpreterBuilder.create_dot


def create_dot_of_bf16(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Multiply bf16 matrices in fp32. The interpreter multiplies the integers that their bits represent."""
    if a.dtype == interpreter.tl.bfloat16:
        a, b = (builder.cast_impl(operand, interpreter.tl.float32) for operand in (a, b))
    return create_dot(builder, a, b, d, *options)


interpreter.InterpreterBuilder.create_dot = create_dot_of_bf16


def fake_gpu(**overrides: Any) -> Hardware:
    """Hardware on the CPU that uses Triton kernels."""
    reasons = {"device": "test", "precision": "test", "compile": "test"}
    settings: dict[str, Any] = {"precision": "bf16", "compile": False, "use_triton": True} | overrides
    return Hardware(device=torch.device("cpu"), reasons=reasons, **settings)


def small_model(image_size: int, **overrides: Any) -> tuple[ViT, Tensor]:
    """A model without trivial weights (no bias is 0, no norm weight is 1), and tokens (2, T, D) for its encoder."""
    settings: dict[str, Any] = {
        "image_size": (image_size, image_size), "patch_size": 4, "num_classes": 2, "width": 48, "heads": 2,
        "mlp_width": 64, "depth": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = ViT(ViTConfig(**settings | overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, model.embed(torch.randn(2, 3, image_size, image_size), model.config.grid).detach()


def relative_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-4)).item()


def emulate_fp8_gemms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> list[tuple[int, ...]]:
    """Compute FP8 GEMMs, which need a GPU, in fp32 on the same values. Returns the list of their shapes (M, K, N).

    dtype: of their outputs, except weight gradients; on a GPU it is bf16.
    """
    shapes: list[tuple[int, ...]] = []

    def fp8_linear(x: Any, weight: Any, bias: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Any]:
        shapes.append((*x.data.shape, len(weight.data)))
        product = (x.data.float() * x.scales) @ (weight.data.float() * weight.scales).t()
        product = (product if bias is None else product + bias).to(dtype)
        return product if out is None else out.copy_(product), (x.row_norms, weight.bound)

    def wgrad_gemm(grad_out_t: Tensor, x_t: Tensor, grad_out_scale: Tensor, x_scale: Tensor) -> Tensor:
        shapes.append((len(grad_out_t), grad_out_t.shape[1], len(x_t)))
        aligned = not any(scale.data_ptr() % 16 for scale in (grad_out_scale, x_scale))
        assert aligned, "GEMMs on a GPU read scales at multiples of 16 bytes"
        return (grad_out_t.float() * grad_out_scale) @ (x_t.float() * x_scale).t()

    monkeypatch.setattr("vitral.kernels.linear.fp8_linear", fp8_linear)
    monkeypatch.setattr("vitral.kernels.fp8_wgrad.op.wgrad_gemm", wgrad_gemm)
    return shapes


class KernelSpy:
    """Stands in for a kernel: counts its launches and the variants requested in dry runs, then launches it."""

    def __init__(self, kernel: Any, run: bool = True) -> None:
        self.kernel, self.run = kernel, run
        self.launches = self.variants = 0

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        self.variants += 1

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self.launches += 1
        return self.kernel[grid] if self.run else lambda *args, **kwargs: None


def spy_on(monkeypatch: pytest.MonkeyPatch, package: str, kernel: str, run: bool = True) -> KernelSpy:
    """Count the launches of `vitral.kernels.<package>.kernel.<kernel>`; with `run=False`, launch nothing."""
    spy = KernelSpy(getattr(import_module(f"vitral.kernels.{package}.kernel"), kernel), run)
    _replace_kernel(monkeypatch, package, kernel, spy)
    return spy


def break_kernel(monkeypatch: pytest.MonkeyPatch, package: str, kernel: str, launch: Callable[..., Any]) -> None:
    """Replace a kernel by `launch(*args, **kwargs)`: a GPU on which it fails or computes something else."""
    _replace_kernel(monkeypatch, package, kernel, BrokenKernel(launch))


def _replace_kernel(monkeypatch: pytest.MonkeyPatch, package: str, kernel: str, replacement: Any) -> None:
    for module in ("kernel", "op"):  # `op` may have imported the kernel by its name
        monkeypatch.setattr(f"vitral.kernels.{package}.{module}.{kernel}", replacement, raising=module == "kernel")


class BrokenKernel:
    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        pass

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.launch
