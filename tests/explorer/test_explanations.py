"""Explanations in the browser are those of vitral.explain, one value per patch."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from support.explorer import decode
from support.explorer_models import CONFIGS, random_image
from support.explorer_reference import add_hooks
from vitral.explain.occlusion import log_odds
from vitral.explain.registry import METHODS
from vitral.explorer.build import BROWSER_METHODS

EXPLAIN = """\
async ([name, method, target]) => toBase64(await models[name].explain(traces[name], method, { target }))"""
NEEDS_ATTENTION = [method for method in BROWSER_METHODS if method != "occlusion"]


@pytest.fixture
def values_per_patch(monkeypatch):
    """Let the methods of vitral.explain return one value per patch instead of one per pixel."""
    for method in NEEDS_ATTENTION:
        module = import_module(f"vitral.explain.{method}")
        monkeypatch.setattr(module, "to_pixels", lambda heat_BN, *arguments: heat_BN)


@pytest.mark.parametrize("method", NEEDS_ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
def test_explanation_equals_that_of_vitral_explain(engine, predictors, values_per_patch, name, method):
    model = predictors[name].model
    image = random_image(model.config)
    engine.run(name, image)
    for target in (None, 2):
        expected = METHODS[method](model, image, target).numpy()
        values = decode(engine.page.evaluate(EXPLAIN, [name, method, target]))
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4 * max(np.abs(expected).max(), 1e-3))


@pytest.mark.parametrize(
    "interventions",
    [
        {"headsOff": ["1.0"], "temperature": 2.0, "residualOff": ["0.mlp"]},
        {"mlpOff": [1], "residualOff": ["1.attention"], "attentionOff": [0]},
        {"mergeTokens": {"block": 1, "pairs": 3}},
    ],
)
def test_gradients_respect_interventions(engine, predictors, values_per_patch, interventions):
    model = predictors["rotary"].model
    image = random_image(model.config)
    engine.run("rotary", image, interventions)
    handles = [handle for block in range(model.config.depth) for handle in add_hooks(model, block, interventions)]
    expected = METHODS["relevance"](model, image, 1).numpy()
    for handle in handles:
        handle.remove()
    values = decode(engine.page.evaluate(EXPLAIN, ["rotary", "relevance", 1]))
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_occlusion_is_the_drop_of_the_log_odds_without_a_patch(engine, predictors, name):
    model = predictors[name].model
    image = random_image(model.config)
    engine.run(name, image)
    rows, columns = model.config.grid
    P, margin = model.config.patch_size, model.config.margin_for(*model.config.image_size)
    copies = image.repeat(rows * columns + 1, 1, 1, 1)
    for patch in range(rows * columns):
        top, left = margin + patch // columns * P, margin + patch % columns * P
        copies[patch + 1, :, top : top + P, left : left + P] = 0
    with torch.no_grad():
        odds = log_odds(model(copies), torch.full((len(copies),), 3))
    values = decode(engine.page.evaluate(EXPLAIN, [name, "occlusion", 3]))
    np.testing.assert_allclose(values, (odds[0] - odds[1:]).numpy(), rtol=1e-3, atol=1e-4)


def test_unknown_method_is_refused(engine, predictors):
    engine.run("plain", random_image(predictors["plain"].model.config))
    with pytest.raises(Exception, match="no explanation named lime"):
        engine.page.evaluate(EXPLAIN, ["plain", "lime", None])


def test_model_runs_while_occlusion_is_computed(engine, predictors):
    engine.run("hybrid", random_image(predictors["hybrid"].model.config))
    code = """async () => {
      const order = [], trace = traces.hybrid, shares = [];
      const onProgress = (share) => shares.push(share);
      const explained = models.hybrid.explain(trace, "occlusion", { onProgress }).then(() => order.push("occlusion"));
      const ran = models.hybrid.run(trace.input).then(() => order.push("run"));
      await Promise.all([explained, ran]);
      return [order, shares.length, shares.at(-1)];
    }"""
    assert engine.page.evaluate(code) == [["run", "occlusion"], 49, 1]
