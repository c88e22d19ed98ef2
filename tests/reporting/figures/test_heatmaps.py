"""Heatmaps drawn over images: what is drawn, where, and in which colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.vit_kinds import KINDS, predictor_for, random_model
from vitral.device.select import Hardware
from vitral.explain import Explanation, explain
from vitral.inference.predictor import Predictor
from vitral.reporting.figures import heatmaps


def explain_gray_image(cpu: Hardware, methods: list[str], targets: Sequence[str] = ()) -> Explanation:
    predictor = predictor_for(random_model(*KINDS["class"]), cpu)
    return explain(predictor, Image.new("RGB", (60, 20), "gray"), methods, targets)


@pytest.mark.parametrize("targets", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_every_row_has_the_image_and_all_methods(targets: list[str], cpu: Hardware, tmp_path: Path) -> None:
    """Rollout is the same for all classes; leaving it out would leave blanks."""
    explanation = explain_gray_image(cpu, ["rollout", "relevance"], targets)
    path = heatmaps.plot_explanation(explanation, tmp_path / "sheet.png")
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    is_drawn = (pixels != pixels[-1, -1]).any(axis=2)  # the last pixel is background
    drawn = [
        [cell.mean() > 0.4 for cell in np.array_split(row, 3, axis=1)]
        for row in np.array_split(is_drawn, len(targets), axis=0)
    ]
    assert drawn == [[True, True, True]] * len(targets)


def test_footnote_does_not_call_a_requested_class_predicted(cpu: Hardware) -> None:
    predicted = explain_gray_image(cpu, ["relevance"]).prediction
    for label, text in ((predicted[0], "predicted class"), (predicted[1], "requested class")):
        explanation = explain_gray_image(cpu, ["relevance"], [label.name])
        assert heatmaps.footnote(explanation, 1) == f"{text} and probability"


def test_overlay_is_dark_outside_the_crop_and_bright_on_important_regions(cpu: Hardware) -> None:
    explanation = explain_gray_image(cpu, ["rollout"])
    over = np.asarray(heatmaps.render_heatmap(explanation.image, explanation.heatmaps[0])).astype(int).sum(axis=2)
    left, _, right, _ = explanation.crop
    assert (left, right) == (15, 45)
    assert (over[:, :left] == over[0, 0]).all()
    assert over[0, 0] < over[:, left:right].min()
    heat = explanation.heatmaps[0].display[:, left:right]
    assert over[:, left:right].flat[heat.argmax()] > over[:, left:right].flat[heat.argmin()]


def test_positive_and_negative_evidence_have_different_colours() -> None:
    pixels = np.full((1, 3, 3), 0.5)
    against, neither, for_it = heatmaps.blend_signed(pixels, np.array([[-1.0, 0.0, 1.0]]))[0]
    assert for_it[2] > for_it[0] + 0.3
    assert against[0] > against[2] + 0.3
    assert np.ptp(neither) == 0


def test_the_json_form_has_one_mean_per_patch_of_a_native_image(cpu: Hardware) -> None:
    predictor = predictor_for(random_model(*KINDS["mean, rotary"]), cpu)
    preprocessing = replace(predictor.model_config.preprocessing, resize="native", patch_size=4)
    predictor = Predictor(predictor.model, replace(predictor.model_config, preprocessing=preprocessing), cpu)
    explanation = explain(predictor, Image.new("RGB", (10, 40), "gray"), ["rollout"])
    (heat,) = explanation.heatmaps
    assert heat.values.shape[0] > heat.values.shape[1], "unlike the 8 x 12 pixels of the configuration"
    patches = np.array(heatmaps.explanation_to_dict(explanation, predictor, [])["heatmaps"][0]["patches"])
    assert patches.shape == tuple(side // 4 for side in heat.values.shape)
    assert patches.mean() == pytest.approx(float(heat.values.mean()))
