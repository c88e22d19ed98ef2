"""Report section with the most confident errors and the least confident predictions."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping

import torch
from PIL import Image
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.pixels import display_note
from vitral.explain import METHODS, rescale_for_display
from vitral.inference.predictor import Predictor
from vitral.reporting.figures.images import overlay_heatmap, to_rgb
from vitral.reporting.figures.style import Array
from vitral.reporting.html.markup import note, percent, text
from vitral.reporting.html.report_data import ReportData

GALLERY_SIZE = 12
RELEVANCE_BATCH = 4  # images; the gradients of all attention matrices are kept in memory
MAX_PIXELATED_SIDE = 64  # pixels; smaller images are embedded losslessly and shown without smoothing
THUMBNAIL_SIDE = 112  # pixels


def gallery_section(data: ReportData) -> str:
    p_NK = data.predictor.model_config.calibration.probabilities(data.logits)
    confidence, predicted = p_NK.max(dim=1)
    errors = (predicted != data.split.labels).nonzero().flatten()
    confident_errors = errors[confidence[errors].argsort(descending=True)][:GALLERY_SIZE]
    least_confident = confidence.argsort()[:GALLERY_SIZE]
    indices = torch.cat([confident_errors, least_confident]).unique()  # many are in both lists
    relevance = relevance_heatmaps(data.predictor, data.split.images[indices], predicted[indices])
    heatmaps = dict(zip(indices.tolist(), relevance, strict=True))
    content = ""
    for title, indices in (
        ("Most confident errors", confident_errors),
        ("Least confident predictions", least_confident),
    ):
        if len(indices):
            content += (
                f'<h3>{title}</h3><ul class="images">{"".join(gallery_items(data, indices, p_NK, heatmaps))}</ul>'
            )
    preprocessing = data.predictor.model_config.preprocessing
    shown = display_note(preprocessing.channels, preprocessing.dtype)
    text_shown = f" The images show {shown}." if shown else ""
    return content + note(f"Right of each image: evidence for the predicted class (class relevance).{text_shown}")


def gallery_items(data: ReportData, indices: Tensor, p_NK: Tensor, heatmaps: Mapping[int, Array]) -> Iterator[str]:
    images, names = data.split.images[indices], data.predictor.classes
    predicted = p_NK[indices].argmax(dim=1)
    style = " class=pixels" if is_pixelated(images) else ""
    for image, prediction, index in zip(images, predicted.tolist(), indices.tolist(), strict=True):
        true = int(data.split.labels[index])
        correct = prediction == true
        label = f"{names[prediction]} ({percent(p_NK[index, prediction].item(), 1)})"
        verdict = "correct" if correct else f"true: {names[true]} ({percent(p_NK[index, true].item(), 1)})"
        rgb = to_rgb(image)
        yield (
            f'<li class="two"><img{style} src="{image_data_uri(rgb)}" alt="{text(f"image of class {names[true]}")}"> '
            f'<img{style} src="{image_data_uri(overlay_heatmap(rgb, heatmaps[index]))}" alt="class relevance">'
            f'<div>{text(label)}, <span class="{"soft" if correct else "wrong"}">{text(verdict)}</span></div></li>'
        )


def relevance_heatmaps(predictor: Predictor, images_NCHW: Images, targets_N: Tensor) -> list[Array]:
    """Class relevance of each image, scaled to [0, 1]: (H, W)."""
    device, heatmaps = predictor.hardware.device, list[Array]()
    for batch in images_NCHW.split(RELEVANCE_BATCH):
        images = predictor.model_config.preprocessing.normalise(batch.to(device))
        targets = targets_N[len(heatmaps) : len(heatmaps) + len(images)].to(device)
        heatmaps.extend(rescale_for_display(METHODS["relevance"](predictor.model, images, targets)).cpu().numpy())
    return heatmaps


def is_pixelated(images_NCHW: Images) -> bool:
    return max(images_NCHW.shape[2:]) <= MAX_PIXELATED_SIDE


def image_data_uri(image_HW3: Array) -> str:
    """Small images as PNG, larger ones as JPEG thumbnails."""
    image, file = Image.fromarray(image_HW3), io.BytesIO()
    if max(image.size) <= MAX_PIXELATED_SIDE:
        is_gray = bool((image_HW3[..., :1] == image_HW3).all())
        (image.convert("L") if is_gray else image).save(file, "PNG")
        kind = "png"
    else:
        image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        image.save(file, "JPEG", quality=82)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
