"""The OpenVINO engine: the logits of the model it was built from, for every kind of model that it supports."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import (
    MODEL_KINDS,
    SMALL_CONFIG,
    build_model,
    cpu_fp32,
    randomize_weights,
    reference_logits,
    relative_error,
    save_random_model,
    smooth_images,
)
from vitral.data.preprocess import Preprocessing
from vitral.device import cpu as cpu_info
from vitral.errors import VitralError
from vitral.inference import bench
from vitral.inference.bench_results import BenchResult, BenchRow, save_bench_result
from vitral.inference.cpu_backends import CpuBackend, PrecisionEngine, throughput_backend
from vitral.inference.cpu_engine import CpuEngine, CpuPrecision, num_pooled_tokens
from vitral.inference.engine_selection import select_engine
from vitral.inference.int8_calibration import collect_activation_ranges
from vitral.inference.openvino_engine import (
    OpenVinoEngine,
    compile_options,
    openvino_core,
    openvino_unsupported_reason,
)
from vitral.inference.predictor import Predictor
from vitral.models.vit import Grid, ViT, ViTConfig

pytest.importorskip("openvino")
pytestmark = pytest.mark.skipif(not cpu_info.cpu_has_packed_linear(), reason="this build of PyTorch has no oneDNN")
SUPPORTED_KINDS = sorted(MODEL_KINDS.keys() - {"patch norm"})
needs_bf16 = pytest.mark.skipif(not cpu_info.cpu_has_bf16(), reason="this CPU has no bf16 instructions")
needs_int8 = pytest.mark.skipif(not cpu_info.cpu_has_int8(), reason="this CPU has no 8-bit dot products")


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-4), pytest.param("bf16", 0.1, marks=needs_bf16), pytest.param("int8", 0.15, marks=needs_int8)],
)
def test_logits_and_features_agree_with_the_model(kind: str, precision: CpuPrecision, tolerance: float) -> None:
    model, preprocessing = build_model(kind)
    images = smooth_images(24, model.config.channels)
    calibration_images = smooth_images(32, model.config.channels, seed=1)
    ranges = collect_activation_ranges(model, calibration_images.split(16), preprocessing)
    engine = OpenVinoEngine(model, preprocessing, precision, ranges)
    logits, features = engine(images), engine.features(images)
    assert relative_error(logits, reference_logits(model, preprocessing, images)) < tolerance
    with torch.inference_mode():
        expected = model.features(preprocessing.normalise(images))
    assert relative_error(features, expected) < tolerance
    torch.testing.assert_close(engine.head(features), logits, rtol=1e-5, atol=1e-5)
    varying = torch.cat([engine(part) for part in images.split([1, 2, 16, 5])])
    assert relative_error(varying, logits) < tolerance


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_rows_do_not_change_the_output(kind: str, batch_size: int) -> None:
    from vitral.inference.openvino_graph import build_graph, cut_patches

    model, preprocessing = build_model(kind)
    patches = cut_patches(smooth_images(batch_size, model.config.channels), model.config.patch_size)
    ranges = collect_activation_ranges(model, [smooth_images(32, model.config.channels, seed=1)], preprocessing)
    options = compile_options("fp32", 1) | {"LP_TRANSFORMS_MODE": False}
    count = num_pooled_tokens(model)
    for its_ranges in (None, ranges):
        plain, padded = (
            openvino_core().compile_model(
                build_graph(model, preprocessing, count, its_ranges, batch_size, multiple), "CPU", options
            )
            for multiple in (1, 4)
        )
        expected = torch.from_numpy(plain([patches])[0])
        torch.testing.assert_close(torch.from_numpy(padded([patches])[0]), expected, atol=1e-4, rtol=1e-4)


def int8_graph_logits(model: ViT, preprocessing: Preprocessing, images: Tensor) -> Tensor:
    """Logits of the int8 graph in fp32 with rounded values, which needs no 8-bit dot products."""
    from vitral.inference.openvino_graph import build_graph, cut_patches

    ranges = collect_activation_ranges(model, [smooth_images(32, images.shape[1], seed=1)], preprocessing)
    options = compile_options("fp32", 1) | {"LP_TRANSFORMS_MODE": False}
    compiled = openvino_core().compile_model(build_graph(model, preprocessing, None, ranges), "CPU", options)
    patches = cut_patches(images, model.config.patch_size)
    with torch.inference_mode():
        return model.head(model.pool(torch.from_numpy(compiled([patches])[0])))


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
def test_the_int8_graph_rounds_to_the_calibrated_ranges(kind: str) -> None:
    model, preprocessing = build_model(kind)
    images = smooth_images(24, model.config.channels)
    logits = int8_graph_logits(model, preprocessing, images)
    assert 1e-4 < relative_error(logits, reference_logits(model, preprocessing, images)) < 0.15


def test_an_outlier_column_of_the_hidden_layer_stays_in_fp32() -> None:
    model, preprocessing = build_model("class")
    with torch.no_grad():  # as in trained ViTs: one hidden activation in the hundreds, the others below five
        model.get_parameter("encoder.blocks.1.mlp.expand.bias")[7] = 300.0
        model.get_parameter("encoder.blocks.1.mlp.contract.weight")[:, 7] *= 0.01
    images = smooth_images(24)
    logits = int8_graph_logits(model, preprocessing, images)
    assert relative_error(logits, reference_logits(model, preprocessing, images)) < 0.15


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"])
def test_every_activation_is_supported(activation: str) -> None:
    model, preprocessing = build_model("class", activation=activation)
    images = smooth_images(8)
    engine = OpenVinoEngine(model, preprocessing, "fp32")
    torch.testing.assert_close(engine(images), reference_logits(model, preprocessing, images), atol=1e-4, rtol=1e-4)


def test_many_channels_are_supported() -> None:
    config = ViTConfig(**SMALL_CONFIG | {"channels": 7})
    preprocessing = Preprocessing(image_size=(16, 24), channels=7, mean=(0.3,) * 7, std=(0.2,) * 7)
    model = randomize_weights(ViT(config))
    images = smooth_images(8, 7)
    engine = OpenVinoEngine(model, preprocessing, "fp32")
    torch.testing.assert_close(engine(images), reference_logits(model, preprocessing, images), atol=1e-4, rtol=1e-4)


def test_results_of_earlier_calls_are_not_overwritten() -> None:
    engine = OpenVinoEngine(*build_model("distilled"), "fp32")
    first, second = smooth_images(4), smooth_images(4, seed=1)
    features = engine.features(first)
    copy = features.clone()
    engine.features(second)
    assert torch.equal(features, copy)


def test_concurrent_calls_return_the_logits_of_their_own_images() -> None:
    engine = OpenVinoEngine(*build_model("class"), "fp32")
    batches = smooth_images(64).split(4)
    expected = [engine(images) for images in batches]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(engine, batches), expected, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-5)


def test_the_number_of_threads_can_change_between_calls() -> None:
    model, preprocessing = build_model("class")
    engine, images, before = OpenVinoEngine(model, preprocessing, "fp32"), smooth_images(8), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            expected = reference_logits(model, preprocessing, images)
            torch.testing.assert_close(engine(images), expected, atol=1e-4, rtol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_ctrl_c_is_an_exception_after_engines_are_released() -> None:
    """It would be a segmentation fault if each engine had a core."""
    engines = [OpenVinoEngine(*build_model("class"), "fp32") for _ in range(3)]
    for engine in engines:
        engine(smooth_images(2))
    del engine
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        while engines:
            del engines[0]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


class ScaledEmbedding(ViT):
    def embed(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        return super().embed(images_BCHW, grid) * 2


class OtherActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def test_unsupported_models_are_refused_with_the_reason_and_run_on_pytorch() -> None:
    model, preprocessing = build_model("class")
    other_activation, _ = build_model("class")
    other_activation.encoder.blocks[0].mlp.activation = OtherActivation()  # type: ignore[union-attr]
    cases: list[tuple[ViT, Preprocessing, str]] = [
        (*build_model("patch norm"), "NormedPatchEmbedding is not the standard patch embedding"),
        (model, replace(preprocessing, resize="native"), "native sizes vary"),
        (model, replace(preprocessing, dtype="uint16"), "uint8 pixels only, these are uint16"),
        (randomize_weights(ScaledEmbedding(model.config)), preprocessing, "ScaledEmbedding embeds patches in its own"),
        (other_activation, preprocessing, "the OpenVINO graph has no OtherActivation"),
    ]
    for unsupported, its_preprocessing, reason in cases:
        assert reason in str(openvino_unsupported_reason(unsupported, its_preprocessing))
        with pytest.raises(VitralError, match="fp32 engine unavailable"):
            OpenVinoEngine(unsupported, its_preprocessing, "fp32")
        choice = select_engine(unsupported, its_preprocessing, cpu_fp32())
        assert (choice.name, choice.backend) == ("fp32", "pytorch")


def bench_result(engine: str = "fp32", **fields: Any) -> BenchResult:
    row = BenchRow(
        engine=engine, threads=1, batch_size=8, p50_ms=1, p95_ms=2, p99_ms=3, images_per_second=9, memory_mb=1,
        agreement=1, agreement_low=0.9, agreement_high=1, recheck_rate=0,
    )  # fmt: skip
    defaults: dict[str, Any] = {"backends": {"fp32": "openvino"}, "reason": "OpenVINO, fastest"}
    return BenchResult(
        cpu=cpu_info.cpu_name(), versions="a test", date="today", images=9, calibration_images=9, rows=(row,),
        engine=engine, batch_size=8, **defaults | fields,
    )  # fmt: skip


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = save_random_model(tmp_path / "model")
    save_bench_result(folder, bench_result())
    return folder


def hide_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("vitral.inference.openvino_engine.find_spec", lambda name: None)
    monkeypatch.setattr("vitral.inference.bench.is_installed", lambda: False)


def test_the_measured_backend_is_used_and_recorded(model_dir: Path) -> None:
    images = smooth_images(8)
    reference = Predictor.load(model_dir, device="cpu", engine="reference")
    for name in ("auto", "fp32"):
        predictor = Predictor.load(model_dir, device="cpu", engine=name)
        assert isinstance(predictor.engine.engine, OpenVinoEngine)
        info = predictor.engine.info()
        assert (info["name"], info["backend"]) == ("fp32", "openvino")
        torch.testing.assert_close(predictor.logits(images), reference.logits(images), atol=1e-4, rtol=1e-4)


def test_without_a_benchmark_a_server_computes_fp32_with_openvino(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, images = save_random_model(tmp_path / "model"), smooth_images(8)
    few = Predictor.load(folder, device="cpu")
    many = Predictor.load(folder, device="cpu", throughput=True)
    assert (few.engine.backend, many.engine.backend) == ("pytorch", "openvino")
    assert str(many.engine) == "fp32 (OpenVINO, no benchmark on this CPU; run vitral bench)"
    torch.testing.assert_close(many.logits(images), few.logits(images), atol=1e-4, rtol=1e-4)
    hide_openvino(monkeypatch)
    assert Predictor.load(folder, device="cpu", throughput=True).engine.backend == "pytorch"


def test_openvino_with_other_fp32_logits_is_not_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preprocessing = build_model("class")
    assert throughput_backend(model, preprocessing) == "openvino"
    exact = OpenVinoEngine.__call__
    monkeypatch.setattr(OpenVinoEngine, "__call__", lambda engine, images: exact(engine, images) * 1.01)
    assert throughput_backend(model, preprocessing) == "pytorch"


def test_without_openvino_the_pytorch_engine_is_used_and_the_install_command_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_openvino(monkeypatch)
    automatic = Predictor.load(model_dir, device="cpu").engine
    assert (automatic.name, automatic.backend) == ("fp32", "pytorch")
    assert "OpenVINO is not installed; pip install 'vitral[openvino]'" in automatic.reason
    assert Predictor.load(model_dir, device="cpu", engine="fp32").engine.backend == "pytorch"
    save_bench_result(model_dir, bench_result("int8", backends={"fp32": "openvino", "int8": "openvino"}))
    automatic = Predictor.load(model_dir, device="cpu").engine
    assert (automatic.name, automatic.backend) == ("fp32", "pytorch")
    assert automatic.reason.startswith("int8 was fastest, but int8 engine unavailable")


def run_bench(folder: Path) -> tuple[BenchResult, list[str]]:
    """The result and the logged lines of a short benchmark."""
    model, preprocessing = build_model("class")
    lines: list[str] = []
    result = bench.run_bench(
        model, preprocessing, smooth_images(16), smooth_images(16, seed=1), folder, threads=(1,), batch_sizes=(1,),
        seconds=0.001, log=lines.append,
    )  # fmt: skip
    return result, lines


def test_bench_names_the_install_command_if_openvino_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_openvino(monkeypatch)
    result, lines = run_bench(tmp_path)
    assert set(result.backends.values()) == {"pytorch"}
    assert any("pip install 'vitral[openvino]'" in line for line in lines)


def test_bench_races_the_backends_and_estimates_its_duration(tmp_path: Path) -> None:
    result, lines = run_bench(tmp_path)
    assert "OpenVINO" in result.versions
    assert any(line.startswith("fp32: ") and "PyTorch" in line and "OpenVINO" in line for line in lines)
    assert sum(line.startswith("Estimated time: ") for line in lines) == 1
    assert result.reason.startswith({"pytorch": "PyTorch", "openvino": "OpenVINO"}[result.backends["fp32"]])


def test_a_backend_with_other_logits_is_dropped() -> None:
    model, preprocessing = build_model("class")
    exact, images = CpuEngine(model, preprocessing, "fp32"), smooth_images(8)
    with torch.no_grad():
        model.get_parameter("encoder.blocks.0.mlp.expand.bias").add_(0.5)
    candidates: dict[CpuBackend, PrecisionEngine] = {
        "pytorch": exact,
        "openvino": OpenVinoEngine(model, preprocessing, "fp32"),
    }
    lines: list[str] = []
    bench.drop_inexact_backends(candidates, images, lines.append)
    assert [*candidates] == ["pytorch"]
    assert lines[0].startswith("OpenVINO is not used: its fp32 logits differ by")
