"""How many predictions FP8 changes: a trained model on the CPU in fp32, with the rounding of the fp8 engine.

    python benchmarks/fp8_predictions.py MODEL FOLDER [--max-images 400]

MODEL is a run, a bundled model or a checkpoint of another library. FOLDER contains images, with or without class
folders. As in the GPU kernels, weight rows are scaled by their largest value, tokens by the norm of their row, and the
MLP's hidden activations and the attention output by bounds of their GEMMs (vitral/kernels/fp8). Attention, norms and
accumulation are exact here; on a GPU they are bf16, which changes far less.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.data.decode import ImageDecodeError, decode_image
from vitral.data.files.walk import find_images
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT

FP8_MAX = 448.0  # largest finite e4m3 value
BATCH_SIZE = 32


def round_to_fp8(x: Tensor, bound: Tensor) -> Tensor:
    """Quantize to e4m3 with the scale bound / 448 and dequantize. No |x| may exceed `bound`."""
    scale = bound.clamp_min(1e-12) / FP8_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def with_fp8_rounding(model: ViT, include_projection: bool) -> ViT:
    """A copy whose large GEMMs have rounded operands. Training leaves out the attention projection."""
    model = copy.deepcopy(model)
    for block in model.encoder.blocks:
        add_rounding(block, include_projection)
    return model


def add_rounding(block: Any, include_projection: bool) -> None:
    qkv, project, expand, contract = block.attention.qkv, block.attention.project, block.mlp.expand, block.mlp.contract
    row_norms: dict[str, Tensor] = {}  # of the tokens that enter a layer

    def gemm_bound(layer: Any, norms: Tensor) -> Tensor:
        return norms * layer.weight.norm(dim=1).max() + (0.0 if layer.bias is None else layer.bias.abs().max())

    def round_inputs(layer: Any, name: str) -> None:
        def hook(_: object, args: tuple[Tensor]) -> Tensor:
            row_norms[name] = args[0].norm(dim=-1, keepdim=True)
            return round_to_fp8(args[0], row_norms[name])

        layer.register_forward_pre_hook(hook)

    round_inputs(qkv, "qkv")
    round_inputs(expand, "expand")
    contract.register_forward_pre_hook(lambda _, args: round_to_fp8(args[0], gemm_bound(expand, row_norms["expand"])))
    if include_projection:  # one scale per image
        project.register_forward_pre_hook(
            lambda _, args: round_to_fp8(args[0], gemm_bound(qkv, row_norms["qkv"]).amax(dim=1, keepdim=True))
        )
    for layer in (qkv, expand, contract, *([project] if include_projection else [])):
        layer.weight.data = round_to_fp8(layer.weight.data, layer.weight.data.abs().amax(dim=1, keepdim=True))


def load_images(folder: Path, predictor: Predictor, max_images: int) -> Tensor:
    """uint8 images (N, C, H, W), resized and cropped for the model. Unreadable files are skipped with a message."""
    images = []
    for file in find_images([folder])[:max_images]:
        try:
            images.append(predictor.model_config.preprocessing.resize_and_crop(decode_image(file)))
        except ImageDecodeError as error:
            print(f"skipped: {error}")
    return torch.stack(images)


@torch.inference_mode()
def compute_logits(model: Callable[[Tensor], Tensor], images_BCHW: Tensor, predictor: Predictor) -> Tensor:
    preprocessing = predictor.model_config.preprocessing
    return torch.cat([model(preprocessing.normalise(batch)) for batch in images_BCHW.split(BATCH_SIZE)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-images", type=int, default=400)
    add_output_arguments(parser)
    args = parser.parse_args()
    predictor = Predictor.load(args.model, device="cpu")
    images = load_images(args.folder, predictor, args.max_images)
    exact = compute_logits(predictor.model.eval(), images, predictor)
    print(f"{args.model}: {len(images)} images, {exact.shape[1]} classes, torch {torch.__version__}")
    rows = []
    for include_projection, name in ((False, "qkv and MLP"), (True, "qkv, MLP and attention projection")):
        logits = compute_logits(with_fp8_rounding(predictor.model, include_projection).eval(), images, predictor)
        error = ((logits - exact).norm() / exact.norm()).item()
        agreement = (logits.argmax(1) == exact.argmax(1)).float().mean().item()
        print(f"{name:34}  relative error of the logits {error:.1%}   top-1 agreement {agreement:.1%}")
        rows.append({"fp8_layers": name, "logits_relative_error": error, "top1_agreement": agreement})
    write_results(args, rows, {"model": args.model, "images": len(images)}, dtype="fp8")


if __name__ == "__main__":
    main()
