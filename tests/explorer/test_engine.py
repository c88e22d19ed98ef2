"""The engine in a real browser: its numbers are those of PyTorch, with and without interventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.explorer import EnginePage, decode, encode, write_engine_page
from support.explorer_models import CONFIGS, random_image
from support.explorer_reference import reference_trace
from vitral.explorer.history import model_at
from vitral.inference.predictor import Predictor

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "mask": {"maskPatches": [0, 4, 8]},
    "swap": {"swapPatches": [[0, 5], [5, 3]]},
    "shuffle": {"shufflePositions": 7},
    "shuffle-by-hand": {"shufflePositions": [1, 0, *range(2, 9)]},
    "no-positions": {"removePositions": True},
    "no-learned-positions": {"removePositions": "learned"},
    "no-rotary-positions": {"removePositions": "rotary"},
    "zero-class-token": {"classToken": "zero"},
    "mean-class-token": {"classToken": "mean"},
    "heads": {"headsOff": ["0.1", "1.0", "1.2"]},
    "attention": {"attentionOff": [1]},
    "mlp": {"mlpOff": [0]},
    "block": {"blocksOff": [0]},
    "residual": {"residualOff": [1]},
    "residual-attention": {"residualOff": ["0.attention"]},
    "residual-mlp": {"residualOff": ["1.mlp"]},
    "residual-of-a-block-that-is-off": {"residualOff": [0], "blocksOff": [0]},
    "hot": {"temperature": 4.0},
    "cold-block": {"temperature": {"1": 0.2}},
    "merge": {"mergeTokens": {"block": 1, "pairs": 3}},
    "merge-all": {"mergeTokens": {"block": 0, "pairs": 100}},
    "several": {"maskPatches": [2], "headsOff": ["1.1"], "temperature": 2.0, "mergeTokens": {"block": 1, "pairs": 2}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_the_trace_equals_pytorch(engine, predictors, name):
    model = predictors[name].model
    image = random_image(model.config)
    expected = reference_trace(model, image)
    depth = model.config.depth
    names = ["patches", "embedded", "final", "pooled", "logits", "probabilities", "score"]
    names += [f"tokens.{layer}" for layer in range(depth + 1)]
    names += [f"blocks.{block}.attention" for block in range(depth)]
    trace = engine.run(name, image, {}, names)
    with torch.no_grad():
        reference = {
            "patches": expected.patches,
            "embedded": model.patch_embedding(image[None]),
            "final": model.encoder.norm(expected.tokens[-1]),
            "pooled": expected.pooled,
            "logits": expected.logits,
            "probabilities": expected.logits.softmax(dim=1),
            "score": expected.logits.logsumexp(dim=1),
        }
    reference |= {f"tokens.{layer}": tokens for layer, tokens in enumerate(expected.tokens)}
    reference |= {f"blocks.{block}.attention": attention for block, attention in enumerate(expected.attention)}
    for key, tensor in reference.items():
        np.testing.assert_allclose(trace[key], tensor.numpy().ravel(), **TOLERANCE, err_msg=key)


@pytest.mark.parametrize("name", ["rotary", "hybrid"])
def test_every_tensor_of_a_block_equals_pytorch(engine, predictors, name):
    model = predictors[name].model
    image = random_image(model.config)
    tensors = block_tensors(model, image, block=1)
    trace = engine.run(name, image, {}, [f"blocks.1.{key}" for key in tensors])
    for key, tensor in tensors.items():
        np.testing.assert_allclose(trace[f"blocks.1.{key}"], tensor.numpy().ravel(), **TOLERANCE, err_msg=key)


@torch.no_grad()
def block_tensors(model, image, block: int) -> dict[str, torch.Tensor]:
    """Inputs and outputs of the modules of a block, recorded by hooks."""
    layer, recorded = model.encoder.blocks[block], {}

    def record(key, pick=lambda inputs, out: out):
        return lambda _, inputs, out: recorded.update({key: pick(inputs, out)})

    attention, h = layer.attention, model.config.heads
    handles = [
        layer.norm1.register_forward_hook(record("norm1")),
        layer.norm2.register_forward_hook(record("norm2")),
        attention.qkv.register_forward_hook(record("qkv")),
        attention.project.register_forward_hook(record("joined", lambda inputs, out: inputs[0])),
        layer.residual1.register_forward_hook(record("middle")),
        layer.residual1.register_forward_hook(record("attentionAdded", lambda inputs, out: out - inputs[0])),
        layer.residual2.register_forward_hook(record("mlpAdded", lambda inputs, out: out - inputs[0])),
        layer.mlp.contract.register_forward_hook(record("hidden", lambda inputs, out: inputs[0])),
    ]
    model.trace(image[None])
    for handle in handles:
        handle.remove()
    recorded["v"] = recorded.pop("qkv")[0].unflatten(-1, (3, h, -1))[:, 2].transpose(0, 1)
    recorded["headOutput"] = recorded.pop("joined")[0].unflatten(-1, (h, -1)).transpose(0, 1)
    return recorded


@pytest.mark.parametrize("name", ["plain", "rotary", "hybrid"])
def test_attention_is_the_softmax_of_the_queries_and_keys(engine, predictors, name):
    config = predictors[name].model.config
    trace = engine.run(name, random_image(config), {}, ["blocks.0.q", "blocks.0.k", "blocks.0.attention"])
    h, d = config.heads, config.width // config.heads
    q, k = (torch.from_numpy(trace[f"blocks.0.{key}"].copy()).view(h, -1, d) for key in "qk")
    expected = (q @ k.mT / d**0.5).softmax(dim=-1)
    np.testing.assert_allclose(trace["blocks.0.attention"], expected.numpy().ravel(), **TOLERANCE)


@pytest.mark.parametrize("case", INTERVENTIONS)
@pytest.mark.parametrize("name", ["rotary", "hybrid", "plain"])
def test_intervention_equals_the_same_intervention_in_pytorch(engine, predictors, name, case):
    interventions = dict(INTERVENTIONS[case])
    model = predictors[name].model
    count = model.config.grid[0] * model.config.grid[1]
    if isinstance(interventions.get("shufflePositions"), list):
        interventions["shufflePositions"] = [1, 0, *range(2, count)]
    image = random_image(model.config)
    names = ["logits", "permutation", f"tokens.{model.config.depth}"]
    trace = engine.run(name, image, interventions, names)
    assert sorted(trace["permutation"]) == list(range(count))
    expected = reference_trace(model, image, trace["permutation"], **interventions)
    np.testing.assert_allclose(trace["logits"], expected.logits[0], **TOLERANCE)
    np.testing.assert_allclose(trace[names[2]], expected.tokens[-1].numpy().ravel(), **TOLERANCE)


@pytest.mark.parametrize("case", INTERVENTIONS)
def test_interventions_have_an_effect(engine, predictors, case):
    image = random_image(predictors["rotary"].model.config)
    untouched = engine.run("rotary", image)["logits"]
    assert np.abs(engine.run("rotary", image, INTERVENTIONS[case])["logits"] - untouched).max() > 1e-3


@pytest.mark.parametrize(
    ("interventions", "first"),
    [
        ({}, 3),
        ({"headsOff": ["2.0"]}, 2),
        ({"temperature": {"1": 2.0}}, 1),
        ({"mergeTokens": {"block": 1, "pairs": 2}}, 1),
        ({"temperature": 2.0}, 0),
        ({"maskPatches": [1]}, 0),
        ({"removePositions": "rotary"}, 0),
    ],
)
def test_only_affected_blocks_are_computed_again(engine, predictors, interventions, first):
    model = predictors["rotary"].model
    image = random_image(model.config)
    engine.run("rotary", image)
    names = ["rerunFrom", "logits", "tokens.0", "tokens.1", "tokens.3", "blocks.0.attention", "blocks.2.hidden"]
    resumed = engine.run("rotary", image, interventions, names, previous="rotary")
    assert resumed["rerunFrom"] == first
    again = engine.run("rotary", image, interventions, names)
    assert again["rerunFrom"] == 0
    for key in names[1:]:
        np.testing.assert_array_equal(resumed[key], again[key], err_msg=key)


def test_another_image_is_computed_from_the_start(engine, predictors):
    image = random_image(predictors["rotary"].model.config)
    engine.run("rotary", image)
    assert engine.run("rotary", image + 1, {}, ["rerunFrom"], previous="rotary")["rerunFrom"] == 0


def test_unknown_intervention_is_refused(engine, predictors):
    image = random_image(predictors["plain"].model.config)
    with pytest.raises(Exception, match="unknown intervention headOff"):
        engine.run("plain", image, {"headOff": ["0.0"]})


@pytest.mark.parametrize("name", CONFIGS)
def test_lens_applies_final_norm_and_head_to_each_layer(engine, predictors, name):
    model = predictors[name].model
    image = random_image(model.config)
    expected = reference_trace(model, image)
    engine.run(name, image)
    code = """async ([name, layer]) => {
      const lens = await models[name].lens(traces[name], layer);
      return { pooled: toBase64(lens.pooledLogits), tokens: toBase64(lens.logits) };
    }"""
    for layer in (0, model.config.depth):
        lens = engine.page.evaluate(code, [name, layer])
        with torch.no_grad():
            tokens = model.encoder.norm(expected.tokens[layer])
            np.testing.assert_allclose(decode(lens["pooled"]), model.head(model.pool(tokens))[0], **TOLERANCE)
            np.testing.assert_allclose(decode(lens["tokens"]), model.head(tokens[0]).ravel(), **TOLERANCE)


def test_kernels_of_webassembly_and_javascript_agree(engine, predictors):
    image = random_image(predictors["hybrid"].model.config)
    fast = engine.run("hybrid", image)["logits"]
    assert engine.page.evaluate("models.hybrid.kernel") == "wasm"
    slow = engine.run_with_javascript("hybrid", image)
    np.testing.assert_allclose(slow, fast, rtol=1e-5, atol=1e-5)


def test_models_can_be_loaded_at_the_same_time(engine):
    code = """async () => {
      const pair = await Promise.all([openEpoch("plain", 0), openEpoch("hybrid", 0)]);
      return pair.map((model) => model.filters().side);
    }"""
    assert engine.page.evaluate(code) == [8, 3]


def test_missing_weights_are_reported(shared_engine):
    page, problems = shared_engine
    code = """() => {
      const entry = structuredClone(VITRAL_SITE.models[0]);
      entry.weights[0].url = "weights/missing.js";
      return loadEntry(entry).then(() => "loaded", (error) => error.message);
    }"""
    assert page.page.evaluate(code) == "cannot load weights/missing.js"
    assert len(problems) == 1  # the browser reports the missing file
    problems.clear()


@pytest.mark.slow
def test_earlier_epoch_of_a_run_equals_its_checkpoint_in_bf16(browser, train_tiny, tmp_path):
    run = train_tiny(epochs=3, keep_checkpoints=9)
    predictor = Predictor.load(run.path, device="cpu", engine="reference")
    predictor.model_config = replace(predictor.model_config, epoch=9)  # all checkpoints are earlier
    page = browser.new_page()
    page.goto(write_engine_page(tmp_path / "site", {"run": predictor}).as_uri())
    assert page.evaluate("VITRAL_SITE.models[0].weights.map(({ epoch }) => epoch)") == [1, 2, 3, 9]
    image = random_image(predictor.model.config)
    code = "async (input) => toBase64((await (await openEpoch('run', 0)).run(fromBase64(input))).logits)"
    logits = decode(page.evaluate(code, encode(image.numpy())))
    first = sorted(run.checkpoint_dir.glob("step-*.pt"))[0]
    expected = model_at(first, predictor.model).bfloat16().float()(image[None])[0].detach()
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_logits_of_bundled_models_equal_pytorch(browser, tmp_path, name):
    predictor = Predictor.load(f"bundled:{name}", device="cpu", engine="reference")
    page = browser.new_page()
    page.goto(write_engine_page(tmp_path, {name: predictor}).as_uri())
    engine = EnginePage(page)
    for seed in range(4):
        shape = predictor.model_config.preprocessing.shape
        pixels = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        smooth = torch.nn.functional.avg_pool2d(pixels[None].float(), 5, 1, 2) if seed % 2 else pixels[None].float()
        image = predictor.model_config.preprocessing.normalise(smooth)
        with torch.no_grad():
            expected = predictor.model(image)[0]
        np.testing.assert_allclose(engine.run(name, image[0])["logits"], expected, atol=1e-3, rtol=0)
    page.close()
