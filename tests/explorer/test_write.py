"""What `vitral explorer` writes: weights, history, refusals, and the site as a whole."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitral.api
from support.explorer_models import PLAIN, random_model
from vitral.errors import VitralError
from vitral.explorer.build import ExplorerOptions, model_names, site_model
from vitral.explorer.history import earlier_epochs, evenly_spaced
from vitral.explorer.supported import unsupported_reason
from vitral.explorer.weights import browser_tensors, encode_weights
from vitral.explorer.write import data_files, slug
from vitral.inference.predictor import Predictor
from vitral.models.variants.hybrid import HybridConfig, HybridViT, ResNetConfig
from vitral.models.vit import ViT


def tensor_bytes(encoded):
    return zlib.decompress(base64.b64decode(encoded.text))


def test_bf16_values_are_stored_exactly_in_two_bytes():
    model = random_model(PLAIN).bfloat16().float()
    encoded = encode_weights(model)
    assert encoded.precision == "bf16"
    layout = {entry["name"]: entry for entry in encoded.layout}
    entry, tensor = layout["head.out.weight"], model.get_parameter("head.out.weight").detach()
    assert entry["dtype"] == "bfloat16"
    start, count = entry["offset"], tensor.numel()
    low, high = np.frombuffer(tensor_bytes(encoded), np.uint8, 2 * count, start).reshape(2, count).astype(np.uint32)
    values = (low << 16 | high << 24).view(np.float32)
    np.testing.assert_array_equal(values, tensor.numpy().ravel())


def test_small_models_are_exact_and_large_ones_are_smaller():
    model = random_model(PLAIN)
    assert encode_weights(model).precision == "fp32"
    sizes = [len(tensor_bytes(encode_weights(model, precision))) for precision in ("fp32", "bf16", "int8")]
    assert sizes[0] == 4 * sum(tensor.numel() for tensor in browser_tensors(model).values())
    assert sizes == sorted(sizes, reverse=True)


def test_int8_error_is_at_most_half_a_step_of_the_row():
    model = random_model(PLAIN)
    encoded = encode_weights(model, "int8")
    entry = next(entry for entry in encoded.layout if entry["name"] == "encoder.blocks.0.mlp.expand.weight")
    weight = model.get_parameter(entry["name"]).detach().numpy()
    rows, columns = weight.shape
    content = tensor_bytes(encoded)[entry["offset"] :]
    planes = np.frombuffer(content, np.uint8, 4 * rows).reshape(4, rows)
    scale = planes.T.copy().view("<f4").ravel()
    values = np.frombuffer(content, np.int8, rows * columns, 4 * rows).reshape(rows, columns)
    assert (np.abs(values * scale[:, None] - weight) <= scale[:, None] * 0.5001).all()
    np.testing.assert_allclose(scale, np.abs(weight).max(axis=1) / 127, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pooling": "attention"}, "attention pooling is not implemented"),
        ({"width": 2400, "depth": 2}, "million parameters"),
    ],
)
def test_models_that_a_browser_cannot_run_are_refused(predictors, changes, reason):
    config = replace(PLAIN, **changes)
    with torch.device("meta"):
        model = ViT(config)
    model_config = replace(predictors["plain"].model_config, architecture=config)
    assert reason in (unsupported_reason(model, model_config) or "")


def test_resnet_hybrids_are_refused(predictors):
    config = HybridConfig(
        image_size=(32, 32), patch_size=8, width=24, heads=3, depth=1, resnet=ResNetConfig(blocks=(1, 1))
    )
    with torch.device("meta"):
        model = HybridViT(replace(config, num_classes=5))
    model_config = replace(predictors["hybrid"].model_config, architecture=replace(config, num_classes=5))
    assert "ResNet" in (unsupported_reason(model, model_config) or "")


def test_command_refuses_other_tasks_in_two_lines(command, tmp_path):
    from support.served import tiny_multilabel

    code, _, err = command("explorer", tiny_multilabel(tmp_path / "things"), "--out", tmp_path / "site")
    assert code == 2
    assert "the explorer cannot run things: its task is multilabel, expected classification" in err
    assert len(err.strip().splitlines()) == 2
    assert not (tmp_path / "site").exists()


def test_command_writes_a_site_with_example_images(command, predictors, tmp_path):
    (tmp_path / "images" / "b").mkdir(parents=True)
    Image.new("RGB", (500, 400), (200, 10, 10)).save(tmp_path / "images" / "b" / "red.png")
    site = tmp_path / "site"
    code, out, err = command("explorer", predictors["plain"].path, "--out", site, "--images", tmp_path / "images")
    assert code == 0, err
    assert f"Wrote {site / 'index.html'} (plain; " in out
    page = (site / "index.html").read_text()
    assert 'type="module"' not in page  # file:// refuses modules
    for link in re.findall(r'(?:src|href)="([^"#:]+)"', page):
        assert (site / link).exists(), link
    entry = manifest(site)["models"][0]
    assert [example["label"] for example in entry["examples"]] == [1]
    assert entry["examples"][0]["src"].startswith("data:image/")
    assert (site / entry["weights"][0]["url"]).exists()
    assert len(entry["steps"]) >= 12
    assert all(step["code"] for step in entry["steps"])


def manifest(site) -> dict:
    text = (site / "data" / "manifest.js").read_text()
    return json.loads(text.removeprefix("globalThis.VITRAL_SITE = ").rstrip().removesuffix(";"))


def test_two_models_of_one_name_are_refused(tmp_path):
    with pytest.raises(VitralError, match="two models are named 'mnist'"):
        model_names(["bundled:mnist", tmp_path / "mnist"])


def test_names_become_safe_file_names():
    assert [slug(name) for name in ("Ti/16 (new)", "mnist", "나비")] == ["ti-16-new", "mnist", "model"]


def test_evenly_spaced_epochs_include_the_first_and_the_last():
    assert evenly_spaced([1, 2, 3, 4, 5, 6, 7], 4) == [1, 3, 5, 7]
    assert evenly_spaced([1, 2], 4) == [1, 2]
    assert evenly_spaced([1, 2], 0) == []


def test_run_that_kept_its_checkpoints_gets_weights_of_its_epochs(train_tiny):
    run = train_tiny(epochs=4, keep_checkpoints=9)
    predictor = Predictor.load(run.path, device="cpu", engine="reference")
    model = predictor.model
    weights = earlier_epochs(run.path, model, final_epoch=9, max_epochs=3)
    assert [epoch for epoch, _ in weights] == [1, 3, 4]
    assert {encoded.precision for _, encoded in weights} == {"bf16"}
    assert len({encoded.text for _, encoded in weights}) == 3
    assert earlier_epochs(run.path, model, final_epoch=3, max_epochs=0) == []
    site = site_model(predictor, "run", ExplorerOptions(epochs=2))
    files = data_files([site])
    urls = [name for name in files if name.startswith("weights/")]
    assert len(urls) == len(site.weights) >= 1
    assert site.weights[-1].epoch == predictor.model_config.epoch


def test_example_of_the_python_api(predictors, tmp_path):
    site = vitral.api.explorer([predictors["plain"]], tmp_path / "site")
    assert site.page.exists()
    assert site.models == ("plain",)
    assert site.size == sum(file.stat().st_size for file in (tmp_path / "site").rglob("*") if file.is_file())


def test_ranking_is_measured_on_a_dataset(predictors, tmp_path):
    rng = np.random.default_rng(0)
    for name in predictors["plain"].classes:
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(3):
            pixels = rng.integers(0, 256, (24, 24), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    options = ExplorerOptions(faithfulness=str(tmp_path / "data"), faithfulness_images=12)
    ranking = site_model(predictors["plain"], "plain", options).faithfulness
    assert ranking is not None
    methods = {score["method"] for score in ranking["scores"]}
    assert {"attention", "rollout", "relevance", "gradcam", "occlusion", "random"} <= methods
    assert [score["score"] for score in ranking["scores"]] == sorted(
        (s["score"] for s in ranking["scores"]), reverse=True
    )
    assert ranking["source"] == "data test"
    assert ranking["images"] == 12


@pytest.mark.slow
def test_bundled_models_and_a_tiny_vit_fit_into_20_megabytes(tmp_path):
    site = vitral.api.explorer(out=tmp_path / "site")
    assert site.models == ("mnist", "cifar10")
    tiny = encode_weights(ViT.from_preset("Ti/16"))
    assert tiny.precision == "int8"
    assert site.size + len(tiny.text) < 20_000_000
