"""Labels and close calls of the GPU engines on real images: how often each has fp32's top-1 label.

    python benchmarks/gpu_agreement.py MODEL FOLDER [--max-images 2000] [--save]

MODEL is a run, a bundled model or a checkpoint of another library. FOLDER contains images, with or without class
folders. All images go through the fp32 module (without TF32) and the engines bf16, fp16 and FP8, on the GPU. A cascade
computes an image again whose two largest FP8 logits differ by less than its margin. The margin comes from one of four
folds of the images, for several targets of `margin_for_agreement` (the engine's is 0.05% wrong labels) and, for
comparison, as 3.5 standard deviations of the errors; agreement and the share computed again are those of the other
three folds, averaged over the four choices. The engine `fp8-cascade` itself then runs on all images and must return the
labels of its parts.

Without a GPU, FP8 is emulated on the CPU as in fp8_predictions.py, fp16 is left out and there are no speeds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from fp8_predictions import compute_logits, load_images, with_fp8_rounding
from vitral.inference.agreement import Agreement, top1_agreement
from vitral.inference.cascade import cascade_margin, margin_for_agreement
from vitral.inference.predictor import Predictor

MARGINS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "0.2%": partial(margin_for_agreement, max_disagreement=0.002),
    "0.1%": partial(margin_for_agreement, max_disagreement=0.001),
    "0.05%": margin_for_agreement,
    "0.025%": partial(margin_for_agreement, max_disagreement=0.00025),
    "3.5 std": cascade_margin,
}
FOLDS, BATCH_SIZE, ROUNDS = 4, 256, 7


def gpu_engines(predictor: Predictor) -> dict[str, Any]:
    from vitral.inference.cuda_cascade import build_recheck_engine, fp8_hardware
    from vitral.inference.cuda_engine import CudaEngine
    from vitral.inference.engine import ReferenceEngine
    from vitral.inference.gpu_selection import cuda_hardware

    model, preprocessing = predictor.model, predictor.model_config.preprocessing
    return {
        "fp32": ReferenceEngine(model, preprocessing, predictor.hardware),
        "bf16": CudaEngine(model, preprocessing, cuda_hardware("bf16", "no", throughput=True)),
        "fp16": build_recheck_engine(model, preprocessing, predictor.hardware),
        "fp8": CudaEngine(model, preprocessing, fp8_hardware()),
    }


def cpu_logits(predictor: Predictor, images: Tensor) -> dict[str, Tensor]:
    fp32 = predictor.model.eval()
    bf16 = copy.deepcopy(fp32).bfloat16()
    return {
        "fp32": compute_logits(fp32, images, predictor),
        "bf16": compute_logits(lambda x: bf16(x.bfloat16()).float(), images, predictor),
        "fp8": compute_logits(with_fp8_rounding(fp32, include_projection=True).eval(), images, predictor),
    }


def gaps(logits_NK: Tensor) -> Tensor:
    top = logits_NK.topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def cascade_row(logits: dict[str, Tensor], recheck: str, rule: str) -> dict[str, Any]:
    """Agreement and share computed again of FP8 followed by `recheck`, each image measured in three of four folds."""
    fold = torch.arange(len(logits["fp32"])) % FOLDS
    same, rechecked, margins = 0, 0, []
    for index in range(FOLDS):
        calibration, measured = fold == index, fold != index
        margin = MARGINS[rule](logits["fp8"][calibration], logits["fp32"][calibration])
        again = gaps(logits["fp8"]) < margin
        labels = torch.where(again, logits[recheck].argmax(1), logits["fp8"].argmax(1))
        same += int((labels == logits["fp32"].argmax(1))[measured].sum())
        rechecked += int(again[measured].sum())
        margins.append(margin)
    images = (FOLDS - 1) * len(fold)
    return {
        "engine": f"fp8, then {recheck}", "margin_rule": rule, "margin": statistics.mean(margins),
        "agreement": same / images, "recheck_rate": rechecked / images, "different_labels": (images - same) / 3,
    }  # fmt: skip


def images_per_second(engine: Any, images: Tensor) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for batch in images.split(BATCH_SIZE):
            engine(batch)
        seconds.append(time.perf_counter() - start)
    return len(images) / statistics.median(seconds)


def measure_engines(predictor: Predictor, images: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Logits and speeds of all engines; checks that the engine `fp8-cascade` returns the labels of its parts."""
    from vitral.inference.cuda_cascade import CudaCascadeEngine

    engines = gpu_engines(predictor)
    logits = {name: torch.cat([engine(x) for x in images.split(BATCH_SIZE)]) for name, engine in engines.items()}
    margin = margin_for_agreement(logits["fp8"], logits["fp32"])
    engines["fp8-cascade"] = CudaCascadeEngine(engines["fp8"], engines["fp16"], margin)
    actual = torch.cat([engines["fp8-cascade"](x) for x in images.split(BATCH_SIZE)])
    expected = torch.where((gaps(logits["fp8"]) < margin)[:, None], logits["fp16"], logits["fp8"])
    different = int((actual.argmax(1) != expected.argmax(1)).sum())
    print(f"fp8-cascade: {top1_agreement(logits['fp32'], actual)}; {different} labels differ from those of its parts")
    on_gpu = images.to(predictor.hardware.device)
    return logits, {name: images_per_second(engine, on_gpu) for name, engine in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-images", type=int, default=2000)
    add_output_arguments(parser)
    args = parser.parse_args()
    predictor = Predictor.load(args.model, engine="reference")
    images = load_images(args.folder, predictor, args.max_images)
    print(f"{args.model}: {len(images)} images, {len(predictor.classes)} classes, {predictor.hardware.name}")
    on_gpu = predictor.hardware.device.type == "cuda"
    logits, speeds = measure_engines(predictor, images) if on_gpu else (cpu_logits(predictor, images), {})
    rows: list[dict[str, Any]] = []
    for name, values in logits.items():
        agreement: Agreement = top1_agreement(logits["fp32"], values)
        error = float((values - logits["fp32"]).norm() / logits["fp32"].norm())
        rows.append({"engine": name, "agreement": agreement.value, "different_labels": len(images) - agreement.same,
                     "logits_relative_error": error, "images_per_second": speeds.get(name)})  # fmt: skip
        print(f"{name:12} {agreement}; relative error of the logits {error:.2%}; {speeds.get(name, 0):,.0f} images/s")
    if "fp8-cascade" in speeds:
        rows.append({"engine": "fp8-cascade", "images_per_second": speeds["fp8-cascade"]})
        print(f"{'fp8-cascade':12} {speeds['fp8-cascade']:,.0f} images/s")
    for recheck in [name for name in ("fp32", "fp16", "bf16") if name in logits]:
        for rule in MARGINS:
            row = cascade_row(logits, recheck, rule)
            rows.append(row)
            print(f"fp8, then {recheck}: margin {rule} = {row['margin']:.3f}, agreement "
                  f"{row['agreement']:.2%}, computed again {row['recheck_rate']:.1%}")  # fmt: skip
    write_results(args, rows, {"model": args.model, "images": len(images)}, packages=("torch", "triton"))


if __name__ == "__main__":
    main()
