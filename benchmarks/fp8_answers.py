"""How many answers FP8 changes: a trained model on a CPU, in fp32, with the roundings of `--precision fp8`.

    python benchmarks/fp8_answers.py CHECKPOINT FOLDER [--most 400]

CHECKPOINT is a run, a model that comes with vitral, or weights of another library; FOLDER has pictures, sorted or not.
A weight's rows are rounded by their largest number, tokens by the length of their row, and the MLP's hidden numbers and
what attention gives by the bounds that the GPU's kernels use (vitral/fused). Attention, norms and sums are exact here;
there they are of bf16, which changes far less.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.decode import NotAnImage, decode, image_files
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT

TOP = 448.0  # the largest number of FP8 (e4m3)
BATCH = 32


def rounded(x: Tensor, most: Tensor) -> Tensor:
    """As FP8 and back, where no number is larger than `most`."""
    scale = most.clamp_min(1e-12) / TOP
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def in_fp8(model: ViT, projection: bool) -> ViT:
    """A copy whose large products are of FP8: those behind attention too, or not, as in training."""
    model = copy.deepcopy(model)
    for block in model.encoder.blocks:
        round_block(block, projection)
    return model


def round_block(block: Any, projection: bool) -> None:
    qkv, project, expand, contract = block.attention.qkv, block.attention.project, block.mlp.expand, block.mlp.contract
    length: dict[str, Tensor] = {}  # of each token's row, as it enters a layer

    def bound(layer: Any, rows: Tensor) -> Tensor:
        return rows * layer.weight.norm(dim=1).max() + (0.0 if layer.bias is None else layer.bias.abs().max())

    def enters(layer: Any, name: str) -> None:
        def round_rows(_: object, given: tuple[Tensor]) -> Tensor:
            length[name] = given[0].norm(dim=-1, keepdim=True)
            return rounded(given[0], length[name])

        layer.register_forward_pre_hook(round_rows)

    enters(qkv, "qkv")
    enters(expand, "expand")
    contract.register_forward_pre_hook(lambda _, given: rounded(given[0], bound(expand, length["expand"])))
    if projection:  # one scale an image
        project.register_forward_pre_hook(
            lambda _, given: rounded(given[0], bound(qkv, length["qkv"]).amax(dim=1, keepdim=True))
        )
    for layer in (qkv, expand, contract, *([project] if projection else [])):
        layer.weight.data = rounded(layer.weight.data, layer.weight.data.abs().amax(dim=1, keepdim=True))


def pictures(folder: Path, predictor: Predictor, most: int) -> Tensor:
    seen = predictor.card.preprocessing
    found = []
    for file in image_files([folder])[:most]:
        try:
            found.append(seen.pixels(decode(file)))
        except NotAnImage as error:
            print(f"left out: {error}")
    return torch.stack(found)


@torch.inference_mode()
def logits(model: Callable[[Tensor], Tensor], images_BCHW: Tensor, predictor: Predictor) -> Tensor:
    seen = predictor.card.preprocessing
    return torch.cat([model(seen.normalise(part)) for part in images_BCHW.split(BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=400, help="pictures")
    asked = parser.parse_args()
    predictor = Predictor.load(asked.checkpoint, device="cpu")
    images = pictures(asked.folder, predictor, asked.most)
    exact = logits(predictor.model.eval(), images, predictor)
    print(f"{asked.checkpoint}: {len(images)} pictures, {exact.shape[1]} classes, torch {torch.__version__}")
    for projection, name in ((False, "qkv and MLP"), (True, "the same and what follows attention")):
        found = logits(in_fp8(predictor.model, projection).eval(), images, predictor)
        off, same = (found - exact).norm() / exact.norm(), (found.argmax(1) == exact.argmax(1)).float()
        print(f"{name:36}  logits off by {off:.1%}   first label unchanged: {int(same.sum())} ({same.mean():.1%})")


if __name__ == "__main__":
    main()
