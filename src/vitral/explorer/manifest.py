"""Everything that the page needs of a model except its weights: data/manifest.js."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vitral.data.decode import decode_pixels
from vitral.data.pixels import to_display
from vitral.explain.faithfulness import FaithfulnessResult
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.reporting.walk.steps import WalkBuilder, WalkStep
from vitral.runs.model_io import published_name
from vitral.utils.serialization import to_dict

MAX_EXAMPLE_SIDE = 320  # pixels of the longer side of an example image, unless the model needs more
IMAGE_DEPENDENT_TEXTS = ("unknown",)  # the page adds these itself


def model_entry(predictor: Predictor, name: str) -> dict[str, Any]:
    """The model's entry in VITRAL_SITE.models, without weights, examples and faithfulness."""
    model, config = predictor.model, predictor.model_config
    assert isinstance(model, ViT)  # checked by check_supported
    architecture, preprocessing, calibration = config.architecture, config.preprocessing, config.calibration
    numbers, steps = walk_steps(predictor)
    return {
        "name": name,
        "config": to_dict(architecture),
        "classes": list(config.classes),
        "trained_on": published_name(config.trained_on),
        "epoch": config.epoch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "grid": list(architecture.grid),
        "margin": architecture.margin_for(*architecture.image_size),
        "prefix": architecture.num_prefix_tokens,
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "preprocessing": {
            "image_size": list(preprocessing.image_size),
            "channels": preprocessing.channels,
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "crop": preprocessing.crop,
            "interpolation": preprocessing.interpolation,
            "resize": preprocessing.resize,
        },
        "temperature": calibration.temperature,
        "ood_score": calibration.ood_score,
        "ood_threshold": calibration.ood_threshold,
        "numbers": numbers,
        "steps": steps,
    }


def walk_steps(predictor: Predictor) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Numbers for the walk's texts, and its steps with their source code; the page computes the figures itself."""
    preprocessing = predictor.model_config.preprocessing
    pixels_CHW = torch.zeros(preprocessing.shape, dtype=torch.uint8)
    image_1CHW = preprocessing.normalise(pixels_CHW[None]).to(predictor.hardware.device)
    builder = WalkBuilder(predictor, pixels_CHW, image_1CHW, "en", 1, 1)
    numbers = {name: value for name, value in builder.numbers.items() if name not in ("l", "before", "head")}
    return numbers, [_step_entry(step) for step in builder.build().steps]


def _step_entry(step: WalkStep) -> dict[str, Any]:
    extra = [key for key in step.extra_texts if key not in IMAGE_DEPENDENT_TEXTS]
    entry: dict[str, Any] = {
        "key": step.key,
        "extra": extra,
        "shape": step.shape,
        "code": [{"location": code.location, "line": code.line, "text": code.text} for code in step.code],
    }
    return entry | ({"equation": "calibrated"} if "calibrated" in extra else {})


def faithfulness_entry(result: FaithfulnessResult, source: str) -> dict[str, Any]:
    """The ranking of the explanation methods, best first; the random baseline is included.

    "best" has the best mean rank of the methods that beat random heatmaps in every test; None if there are none.
    """
    rows = sorted(result.rows, key=lambda row: row.insertion.value - row.deletion.value, reverse=True)
    return {
        "best": result.best,
        "images": result.images,
        "pairs": result.pairs,
        "source": source,
        "metric": "insertion - deletion",
        "scores": [
            {
                "method": row.method,
                "score": round(row.insertion.value - row.deletion.value, 4),
                "insertion": round(row.insertion.value, 4),
                "deletion": round(row.deletion.value, 4),
                "pointing": None if row.pointing is None else round(row.pointing.value, 4),
                "beats_random": bool(row.gains) and all(row.beats_random(test) for test in row.gains),
            }
            for row in rows
        ],
    }


def example_entries(files: Sequence[Path], predictor: Predictor) -> list[dict[str, Any]]:
    """Images for the page, small enough to travel in the manifest. A folder that is named like a class is a label."""
    preprocessing, classes = predictor.model_config.preprocessing, predictor.model_config.classes
    side = max(MAX_EXAMPLE_SIDE, *preprocessing.image_size)
    entries = []
    for file in files:
        image = to_display(decode_pixels(file, preprocessing.pixel_format))
        image.thumbnail((side, side))
        label = classes.index(file.parent.name) if file.parent.name in classes else None
        entries.append({"name": file.stem, "label": label, "src": data_url(image)})
    return entries


def data_url(image: Image.Image) -> str:
    """PNG for small images, which must stay exact; JPEG for photographs."""
    buffer = io.BytesIO()
    is_small = max(image.size) <= 64
    image.save(buffer, "PNG") if is_small else image.convert("RGB").save(buffer, "JPEG", quality=88)
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
