"""The table of methods, and which of them a model supports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.vit_kinds import KINDS, random_model
from vitral.explain import METHODS, faithfulness


def test_every_method_documents_its_unit() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert ("any sign" in method.unit) == method.is_signed
        assert method.summary


def test_faithfulness_selects_methods_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapley values need few patches; without Captum only the methods of vitral itself remain."""
    small, large = random_model(*KINDS["class"]), random_model("plain", replace(KINDS["class"][1], image_size=(36, 36)))
    assert faithfulness.applicable_methods(small) == list(METHODS)
    assert faithfulness.applicable_methods(large) == [name for name in METHODS if name != "shapley"]
    monkeypatch.setattr(faithfulness, "find_spec", lambda name: None)
    assert faithfulness.applicable_methods(small) == ["attention", "rollout", "relevance", "gradcam", "occlusion"]
