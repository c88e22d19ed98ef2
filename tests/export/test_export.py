"""Exported files agree with the model, carry its metadata, and are not left behind if they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from support.models import (
    ANIMALS,
    MODEL_KINDS,
    SMALL_CONFIG,
    build_calibrated_model,
    comparison_images,
    images_of_many_sizes,
    reference_logits,
    reference_predictor,
    smooth_photo,
)
from support.training import run_vitral
from vitral.data.geometry import Resize
from vitral.errors import VitralError
from vitral.export import onnx_file, torch_file
from vitral.export.export import SUFFIX_BY_TARGET, export_model
from vitral.export.parity import ModelFn, ParityReport, check_parity, first_divergent_block, measure_parity
from vitral.export.wrapper import ExportWrapper, smooth_activations
from vitral.inference.agreement import Agreement
from vitral.inference.int8_calibration import collect_activation_ranges
from vitral.inference.onnx_runtime import OnnxModel
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig, save_model

CLASSES = ANIMALS[:5]


def to_model_input(model_config: ModelConfig, images: list[Tensor]) -> Tensor:
    pictures = [Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()) for image in images]
    return torch.stack([model_config.preprocessing.resize_and_crop(picture) for picture in pictures])


def export(path: Path, model_and_config: tuple[ViT, ModelConfig] | None = None, **options: Any) -> ParityReport:
    model, model_config = model_and_config or build_calibrated_model()
    predictor = reference_predictor(model, model_config)
    images = images_of_many_sizes(124, model_config.preprocessing.channels)
    arguments: dict[str, Any] = {"to": "onnx", "precision": "fp32", "preprocessing": False} | options
    return export_model(predictor, path, **arguments, comparison=comparison_images(predictor, images, 100))


QUICK_KINDS = ("class", "rotary, registers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK_KINDS else pytest.mark.slow) for kind in MODEL_KINDS]
)
def test_every_kind_of_model_exports_to_onnx(tmp_path: Path, kind: str) -> None:
    model, model_config = build_calibrated_model(kind, depth=1)  # tracing time is proportional to the depth
    parity = export(tmp_path / "model.onnx", (model, model_config))
    assert parity.agreement.value == 1
    assert parity.max_abs_diff < 1e-4
    exported = OnnxModel(tmp_path / "model.onnx")
    # A batch size other than that of the traced example.
    images = to_model_input(model_config, images_of_many_sizes(5, model_config.preprocessing.channels))
    logits, probabilities = exported.logits(images.numpy())
    expected = reference_logits(model, model_config.preprocessing, images)
    np.testing.assert_allclose(logits, expected.numpy(), atol=2e-4)
    np.testing.assert_allclose(probabilities, (expected / 1.7).softmax(1).numpy(), atol=1e-4)
    assert np.array_equal(exported.is_ood(logits), model_config.calibration.is_ood(expected).numpy())


@pytest.mark.slow
def test_threads_of_the_exported_file_sleep_while_pytorch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take turns on the same cores. Spinning threads made PyTorch up to thirty times as slow."""
    sessions = []

    class RecordedModel(OnnxModel):
        def __init__(self, path: Path | str, threads: int | None = None, *, spinning: bool = True) -> None:
            super().__init__(path, threads, spinning=spinning)
            sessions.append(self.session)

    monkeypatch.setattr("vitral.export.export.OnnxModel", RecordedModel)
    export(tmp_path / "model.onnx", build_calibrated_model(depth=1))
    (options,) = (session.get_session_options() for session in sessions)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.slow
def test_exported_preprocessing_accepts_images_of_any_size(tmp_path: Path) -> None:
    parity = export(tmp_path / "model.onnx", preprocessing=True)
    assert parity.agreement.value == 1
    assert parity.max_abs_diff < 1e-3
    exported = OnnxModel(tmp_path / "model.onnx")
    assert exported.has_preprocessing
    model, model_config = build_calibrated_model()
    for height, width in ((16, 24), (15, 200), (333, 40), (64, 65)):
        picture = Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))
        pixels = model_config.preprocessing.resize_and_crop(picture)[None]
        expected = (reference_logits(model, model_config.preprocessing, pixels) / 1.7).softmax(1)[0]
        probabilities = {label.name: label.probability for label in exported.predict(picture).labels}
        np.testing.assert_allclose([probabilities[name] for name in CLASSES], expected.numpy(), atol=0.01)
    with pytest.raises(VitralError, match=r"gone\.png: no such file") as caught:
        exported.predict(tmp_path / "gone.png")
    assert caught.value.hint == "Check the path"


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["pad", "stretch"])
def test_exported_preprocessing_repeats_the_resize_mode(tmp_path: Path, resize: Resize) -> None:
    model, model_config = build_calibrated_model(depth=1)
    preprocessing = replace(model_config.preprocessing, crop=1.0, resize=resize)
    onnx_file.write_onnx(
        tmp_path / "model.onnx",
        model,
        replace(model_config, preprocessing=preprocessing),
        "fp32",
        preprocessing=True,
        calibration_images=torch.empty(0),
    )
    exported = OnnxModel(tmp_path / "model.onnx")
    for height, width in ((16, 24), (15, 200), (333, 40), (64, 65)):
        picture = smooth_photo(height, height, width)
        pixels = preprocessing.resize_and_crop(picture)[None]
        expected = (reference_logits(model, preprocessing, pixels) / 1.7).softmax(1)[0]
        probabilities = {label.name: label.probability for label in exported.predict(picture).labels}
        np.testing.assert_allclose([probabilities[name] for name in CLASSES], expected.numpy(), atol=0.01)


ExportFn = Callable[[str], tuple[Path, ParityReport]]


@pytest.fixture(scope="module")
def export_as(tmp_path_factory: pytest.TempPathFactory) -> ExportFn:
    """Export the same model in a precision, once per precision."""
    folder = tmp_path_factory.mktemp("precisions")

    @cache
    def export_once(precision: str) -> tuple[Path, ParityReport]:
        file = folder / f"{precision}.onnx"
        return file, export(file, precision=precision, min_agreement=0.8)

    return export_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        pytest.param("fp16", 0.02, marks=pytest.mark.slow),
        pytest.param("bf16", 0.1, marks=pytest.mark.slow),
        ("int8", 0.3),
    ],
)
def test_lower_precisions_make_smaller_files(export_as: ExportFn, precision: str, tolerance: float) -> None:
    (fp32_file, fp32_parity), (file, parity) = export_as("fp32"), export_as(precision)
    assert fp32_parity.max_abs_diff < 1e-4
    assert parity.agreement.value >= 0.8
    assert 0 < parity.max_abs_diff < tolerance
    assert file.stat().st_size < fp32_file.stat().st_size
    assert OnnxModel(file).metadata["precision"] == precision


@pytest.mark.slow
def test_int8_weights_have_one_scale_per_output_channel(export_as: ExportFn) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(export_as("int8")[0]).graph
    weights = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert len(weights) >= 4 * SMALL_CONFIG["depth"]
    scale_sizes = {t.dims[0] for t in graph.initializer if t.name.endswith("_scale") and t.dims}
    assert 3 * SMALL_CONFIG["width"] in scale_sizes


@pytest.mark.parametrize("kind", ["class", "rotary, qk norm", "layer scale, tanh", "distilled"])
def test_smoothing_activations_does_not_change_the_logits(kind: str) -> None:
    model, model_config = build_calibrated_model(kind)
    preprocessing = model_config.preprocessing
    images = to_model_input(model_config, images_of_many_sizes(8))
    smoothed = smooth_activations(model, collect_activation_ranges(model, [images], preprocessing))
    expected, actual = (reference_logits(m, preprocessing, images) for m in (model, smoothed))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    norm_weights = (m.get_parameter("encoder.blocks.0.norm1.weight") for m in (model, smoothed))
    assert not torch.equal(*norm_weights)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_torch_export_can_be_loaded_with_its_metadata(tmp_path: Path, precision: str) -> None:
    parity = export(tmp_path / "model.pt2", to="torch", precision=precision)
    assert parity.agreement.value >= 0.95
    program, metadata = torch_file.read_pt2(tmp_path / "model.pt2")
    assert metadata["classes"] == list(CLASSES)
    assert metadata["calibration"]["temperature"] == 1.7
    _, model_config = build_calibrated_model()
    assert program(to_model_input(model_config, images_of_many_sizes(7)))[1].shape == (7, 5)


@pytest.mark.slow
def test_an_aotinductor_package_can_be_loaded_with_its_metadata(tmp_path: Path) -> None:
    parity = export(tmp_path / "model.pt2", to="aoti")
    assert parity.agreement.value == 1
    assert torch_file.read_aoti(tmp_path / "model.pt2")[1]["classes"] == list(CLASSES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "torch", "preprocessing": True}, "preprocessing can only be exported to ONNX"),
        ({"to": "torch", "precision": "int8"}, "int8 can only be exported to ONNX"),
        ({"to": "onnx"}, r"ends in \.onnx"),
    ],
)
def test_unsupported_combinations_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitralError, match=message):
        export(tmp_path / "model.pt2", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_disagrees_with_the_model_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_graph = onnx_file.build_graph

    def build_wrong_graph(model: ViT, *arguments: Any, **keywords: Any) -> Any:
        wrong, _ = build_calibrated_model()
        with torch.no_grad():
            wrong.get_parameter("encoder.blocks.1.mlp.contract.weight").mul_(-3)
        return build_graph(wrong, *arguments, **keywords)

    monkeypatch.setattr(onnx_file, "build_graph", build_wrong_graph)
    with pytest.raises(VitralError, match="not exported: the fp32 file does not agree with the model") as caught:
        export(tmp_path / "model.onnx")
    assert "They diverge at block 2" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_an_unwritable_folder_is_detected_before_tracing(monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("tracing has started")

    monkeypatch.setattr("vitral.export.onnx_file.write_onnx", fail)
    monkeypatch.setattr("vitral.export.torch_file.write_pt2", fail)
    with pytest.raises(OSError, match="model"):
        export(Path("/proc") / f"model{SUFFIX_BY_TARGET[to]}", to=to)


def indexed_model(probabilities: Tensor) -> ModelFn:
    """A model whose input pixels are row indices into `probabilities`."""

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        rows = probabilities[images[:, 0, 0, 0].long()]
        return rows, rows

    return run


def test_parity_counts_agreement_accuracy_and_difference() -> None:
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)
    expected = torch.eye(4).repeat(10, 1) * 0.9 + 0.025
    actual = expected.clone()
    actual[:2] = actual[:2].roll(1, dims=1)  # two of forty images differ
    batches = [(batch, batch) for batch in images.split(10)]
    labels = torch.arange(4).repeat(10)
    parity = measure_parity(indexed_model(expected), indexed_model(actual), batches, labels)
    assert parity.agreement == Agreement(same=38, images=40)
    assert parity.accuracy == pytest.approx((1.0, 38 / 40))
    assert parity.max_abs_diff == pytest.approx(0.9)
    assert parity.mean_abs_diff == pytest.approx(2 * 0.9 / 40)


def parity_report(same: int, images: int, max_abs_diff: float = 0.4) -> ParityReport:
    return ParityReport(
        agreement=Agreement(same=same, images=images),
        max_abs_diff=max_abs_diff,
        mean_abs_diff=0.01,
        accuracy=None,
        images_per_second=(1, 2),
    )


def test_less_than_99_percent_agreement_is_refused_unless_accepted() -> None:
    check_parity(parity_report(990, 1000), "int8", lambda: "")
    with pytest.raises(
        VitralError, match=r"150 of 153 images, 98.04% \(95% CI 94.39-99.33%\), expected at least 99%"
    ) as e:
        check_parity(parity_report(150, 153), "int8", lambda: "They diverge at block 2")
    assert e.value.hint == "They diverge at block 2. To accept this agreement: --min-agreement 0.98"
    check_parity(parity_report(150, 153), "int8", lambda: "", min_agreement=0.98)


def test_a_large_difference_of_a_probability_is_refused_at_any_agreement() -> None:
    with pytest.raises(VitralError, match=r"a probability differs by 0\.4") as caught:
        check_parity(parity_report(100, 100), "fp32", lambda: "here", min_agreement=0)
    assert caught.value.hint == "here"
    with pytest.raises(VitralError, match="a probability differs by inf"):
        check_parity(parity_report(100, 100, float("inf")), "int8", lambda: "", min_agreement=0)


def test_the_report_states_images_and_interval() -> None:
    text = str(replace(parity_report(150, 153), accuracy=(0.95, 0.93), calibration_images=244))
    assert text == (
        "same top-1 label on 150 of 153 images, 98.04% (95% CI 94.39-99.33%), probabilities differ by at most 0.4 "
        "(mean 0.01), accuracy 95.00% → 93.00%, 1 → 2 images/s, calibrated on 244 other images"
    )


@pytest.fixture
def run_with_photos(tmp_path: Path) -> tuple[Path, Path]:
    """A run folder, and 110 images in two class folders without splits."""
    save_model(tmp_path / "run" / "model", *build_calibrated_model())
    for index, image in enumerate(images_of_many_sizes(110)):
        file = tmp_path / "photos" / CLASSES[index % 2] / f"{index:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    return tmp_path / "run", tmp_path / "photos"


@pytest.mark.slow
def test_the_file_is_compared_on_all_images_of_a_folder(
    run_with_photos: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = run_with_photos
    run_vitral("export", run, "--to", "torch", "--data", photos)
    output = capsys.readouterr().out
    assert "same top-1 label on 110 of 110 images, 100.00% (95% CI 96.63-100.00%)" in output
    assert "accuracy" in output


@pytest.mark.slow
def test_too_few_images_are_refused_unless_their_number_is_requested(
    run_with_photos: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = run_with_photos
    run_vitral("export", run, "--to", "torch", "--data", photos / CLASSES[0], expect=2)
    assert "55 images are too few" in capsys.readouterr().err
    assert not (run / "exports").exists()
    (photos / CLASSES[0] / "notes.txt").write_text("a note")
    run_vitral("export", run, "--to", "torch", "--data", photos / CLASSES[0], "--images", "55")
    output = capsys.readouterr()
    assert "on 55 of 55 images" in output.out
    assert f"  skipped 1 file: 1 not an image ({photos / CLASSES[0]}/notes.txt)\n" in output.err


def test_the_first_divergent_block_is_named() -> None:
    expected = [torch.ones(2, 3) for _ in range(5)]
    actual = [tokens.clone() for tokens in expected]
    assert first_divergent_block(expected, actual, 0.01) == "The relative error of every block is at most 0.0%"
    actual[2] += 0.5
    assert first_divergent_block(expected, actual, 0.01).startswith("They diverge at block 2: relative error 50.0%")


def test_the_exported_file_predicts_what_the_model_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "run" / "model", *build_calibrated_model())
    photos = tmp_path / "photos"
    photos.mkdir()
    for index, image in enumerate(images_of_many_sizes(20)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(photos / f"{index:02}.png")
    run_vitral("export", tmp_path / "run", "--data", photos, "--images", "20")
    assert "same top-1 label on 20 of 20 images" in capsys.readouterr().out
    run_vitral("predict", tmp_path / "run" / "exports" / "model.onnx", photos, "--json", "--top", "5")
    exported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    predictions = Predictor.load(tmp_path / "run", device="cpu").predict_files([photos])
    assert [prediction["file"] for prediction in exported] == [prediction.source for prediction in predictions]
    for actual, expected in zip(exported, predictions, strict=True):
        assert actual["ood"] == expected.is_ood
        probabilities = {label["name"]: label["probability"] for label in actual["labels"]}
        assert probabilities == pytest.approx({x.name: x.probability for x in expected.labels}, abs=1e-4)


def test_files_that_vitral_did_not_export_are_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, float_type = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", float_type, [1])],
        [helper.make_tensor_value_info("y", float_type, [1])],
    )
    other = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(VitralError, match="was not exported by vitral"):
        OnnxModel(tmp_path / "other.onnx")
    helper.set_model_props(other, {"vitral": json.dumps({"format": 1})})
    onnx.save(other, tmp_path / "old.onnx")
    with pytest.raises(VitralError, match="has metadata format 1"):
        OnnxModel(tmp_path / "old.onnx")
    (tmp_path / "corrupt.onnx").write_bytes(b"corrupt")
    with pytest.raises(VitralError, match="cannot read"):
        OnnxModel(tmp_path / "corrupt.onnx")
    with pytest.raises(VitralError, match="no such file"):
        OnnxModel(tmp_path / "missing.onnx")


def test_the_export_wrapper_maps_pixels_to_logits_and_probabilities() -> None:
    model, model_config = build_calibrated_model()
    images = to_model_input(model_config, images_of_many_sizes(3))
    logits, probabilities = ExportWrapper(model, model_config).eval()(images)
    torch.testing.assert_close(probabilities, model_config.calibration.probabilities(logits))
    *tokens, last = ExportWrapper(model, model_config, blocks=True).eval()(images)
    assert len(tokens) == SMALL_CONFIG["depth"] + 1
    torch.testing.assert_close(last, logits, atol=1e-4, rtol=1e-4)
