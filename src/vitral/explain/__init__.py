"""What the model looked at: one method a file, one signature for all, and pictures explained as a whole.

METHODS["relevance"](model, image, target)              one map, as a tensor
explain(predictor, "bee.jpg", methods=["relevance"])    maps laid back onto the picture
"""

from __future__ import annotations

from vitral.explain.api import Explanation, Heat, explain, open_to_look_inside
from vitral.explain.method import Method, scaled
from vitral.explain.registry import DEFAULT, METHODS

__all__ = ["DEFAULT", "METHODS", "Explanation", "Heat", "Method", "explain", "open_to_look_inside", "scaled"]
