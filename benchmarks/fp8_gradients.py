"""How far FP8 moves the gradients of weights: a trained model on a CPU in fp32, with the roundings of --precision fp8.

    python benchmarks/fp8_gradients.py CHECKPOINT FOLDER [--most 48] [--wrong 0.2]

CHECKPOINT and FOLDER as for fp8_answers.py. Labels are the model's own first answers, a fifth of them replaced by any
other: some pictures then have large gradients and most have tiny ones, as late in a training. A weight's gradient sums
over tokens, which cannot have scales of their own in a product of FP8: the largest token's stands for all, and what is
left of the others' is multiplied into the other matrix (vitral/fused/columns_kernels.py). Beside it what could be had
at best, a scale for each token in both matrices, and bf16. All sums are exact here.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_answers import TOP, pictures
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT

LAYERS = ("qkv", "expand", "contract")


def small(x: Tensor) -> Tensor:
    """As FP8 and back; what is beyond its largest number would become that number."""
    assert x.abs().max() <= TOP * 1.001
    return x.to(torch.float8_e4m3fn).float()


def shared(dy: Tensor, scales: Tensor, x: Tensor, scale: Tensor, halves: bool) -> Tensor:
    """dyᵀ·x as the kernels have it: rows of dy have scales, x has one; with `halves`, shares go into both."""
    share = scales / scales.max()
    root = torch.exp2((0.5 * share.log2()).ceil()) if halves else torch.ones_like(share)
    return small(small(dy / scales) * root).t() @ small(x * (share / root) / scale) * scales.max() * scale


def each(x: Tensor) -> Tensor:
    """With a scale for each row."""
    scales = length(x)
    return small(x / scales) * scales


def length(x: Tensor) -> Tensor:
    """The scale of rows, by which none of their numbers is too large."""
    return (x.norm(dim=1, keepdim=True) + 1e-12) / TOP


def norm_scale(norm: Any) -> Tensor:
    """No row that a norm gives is longer, whatever it is given."""
    return norm.weight.numel() ** 0.5 * (norm.weight.abs().max() + norm.bias.abs().max()) / TOP


def compared(block: Any, kept: dict[str, tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """For each layer how far its weights' gradient is off, by the ways to round."""
    expand, contract = block.mlp.expand, block.mlp.contract
    f, two = length(kept["contract"][1]), norm_scale(block.norm2)
    g = two * expand.weight.norm(dim=1).max() + expand.bias.abs().max() / TOP
    scales = {
        "qkv": (length(kept["qkv"][1]), norm_scale(block.norm1), False),
        "expand": (f * 1.13 * contract.weight.norm(dim=0).max(), two, False),
        "contract": (f, g, True),
    }
    found = {}
    for name, (x, dy) in kept.items():
        exact = dy.t() @ x
        ways = {
            "shares": shared(dy, scales[name][0], x, *scales[name][1:]),
            "a scale each": each(dy).t() @ each(x),
            "bf16": dy.bfloat16().float().t() @ x.bfloat16().float(),
        }
        found[name] = {way: ((got - exact).norm() / exact.norm()).item() for way, got in ways.items()}
        found[name]["share"] = (scales[name][0] / scales[name][0].max()).median().item()
    return found


def gradients(model: ViT, images_BCHW: Tensor, wrong: float) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Of each block's layers what went in, and the gradient of what came out: M D, M N."""
    kept: list[dict[str, Any]] = []
    for block in model.encoder.blocks:
        kept.append({})
        for name in LAYERS:
            layer = block.attention.qkv if name == "qkv" else getattr(block.mlp, name)

            def keep(_: object, given: tuple[Tensor], out: Tensor, place: Any = kept[-1], name: str = name) -> None:
                out.retain_grad()
                place[name] = (given[0].detach().flatten(0, 1), out)

            layer.register_forward_hook(keep)
    logits = model(images_BCHW)
    draws = torch.Generator().manual_seed(0)
    other = torch.randint(0, logits.shape[1], (len(logits),), generator=draws)
    labels = logits.argmax(1).where(torch.rand(len(logits), generator=draws) >= wrong, other)
    F.cross_entropy(logits, labels).backward()
    return [{name: (x, out.grad.flatten(0, 1)) for name, (x, out) in block.items()} for block in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=48, help="pictures")
    parser.add_argument("--wrong", type=float, default=0.2, help="share of labels that are replaced")
    asked = parser.parse_args()
    predictor = Predictor.load(asked.checkpoint, device="cpu")
    images, model = pictures(asked.folder, predictor, asked.most), predictor.model.eval().requires_grad_()
    kept = gradients(model, predictor.card.preprocessing.normalise(images), asked.wrong)
    print(f"{asked.checkpoint}: {len(images)} pictures, {len(kept)} blocks, torch {torch.__version__}")
    rows = [compared(block, found) for block, found in zip(model.encoder.blocks, kept, strict=True)]
    for name in LAYERS:
        said = [f"{name:9}"]
        for way in ("shares", "a scale each", "bf16"):
            off = [row[name][way] for row in rows]
            said.append(f"{way}: off by {statistics.median(off):.2%} ({min(off):.2%} – {max(off):.2%})")
        least = min(row[name]["share"] for row in rows)
        print("   ".join(said) + f"   a block's median token has {least:.0e} of the largest's scale, or more")


if __name__ == "__main__":
    main()
