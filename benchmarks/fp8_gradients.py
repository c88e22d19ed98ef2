"""Error of FP8 weight gradients: a trained model on the CPU in fp32, with the rounding of FP8 training.

    python benchmarks/fp8_gradients.py MODEL FOLDER [--max-images 48] [--wrong-labels 0.2]

MODEL and FOLDER as for fp8_predictions.py. Labels are the model's own predictions, a fifth of them replaced by random
ones: a few images then have large gradients and most have tiny ones, as late in training. A weight gradient sums over
tokens, which cannot have scales of their own in an FP8 GEMM. The kernels use the largest token's scale for all and
multiply the relative scales of the tokens into the other operand (vitral/kernels/fp8_wgrad). For comparison: one scale
per token in both operands, which no GEMM supports, and bf16. All sums are exact here.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from _output import add_output_arguments, write_results
from fp8_predictions import FP8_MAX, load_images
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT

LAYERS = ("qkv", "expand", "contract")
METHODS = ("shared scale", "scale per token", "bf16")
GELU_MAX_SLOPE = 1.13

Operands = dict[str, tuple[Tensor, Tensor]]  # layer -> input (M, K) and output gradient (M, N)


def round_to_fp8(x: Tensor) -> Tensor:
    """Cast to e4m3 and back. Larger values would saturate."""
    assert x.abs().max() <= FP8_MAX * 1.001
    return x.to(torch.float8_e4m3fn).float()


def wgrad_with_shared_scale(grad_out: Tensor, grad_scales: Tensor, x: Tensor, x_scale: Tensor, split: bool) -> Tensor:
    """grad_outᵀ·x as the kernels compute it. With `split`, relative scales go into both operands."""
    relative = grad_scales / grad_scales.max()
    root = torch.exp2((0.5 * relative.log2()).ceil()) if split else torch.ones_like(relative)
    grad_operand = round_to_fp8(round_to_fp8(grad_out / grad_scales) * root)
    x_operand = round_to_fp8(x * (relative / root) / x_scale)
    return grad_operand.t() @ x_operand * grad_scales.max() * x_scale


def round_rows_to_fp8(x: Tensor) -> Tensor:
    """With one scale per row."""
    scales = row_scales(x)
    return round_to_fp8(x / scales) * scales


def row_scales(x: Tensor) -> Tensor:
    """The norm of each row bounds its values."""
    return (x.norm(dim=1, keepdim=True) + 1e-12) / FP8_MAX


def layernorm_scale(norm: Any) -> Tensor:
    """From the bound of any output row of a LayerNorm."""
    return norm.weight.numel() ** 0.5 * (norm.weight.abs().max() + norm.bias.abs().max()) / FP8_MAX


def wgrad_errors(block: Any, operands: Operands) -> dict[str, dict[str, float]]:
    """For each layer the relative error by method, and the median of the tokens' relative scales."""
    expand, contract = block.mlp.expand, block.mlp.contract
    branch_scales, norm2_scale = row_scales(operands["contract"][1]), layernorm_scale(block.norm2)
    gelu_scale = norm2_scale * expand.weight.norm(dim=1).max() + expand.bias.abs().max() / FP8_MAX
    hidden_scales = branch_scales * GELU_MAX_SLOPE * contract.weight.norm(dim=0).max()
    scales = {
        "qkv": (row_scales(operands["qkv"][1]), layernorm_scale(block.norm1), False),
        "expand": (hidden_scales, norm2_scale, False),
        "contract": (branch_scales, gelu_scale, True),
    }
    errors = {}
    for name, (x, grad_out) in operands.items():
        exact = grad_out.t() @ x
        results = {
            "shared scale": wgrad_with_shared_scale(grad_out, scales[name][0], x, *scales[name][1:]),
            "scale per token": round_rows_to_fp8(grad_out).t() @ round_rows_to_fp8(x),
            "bf16": grad_out.bfloat16().float().t() @ x.bfloat16().float(),
        }
        errors[name] = {method: ((wgrad - exact).norm() / exact.norm()).item() for method, wgrad in results.items()}
        errors[name]["median_relative_scale"] = (scales[name][0] / scales[name][0].max()).median().item()
    return errors


def collect_operands(model: ViT, images_BCHW: Tensor, wrong_labels: float) -> list[Operands]:
    """Inputs and output gradients of the linear layers of each block."""
    recorded: list[dict[str, Any]] = []
    for block in model.encoder.blocks:
        recorded.append({})
        for name in LAYERS:
            layer = block.get_submodule("attention.qkv" if name == "qkv" else f"mlp.{name}")

            def hook(_: object, args: tuple[Tensor], out: Tensor, record: Any = recorded[-1], name: str = name) -> None:
                out.retain_grad()
                record[name] = (args[0].detach().flatten(0, 1), out)

            layer.register_forward_hook(hook)
    logits = model(images_BCHW)
    rng = torch.Generator().manual_seed(0)
    random_labels = torch.randint(0, logits.shape[1], (len(logits),), generator=rng)
    labels = logits.argmax(1).where(torch.rand(len(logits), generator=rng) >= wrong_labels, random_labels)
    F.cross_entropy(logits, labels).backward()
    return [{name: (x, out.grad.flatten(0, 1)) for name, (x, out) in block.items()} for block in recorded]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-images", type=int, default=48)
    parser.add_argument("--wrong-labels", type=float, default=0.2, help="fraction of labels replaced by random ones")
    add_output_arguments(parser)
    args = parser.parse_args()
    predictor = Predictor.load(args.model, device="cpu")
    images, model = load_images(args.folder, predictor, args.max_images), predictor.model.eval().requires_grad_()
    operands = collect_operands(model, predictor.model_config.preprocessing.normalise(images), args.wrong_labels)
    print(f"{args.model}: {len(images)} images, {len(operands)} blocks, torch {torch.__version__}")
    blocks = [wgrad_errors(block, layers) for block, layers in zip(model.encoder.blocks, operands, strict=True)]
    rows = []
    for name in LAYERS:
        parts = [f"{name:9}"]
        for method in METHODS:
            errors = [block[name][method] for block in blocks]
            row = {"median_error": statistics.median(errors), "min_error": min(errors), "max_error": max(errors)}
            parts.append(f"{method}: error {row['median_error']:.2%} ({min(errors):.2%} - {max(errors):.2%})")
            rows.append({"layer": name, "method": method, **row})
        smallest = min(block[name]["median_relative_scale"] for block in blocks)
        print("   ".join(parts) + f"   smallest median of the tokens' relative scales: {smallest:.0e}")
    write_results(args, rows, {"model": args.model, "images": len(images)}, dtype="fp8")


if __name__ == "__main__":
    main()
