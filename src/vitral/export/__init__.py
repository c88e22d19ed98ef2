"""Export a model to one file for other programs, checked against the model before it is kept."""

from __future__ import annotations

from vitral.utils.lazy import name_right_call

name_right_call(__name__, "vitral.api.export(model)")
