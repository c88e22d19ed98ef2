"""Check that a dry run compiles every kernel that the real run launches, for a GPU that need not exist.

Kernels are translated to Triton's first intermediate language and not launched; compile_kernels.py compiles them in
full. Prints how many kernels were compiled, by how many threads, and the names of those that the dry runs missed.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.kernels import encoder as fused_encoder
from vitral.kernels import encoder_checks, precompile, self_check
from vitral.kernels import training as kernel_training
from vitral.kernels.block import op as block_op
from vitral.kernels.embed import op as embed_op
from vitral.kernels.inference import make_inference_forward
from vitral.kernels.muon import op as muon_op
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim import muon

CPU = torch.device("cpu")


class FakeDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        launcher_threads.append(threading.get_ident())


compile_threads: list[int] = []
launcher_threads: list[int] = []
missed: list[str] = []


def on_compile(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compile_threads.append(threading.get_ident())
        if threading.current_thread() is threading.main_thread():
            missed.append(src.name)


def train(batch_size: int, fp8: bool, **changes: Any) -> None:
    model = make_model(**changes).train()
    assert encoder_checks.unsupported_reason(model, make_hardware(fp8), batch_size=batch_size) is None
    assert model.training
    forward = kernel_training.make_training_forward(model, make_hardware(fp8), print, batch_size)
    forward(torch.zeros(batch_size, 3, 32, 32)).sum().backward()


def run_inference(fp8: bool = False, **changes: Any) -> None:
    model = make_model(**changes).eval().bfloat16().requires_grad_(False)
    encoder_checks.unsupported_reason(model, make_hardware(fp8), training=False)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    forward = make_inference_forward(
        model, preprocessing, make_hardware(fp8), lambda images: preprocessing.normalise(images).bfloat16()
    )
    with torch.inference_mode():
        for batch_size in (1, 2, 4, 8, 16, 32):
            forward(torch.zeros(batch_size, 3, 32, 32, dtype=torch.uint8))


def step_muon() -> None:
    matrices = [torch.zeros(shape) for shape in ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32))]
    for matrix in matrices:
        matrix.grad = torch.zeros_like(matrix)
    groups: list[dict[str, Any]] = [{"params": matrices[:1], "num_matrices": 3}, {"params": matrices[1:]}]
    optimizer = muon.Muon(groups, lr=0.1, weight_decay=0.1)
    optimizer.found_inf = torch.zeros(())
    precompile.precompile(lambda: optimizer.launch_kernels(muon_op))
    optimizer.kernels = muon_op
    optimizer.step()


def make_model(**changes: Any) -> ViT:
    sizes: dict[str, Any] = {"image_size": (32, 32), "patch_size": 4, "num_classes": 10, "width": 128, "depth": 3}
    return ViT(ViTConfig(**sizes | {"heads": 2} | changes))


def make_hardware(fp8: bool) -> Hardware:
    return Hardware(device=CPU, reasons={}, precision="bf16", compile=False, use_triton=True, fp8=fp8)


def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
    return torch.zeros(len(a), b.shape[1], dtype=out_dtype)


def pass_self_check(compare: Callable[[], float], tolerance: float) -> None:
    """Nothing is launched, so every comparison would fail; run it for the kernels that it compiles."""
    compare()


def skip_later_stages(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """Triton's hook to change the stages of a compilation. Without arguments it names the change for the cache."""
    if stages is None:
        return "first stage only", "first stage only"
    for name in list(stages)[1:]:
        del stages[name]

    def make_empty_binary(_: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="kernel", shared=0)
        return b""

    stages[backend.binary_ext] = make_empty_binary
    return None


def patch_triton(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    triton.runtime.driver.set_active(FakeDriver())
    triton.knobs.compilation.listener = on_compile
    triton.knobs.runtime.add_stages_inspection_hook = skip_later_stages
    triton.compiler.CompiledKernel.launch_metadata = lambda *_: None
    triton.compiler.CompiledKernel.run = property(lambda kernel: lambda *_: None)


def main(cache: str) -> None:
    patch_triton(cache)
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
    precompile.available_cpus = lambda *_: 4  # type: ignore[attr-defined]
    for module in (encoder_checks, kernel_training, embed_op, self_check):
        module.self_check_failure = pass_self_check  # type: ignore[attr-defined]
    block_op.MIN_BLOCK_TOKENS = block_op.MIN_EXPAND_TOKENS = 0
    train(48, False)
    fused_encoder.RECOMPUTE_THRESHOLD = 1000  # as for a large batch: activations are recomputed, blocks are one kernel
    for batch_size, pooling in ((48, "class"), (50, "mean")):
        train(batch_size, False, patch_size=8, pooling=pooling, width=192, heads=3)
    fused_encoder.RECOMPUTE_THRESHOLD = 2**25
    train(50, True, pooling="mean", drop_path=0.2, qk_norm=True, positions="rotary")
    run_inference()
    run_inference(patch_size=8, width=192, heads=3)
    run_inference(fp8=True, patch_size=8, width=192, heads=3)
    run_inference(fp8=True, pooling="mean")
    step_muon()
    assert len(compile_threads) == len(launcher_threads)
    print(len(compile_threads), len(set(compile_threads)), *missed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache_folder:
        main(cache_folder)
