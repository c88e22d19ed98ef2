"""Whether a rehearsal asks for every kernel that follows, for a GPU that need not be there: `python compile_ahead.py`.

Kernels are compiled in earnest, but what would launch them does nothing. Prints how many were compiled, in how many
threads, and which were missing afterwards.
"""

from __future__ import annotations

import os
import tempfile
import threading
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.kernels import encoder
from vitral.kernels import fused_model as fused
from vitral.kernels import linear as weights
from vitral.kernels import precompile as ahead
from vitral.kernels.embed import op as embed
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim import muon

CPU = torch.device("cpu")


class Driver:
    """Of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        launchers.append(threading.get_ident())


compiled: list[int] = []  # by which thread
launchers: list[int] = []
missing: list[str] = []


def compiles(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(threading.get_ident())
        if threading.current_thread() is threading.main_thread():
            missing.append(src.name)


def trains(batch: int, fp8: bool, **changes: Any) -> None:
    model = a_model(**changes).train()
    assert fused.why_not(model, a_gpu(fp8), batch=batch) == ""
    assert model.training
    fused.forward(model, a_gpu(fp8), print, batch)(torch.zeros(batch, 3, 32, 32)).sum().backward()


def answers(fp8: bool = False, **changes: Any) -> None:
    model = a_model(**changes).eval().bfloat16().requires_grad_(False)
    fused.why_not(model, a_gpu(fp8), learning=False)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    answer = fused.answering(model, seen, a_gpu(fp8), lambda images: seen.normalise(images).bfloat16())
    with torch.inference_mode():
        for images in (1, 2, 4, 8, 16, 32):
            answer(torch.zeros(images, 3, 32, 32, dtype=torch.uint8))


def steps_with_muon() -> None:
    matrices = [torch.zeros(shape) for shape in ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32))]
    for matrix in matrices:
        matrix.grad = torch.zeros_like(matrix)
    optimizer = muon.Muon([{"params": matrices[:1], "parts": 3}, {"params": matrices[1:]}], 0.1, 0.1)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    optimizer.step_with_kernels([(group, group["params"]) for group in optimizer.param_groups])


def a_model(**changes: Any) -> ViT:
    sizes = {"image_size": (32, 32), "patch_size": 4, "classes": 10, "width": 128, "depth": 3, "heads": 2}
    return ViT(ViTConfig(**sizes | changes))


def a_gpu(fp8: bool) -> Hardware:
    return Hardware(device=CPU, reasons={}, precision="bf16", compile=False, fused=True, fp8=fp8)


def main(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    triton.runtime.driver.set_active(Driver())
    triton.knobs.compilation.listener = compiles
    triton.compiler.CompiledKernel.launch_metadata = lambda *_: None
    triton.compiler.CompiledKernel.run = property(lambda kernel: lambda *_: None)
    weights.scaled = lambda x, w, bias=None, out=None: (
        x.norms.new_zeros(len(x.numbers), len(w.numbers)).bfloat16(),
        (x.norms, w.norms),
    )
    muon.runs_triton = lambda device: True
    ahead.cores = lambda: 4
    for module in (fused, embed):  # nothing is launched, so that all trials would fail
        module.reason_against = lambda compare, most: (compare(), "")[1]
    fused.MANY = fused.ENOUGH = 0
    trains(48, False)
    for batch, pooling in ((48, "class"), (50, "mean")):  # so large that little is kept, and blocks are one kernel
        fused.SPARE = encoder.SPARE = 1000
        trains(batch, False, patch_size=8, pooling=pooling, width=192, heads=3)
    fused.SPARE = encoder.SPARE = 2**25
    trains(50, True, pooling="mean", drop_path=0.2, qk_norm=True, positions="rotary")
    answers()
    answers(patch_size=8, width=192, heads=3)
    answers(fp8=True, patch_size=8, width=192, heads=3)
    answers(fp8=True, pooling="mean")
    steps_with_muon()
    assert len(compiled) == len(launchers)
    print(len(compiled), len(set(compiled)), *missing)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        main(cache)
