"""A faster engine for accuracies predicts the classes of fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.models import save_random_model, smooth_images
from vitral.device.cpu import cpu_has_bf16
from vitral.evaluation.class_engine import class_engine
from vitral.evaluation.corruptions import SEVERITIES, corrupt
from vitral.inference.cascade import CascadeEngine
from vitral.inference.engine import EngineName
from vitral.inference.predictor import Predictor


@pytest.mark.skipif(not cpu_has_bf16(), reason="the CPU has no bf16 instructions")
def test_the_classes_of_corrupted_images_are_those_of_fp32(tmp_path: Path) -> None:
    predictor = Predictor.load(save_random_model(tmp_path / "model"), engine="fp32")
    images = smooth_images(200)
    choice = class_engine(predictor, images)
    assert isinstance(choice.engine, CascadeEngine)
    bf16 = replace(choice, engine=choice.engine.fast)
    num_bf16_errors = 0
    for kind, severities in SEVERITIES.items():
        corrupted = corrupt(images, kind, severities[-1])
        expected = predictor.logits(corrupted).argmax(dim=1)
        assert torch.equal(choice.logits(corrupted).argmax(dim=1), expected)
        num_bf16_errors += int((bf16.logits(corrupted).argmax(dim=1) != expected).sum())
    assert num_bf16_errors  # otherwise the images are too easy to tell


@pytest.mark.parametrize("engine", ["reference", "fp32"])
def test_other_engines_are_kept(tmp_path: Path, engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.inference.cpu_engine.cpu_has_bf16", lambda: False)
    predictor = Predictor.load(save_random_model(tmp_path / "model"), engine=engine)
    assert class_engine(predictor, smooth_images(4)) is predictor.engine
