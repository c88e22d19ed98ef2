"""Heatmaps of what a prediction depends on: one method per file, one signature for all.

METHODS["relevance"](model, image, target)              one heatmap as a tensor
explain(predictor, "bee.jpg", methods=["relevance"])    heatmaps projected onto the original image
"""

from __future__ import annotations

from vitral.explain.api import Explanation, Heatmap, explain, load_explainable
from vitral.explain.method import Method, rescale_for_display
from vitral.explain.registry import DEFAULT, METHODS

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
