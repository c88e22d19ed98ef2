"""Heatmaps of what a prediction depends on: one method per file, one signature for all.

METHODS["relevance"](model, image, target)              one heatmap as a tensor
explain(predictor, "bee.jpg", methods=["relevance"])    heatmaps projected onto the original image
"""

from __future__ import annotations

from vitral.explain.api import Explanation, Heatmap, explain, load_explainable
from vitral.explain.method import Method, rescale_for_display
from vitral.explain.registry import DEFAULT, METHODS
from vitral.utils.lazy import name_right_call

__all__ = [
    "DEFAULT",
    "METHODS",
    "Explanation",
    "Heatmap",
    "Method",
    "explain",
    "load_explainable",
    "rescale_for_display",
]

name_right_call(__name__, "model.explain(image), or vitral.explain.explain(model, image, methods)")
