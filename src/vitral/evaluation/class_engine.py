"""The predicted classes of the fp32 engine, faster: bf16, and fp32 again for images whose result is close.

The accuracy under corruption follows from the predicted classes alone.

Shapes:  N images   K classes
"""

from __future__ import annotations

from dataclasses import replace

from vitral.data.lazy_images import Images
from vitral.data.variable_images import images_of_one_size, select_rows
from vitral.evaluation.data import evenly_spaced_indices
from vitral.inference.cascade import CascadeEngine, cascade_margin
from vitral.inference.cpu_backends import CpuBackend, backend_unsupported_reason, build_precision_engine
from vitral.inference.cpu_engine import CpuEngine
from vitral.inference.engine import EngineChoice
from vitral.inference.openvino_engine import OpenVinoEngine
from vitral.inference.predictor import Predictor

BACKENDS: tuple[CpuBackend, ...] = ("openvino", "pytorch")  # the first is faster with one batch per core
NUM_IMAGES = 32  # clean images that the errors of bf16 are measured on
MARGIN_FACTOR = 5.0  # on the margin of bench: errors of corrupted images are up to 4 times as large


def class_engine(predictor: Predictor, images_NCHW: Images) -> EngineChoice:
    """The engine of a predictor, or a faster one with the same predicted classes. Not for logits.

    On a CPU with bf16 instructions, fp32 is replaced by a cascade whose margin is measured on a few of the images.
    """
    choice, fp32 = predictor.engine, predictor.engine.engine
    model, preprocessing = predictor.model, predictor.model_config.preprocessing
    if choice.name != "fp32" or not isinstance(fp32, CpuEngine | OpenVinoEngine):
        return choice
    for backend in BACKENDS:
        if backend_unsupported_reason(backend, model, preprocessing, "bf16") is None:
            break
    else:
        return choice
    bf16 = build_precision_engine(model, preprocessing, "bf16", None, backend)
    rows = evenly_spaced_indices(len(images_NCHW), NUM_IMAGES)
    sample = images_of_one_size(select_rows(images_NCHW, rows), NUM_IMAGES)
    bf16_NK, fp32_NK = (replace(choice, engine=engine).logits(sample) for engine in (bf16, fp32))
    return replace(choice, engine=CascadeEngine(bf16, fp32, MARGIN_FACTOR * cascade_margin(bf16_NK, fp32_NK)))
