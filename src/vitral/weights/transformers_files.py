"""JSON files of transformers: class names and activations in config.json, and preprocessor_config.json."""

from __future__ import annotations

import re
from typing import Any

from vitral.data.preprocess import Preprocessing
from vitral.models.vit import Activation, ViTConfig
from vitral.weights.interpretation import Interpretation
from vitral.weights.preprocessing import MeanStd, crop_fraction

# transformers' names of activations; the first of several names is written
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's constants


def read_labels(config: dict[str, Any]) -> list[str] | None:
    """Class names; None if there are none or only the placeholders LABEL_0, LABEL_1, ..."""
    names = config.get("id2label")
    if not isinstance(names, dict) or any(re.fullmatch(r"LABEL_\d+", str(name)) for name in names.values()):
        return None
    return [str(names[key]) for key in sorted(names, key=int)]


def read_preprocessing(
    stored: dict[str, Any],
    config: ViTConfig,
    default_mean_std: MeanStd,
    interpolation: str,
    reading: Interpretation,
) -> Preprocessing:
    """The preprocessing of preprocessor_config.json; without one, `default_mean_std` and `interpolation`."""
    size, channels = config.image_size, config.channels
    if not stored:
        return reading.preprocessing(size, channels, mean_std=default_mean_std, crop=1.0, interpolation=interpolation)
    resized = _parse_size(stored.get("size")) or size
    input_size = (_parse_size(stored.get("crop_size")) or size) if stored.get("do_center_crop") else resized
    crop = crop_fraction(max(input_size), max(resized))
    if any(side % config.patch_size for side in input_size):
        input_size = size
    is_stretched = "shortest_edge" not in str(stored.get("size")) and not isinstance(stored.get("size"), int)
    settings: dict[str, Any] = {"crop": crop, "mean": stored.get("image_mean"), "std": stored.get("image_std")}
    if stored.get("do_normalize") is False:
        settings |= {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    if crop == 1 and (is_stretched or not stored.get("do_center_crop")):
        settings["resize"] = "stretch"
    resample = stored.get("resample", 2)
    settings["interpolation"] = RESAMPLE.get(resample, f"resample={resample}")
    preprocessing = reading.preprocessing(
        input_size,
        channels,
        mean_std=default_mean_std,
        crop=1.0,
        interpolation="bilinear",
        stored={name: value for name, value in settings.items() if value is not None},
        origin="preprocessor_config.json",
    )
    if is_stretched and crop < 1:
        reading.notes.append("transformers resizes to a square before the crop; vitral keeps the aspect ratio")
    return preprocessing


def _parse_size(value: Any) -> tuple[int, int] | None:
    """Height and width from any of the forms that transformers has used: int, pair or dictionary."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = edge if edge is not None else [value.get("height"), value.get("width")]
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[1])) if value and None not in value else None


def preprocessor_json(preprocessing: Preprocessing, notes: list[str]) -> dict[str, Any]:
    height, width = preprocessing.image_size
    if preprocessing.resize in ("pad", "native"):
        notes.append(f"transformers has no resizing like {preprocessing.resize}: images are cropped")
    if preprocessing.resize == "stretch":
        return {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}} | pixel_json(
            preprocessing
        )
    if height != width:
        notes.append("transformers resizes by the shorter side: the crop of non-square images differs slightly")
    return {
        "image_processor_type": "BitImageProcessor",  # keeps the aspect ratio
        "size": {"shortest_edge": max(int(height / preprocessing.crop), int(width / preprocessing.crop))},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        **pixel_json(preprocessing),
    }


def pixel_json(preprocessing: Preprocessing) -> dict[str, Any]:
    """Fields that all image processors have."""
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": {name: constant for constant, name in RESAMPLE.items()}[preprocessing.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
