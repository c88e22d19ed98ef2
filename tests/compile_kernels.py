"""Every kernel that a training asks for, compiled for GPUs that need not be there: `python compile_kernels.py 80 90`.

A training is gone through with kernels that only note what they were asked; then each variant is compiled.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vitral.fused import encoder, kernels
from vitral.vit import ViT, ViTConfig

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}
KERNELS = (
    "norm",
    "norm_back",
    "act",
    "act_back",
    "turn",
    "turn_back",
    "short",
    "short_back",
    "total",
    "gather",
    "shrink",
)
MODELS: list[dict[str, Any]] = [
    {"qk_norm": True, "positions": "learned+rotary", "pooling": "mean", "gelu": "tanh", "drop_path": 0.2},
    {"pooling": "mean"},
    {"image_size": (64, 64)},
    {"image_size": (64, 64), "qk_norm": True, "positions": "rotary", "qkv_bias": False},
    {"image_size": (64, 64), "positions": "rotary", "width": 768, "heads": 12},
]


class Noting:
    """In a kernel's place: what it was asked with."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.calls.append((self.kernel, given, named))


def train(fp8: bool, spare: int, **changes: Any) -> None:
    sizes = {"image_size": (32, 32), "patch_size": 4, "classes": 10, "width": 256, "depth": 2, "heads": 4}
    model = ViT(ViTConfig(**sizes | changes)).train()
    tokens = model.embed(torch.zeros(4, 3, *model.config.image_size), model.config.grid).detach().requires_grad_()
    fused = encoder.FusedEncoder(model.encoder, fp8, spare=spare, front=model.config.pooling == "class")
    fused(tokens, model.config.grid).sum().backward()


def described(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The types of its arguments, those that are known when it is compiled, and what divides by 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = given[index] if index < len(given) else named[name]
        if index >= len(given) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[index,] = "constexpr", value
            continue
        signature[name] = (
            TYPES[value.dtype] if isinstance(value, torch.Tensor) else {int: "i32", float: "fp32"}[type(value)]
        )
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    return {"fn": kernel, "signature": signature, "constexprs": constants, "attrs": attributes}


def main(capabilities: list[int]) -> None:
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in KERNELS:
        setattr(kernels, name, Noting(getattr(kernels, name), calls))
    encoder.scaled = lambda x, w, bias=None: (
        x.norms.new_zeros(len(x.numbers), len(w.numbers)).bfloat16(),
        (x.norms, w.norms),
    )
    for fp8, spare, changes in itertools.product((False, True), (0, 2**25), MODELS):
        train(fp8, spare, **changes)
    assert {kernel.__name__ for kernel, _, _ in calls} == set(KERNELS)
    done = set()
    for kernel, given, named in calls:
        options = {"num_warps": named["num_warps"]} if "num_warps" in named else {}
        source = described(kernel, given, named)
        if (variant := f"{kernel.__name__} {source} {options}") in done:
            continue
        done.add(variant)
        for capability in capabilities:
            if capability >= 89 or "*fp8e4nv" not in source["signature"].values():
                triton.compile(ASTSource(**source), target=GPUTarget("cuda", capability, 32), options=options)
    print(len(done))


main([int(word) for word in sys.argv[1:]])
