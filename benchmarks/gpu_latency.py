"""Latency of a few images on a GPU, B/16, from uint8 on the GPU to logits on the CPU: variants in one run.

    python benchmarks/gpu_latency.py [--batch-sizes 1 8] [--no-timm] [--budget 60] [--save]

timm       torch.compile with CUDA graphs (mode="reduce-overhead"), bf16 weights, normalised bf16 input.
bf16, fp8  The CUDA engine as Predictor uses it: fused kernels, CUDA graphs.
pinned     The same kernels with the copy of the logits to pinned memory inside the graph.
small      A prototype for few tokens, in a graph like "pinned": five kernels per block instead of eight. The layer
           norms are folded into the GEMMs after them: with the norm's weight in W, LN(x)·Wᵀ = rstd·(x·Wᵀ - mean·Σ W),
           and mean and rstd come from the tiles that the GEMM reads anyway; bias, GELU and the residual are epilogues.
           Tiles are (tokens, columns, step of the sum, warps). "pdl": programmatic dependent launch.

Reported: median and minimum over the calls of the time until the logits are on the CPU, the time of the graph alone on
the GPU, and the relative error of the logits against fp32. Variants that fail are reported with their error.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from _output import add_output_arguments, write_results
from peers import Case, error_summary, has_gpu, make_peer_step, model_config
from vitral.data.preprocess import Preprocessing
from vitral.kernels.attention import op as attention_op
from vitral.kernels.embed.op import make_inference_embedding
from vitral.kernels.layernorm_gelu.gelu import gelu_and_slope
from vitral.models.vit import ViT

Tile = tuple[int, int, int, int]
DEFAULT_TILES: dict[str, Tile] = {
    "qkv": (64, 64, 128, 4), "project": (32, 32, 128, 4), "expand": (64, 64, 128, 4), "contract": (32, 32, 256, 4)
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Tile], int, bool]] = {  # tiles, queries per attention program, pdl
    "small": ({}, 64, False),
    "small attention-32": ({}, 32, False),
    "small wide": ({"qkv": (64, 128, 64, 4), "expand": (64, 128, 64, 4), "contract": (64, 32, 128, 4)}, 32, False),
    "small tall": ({"qkv": (128, 64, 64, 8), "expand": (128, 64, 64, 8), "contract": (64, 64, 128, 4)}, 32, False),
    "small fine": ({"qkv": (32, 64, 128, 4), "expand": (32, 64, 128, 4), "contract": (32, 64, 128, 4)}, 32, False),
    "small pdl": ({}, 32, True),
}


@triton.jit
def small_linear_kernel(
    x_ptr, weight_ptr, weight_sum_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = f(LN(x)·Wᵀ + bias) (+ residual) for a tile of BLOCK_M tokens and BLOCK_N columns; LN, f = GELU optional."""
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    rows = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) // row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    valid = (rows < num_rows)[:, None]
    x_ptrs = x_ptr + rows[:, None] * K + k_range[None, :]
    weight_ptrs = weight_ptr + cols[None, :] * K + k_range[:, None]
    bias = tl.load(bias_ptr + cols).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    total_sq = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, valid, 0.0)
        acc = tl.dot(x, tl.load(weight_ptrs + k), acc)
        if NORM:
            x_fp32 = x.to(tl.float32)
            total += tl.sum(x_fp32, axis=1)
            total_sq += tl.sum(x_fp32 * x_fp32, axis=1)
    if PDL:
        gdc_launch_dependents()
    if NORM:
        mean = total / K
        rstd = tl.rsqrt(tl.maximum(total_sq / K - mean * mean, 0.0) + eps)
        acc = rstd[:, None] * (acc - mean[:, None] * tl.load(weight_sum_ptr + cols)[None, :])
    acc += bias[None, :]
    if GELU:
        acc, _ = gelu_and_slope(acc, False)
    out_ptrs = rows[:, None] * N + cols[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + out_ptrs, valid, 0.0).to(tl.float32)
    tl.store(out_ptr + out_ptrs, acc.to(out_ptr.dtype.element_ty), valid)


class SmallLinear:
    """A linear layer for few tokens, with the layer norm before it folded in."""

    def __init__(self, layer: Any, norm: Any, tile: Tile, gelu: bool, pdl: bool, dtype: torch.dtype) -> None:
        weight, bias = layer.weight.detach().float(), layer.bias.detach().float()
        if norm is not None:
            bias = bias + weight @ norm.bias.float()
            weight = weight * norm.weight.float()
        self.weight, self.bias = weight.to(dtype).contiguous(), bias
        self.weight_sum = self.weight.float().sum(dim=1)
        self.norm, self.tile, self.gelu, self.pdl = norm, tile, gelu, pdl

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        (M, K), N, (block_m, block_n, block_k, warps) = x.shape, len(self.weight), self.tile
        out = x.new_empty(M, N)
        extra: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        small_linear_kernel[(triton.cdiv(M, block_m) * (N // block_n),)](
            x, self.weight, self.weight_sum, self.bias, residual, out, M, 0.0 if self.norm is None else self.norm.eps,
            N=N, K=K, NORM=self.norm is not None, GELU=self.gelu, RESIDUAL=residual is not None, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_K=block_k, PDL=self.pdl, num_warps=warps, num_stages=4, **extra,
        )  # fmt: skip
        return out


class SmallModel:
    """Logits of few images, five kernels per block; class tokens only after the last attention."""

    def __init__(
        self, engine: Any, model: ViT, preprocessing: Preprocessing, tiles: dict[str, Tile], block_m: int, pdl: bool
    ) -> None:
        self.uint8_model, self.block_m, self.dtype = engine.model, block_m, engine.model.dtype
        self.norm: Any = model.encoder.norm
        half = engine.model
        self.embed = make_inference_embedding(half.model, preprocessing, engine.hardware, half.normalise)
        tiles = DEFAULT_TILES | tiles

        def make(layer: Any, norm: Any, name: str) -> SmallLinear:
            return SmallLinear(layer, norm, tiles[name], name == "expand", pdl, self.dtype)

        blocks: Any = model.encoder.blocks
        self.blocks = [
            (
                make(block.attention.qkv, block.norm1, "qkv"),
                make(block.attention.project, None, "project"),
                make(block.mlp.expand, block.norm2, "expand"),
                make(block.mlp.contract, None, "contract"),
            )
            for block in blocks
        ]

    def __call__(self, images: Tensor) -> Tensor:
        model, half, norm = self.uint8_model.model, self.uint8_model, self.norm
        grid = model.config.grid
        tokens = model.embed(half.normalise(images), grid) if self.embed is None else self.embed(images)
        B, T, D = tokens.shape
        x, heads = tokens.reshape(B * T, D).contiguous(), model.config.heads
        attention_op.BLOCK_M, before = self.block_m, attention_op.BLOCK_M
        for index, (qkv, project, expand, contract) in enumerate(self.blocks):
            q, k, v = qkv(x).chunk(3, dim=1)
            attended = attention_op.attention_forward(q, k, v, heads, T)[0]
            if index == len(self.blocks) - 1:
                attended, x = attended[::T].contiguous(), x[::T].contiguous()
            x = project(attended, x)
            x = contract(expand(x), x)
        attention_op.BLOCK_M = before
        weight, bias = (p.to(self.dtype) for p in norm.parameters())
        return half.head(torch.nn.functional.layer_norm(x, (D,), weight, bias, norm.eps)).float()


def capture(function: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Callable[[], Tensor], torch.cuda.CUDAGraph]:
    """The function and the copy of its logits as one graph; calls return logits in pinned memory."""
    static, stream = images.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            out = function(static)
    torch.cuda.synchronize()
    pinned = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.inference_mode():
        pinned.copy_(function(static), non_blocking=True)

    def call() -> Tensor:
        static.copy_(images)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        return pinned

    return call, graph


def milliseconds(call: Callable[[], object], seconds: float = 1.0) -> tuple[float, float]:
    """Median and minimum."""
    for _ in range(20):
        call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times)


def graph_milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Time of one replay on the GPU, in a row of 200."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(200):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 200


class Measurement:
    """All variants with one batch size."""

    def __init__(self, batch_size: int, deadline: float) -> None:
        from vitral.device.select import select_hardware

        torch.manual_seed(0)
        self.batch_size, self.deadline, self.config = batch_size, deadline, model_config("B/16")
        self.model: Any = ViT(self.config).eval().cuda()
        torch.nn.init.normal_(self.model.get_parameter("head.out.weight"))
        self.preprocessing = Preprocessing(
            image_size=self.config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3
        )
        self.images = torch.randint(0, 256, (batch_size, 3, 224, 224), dtype=torch.uint8, device="cuda")
        with torch.inference_mode():
            self.expected = self.model(self.preprocessing.normalise(self.images)).cpu()
        self.hardware = {name: select_hardware(device="gpu", precision=name) for name in ("bf16", "fp8")}
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, prepare: Callable[[], tuple[Callable[[], Any], torch.cuda.CUDAGraph | None]]) -> None:
        row: dict[str, Any] = {"batch_size": self.batch_size, "variant": name}
        self.rows.append(row)
        if time.time() > self.deadline:
            row["failed"] = "out of time"
        else:
            try:
                call, graph = prepare()
                logits = call()
                if isinstance(logits, Tensor):
                    row["relative_error"] = float((logits.cpu() - self.expected).norm() / self.expected.norm())
                row["median_ms"], row["min_ms"] = milliseconds(call)
                row["graph_ms"] = None if graph is None else graph_milliseconds(graph)
            except Exception as error:
                row["failed"] = error_summary(error)
        figures = [
            f"{key} {row[key]:.4f}" for key in ("median_ms", "min_ms", "graph_ms", "relative_error") if row.get(key)
        ]
        print(f"batch {self.batch_size} {name:20} {row.get('failed') or '  '.join(figures)}", flush=True)

    def prepare_engine(self, engine: Any) -> tuple[Callable[[], Any], None]:
        return lambda: engine(self.images), None

    def prepare_small(
        self, engine: Any, tiles: dict[str, Tile], block_m: int, pdl: bool
    ) -> tuple[Callable[[], Tensor], torch.cuda.CUDAGraph]:
        return capture(SmallModel(engine, self.model, self.preprocessing, tiles, block_m, pdl), self.images)

    def run(self, with_timm: bool) -> list[dict[str, Any]]:
        from vitral.inference.cuda_engine import CudaEngine

        engines = {}
        for name, hardware in self.hardware.items():
            engine = engines[name] = CudaEngine(self.model, self.preprocessing, hardware)
            self.add(name, partial(self.prepare_engine, engine))
            self.add(f"{name} pinned", partial(capture, engine.model, self.images))
        for name, variant in VARIANTS.items():
            self.add(name, partial(self.prepare_small, engines["bf16"], *variant))
        if with_timm:
            case = Case("timm", "B/16", f"latency-{self.batch_size}", "graphs")
            self.add("timm graphs", lambda: (make_peer_step(case, {}), None))
        return self.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-timm", action="store_true")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds; later variants are left out")
    add_output_arguments(parser)
    args = parser.parse_args()
    if not has_gpu():
        print("This benchmark needs a GPU that PyTorch can use, and none was found.")
        return
    deadline, rows = time.time() + args.budget, []
    for batch_size in args.batch_sizes:
        rows += Measurement(batch_size, deadline).run(not args.no_timm)
    write_results(args, rows, dtype="bf16", packages=("torch", "triton", "timm"))


if __name__ == "__main__":
    main()
