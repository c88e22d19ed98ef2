"""Engines: the logits of the model they were built from, in every precision, for every kind of model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import (
    MODEL_KINDS,
    SMALL_CONFIG,
    build_model,
    cpu_fp32,
    randomize_weights,
    reference_logits,
    relative_error,
    smooth_images,
)
from vitral.data.preprocess import Preprocessing
from vitral.device import cpu as cpu_info
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.inference import bench_results, gpu_selection
from vitral.inference.bench_results import BenchResult, BenchRow, load_bench_results, save_bench_result
from vitral.inference.cascade import CascadeEngine, cascade_margin, margin_for_agreement
from vitral.inference.cpu_blocks import Int8Block
from vitral.inference.cpu_engine import CpuEngine, CpuPrecision
from vitral.inference.cuda_engine import MAX_BATCH_TO_HOST, CudaEngine
from vitral.inference.engine import ReferenceEngine
from vitral.inference.engine_selection import build_engine, select_cpu_engine, select_engine
from vitral.inference.gpu_selection import cuda_hardware, select_cuda_engine
from vitral.inference.int8_calibration import collect_activation_ranges, load_activation_ranges, save_activation_ranges
from vitral.inference.linear import Int8Linear, PackedLinear, PlainLinear, to_uint8
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, save_model

needs_bf16 = pytest.mark.skipif(not cpu_info.cpu_has_bf16(), reason="this CPU has no bf16 instructions")
needs_int8 = pytest.mark.skipif(not cpu_info.cpu_has_int8(), reason="this CPU has no 8-bit dot products")
pytestmark = pytest.mark.skipif(not cpu_info.cpu_has_packed_linear(), reason="this build of PyTorch has no oneDNN")
PRECISIONS = [
    ("fp32", 1e-4),
    pytest.param("bf16", 0.05, marks=needs_bf16),
    pytest.param("int8", 0.15, marks=needs_int8),
]


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_engine_logits_agree_with_the_model(kind: str, precision: CpuPrecision, tolerance: float) -> None:
    model, preprocessing = build_model(kind)
    images = smooth_images(24, model.config.channels)
    expected = reference_logits(model, preprocessing, images)
    calibration_images = smooth_images(32, model.config.channels, seed=1)
    ranges = collect_activation_ranges(model, calibration_images.split(16), preprocessing)
    engine = CpuEngine(model, preprocessing, precision, ranges)
    assert relative_error(engine(images), expected) < tolerance
    one_by_one = torch.cat([engine(image) for image in images.split(1)])
    assert relative_error(one_by_one, engine(images)) < tolerance
    assert torch.equal(reference_logits(model, preprocessing, images), expected)  # the model is unchanged


@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_engine_features_agree_with_the_model(precision: CpuPrecision, tolerance: float) -> None:
    model, preprocessing = build_model("class")
    images = smooth_images(24)
    ranges = collect_activation_ranges(model, [smooth_images(32, seed=1)], preprocessing)
    engine = CpuEngine(model, preprocessing, precision, ranges)
    with torch.inference_mode():
        expected = model.features(preprocessing.normalise(images))
    assert relative_error(engine.features(images), expected) < tolerance
    torch.testing.assert_close(engine.head(engine.features(images)), engine(images), rtol=0, atol=0)


def test_the_reference_engine_is_bit_identical_to_the_module() -> None:
    model, preprocessing = build_model("class")
    images = smooth_images(24)
    engine = ReferenceEngine(model, preprocessing, cpu_fp32())
    assert torch.equal(engine(images), reference_logits(model, preprocessing, images))
    with torch.inference_mode():
        assert torch.equal(engine.features(images), model.features(preprocessing.normalise(images)))


def test_a_hybrid_keeps_its_own_patch_embedding() -> None:
    config = HybridConfig(**SMALL_CONFIG | {"image_size": (32, 32)}, conv=ConvStemConfig(widths=(8,), strides=(2,)))
    model = randomize_weights(VARIANTS["hybrid"](config))
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    engine = CpuEngine(model, preprocessing, "fp32")
    torch.testing.assert_close(engine(images), reference_logits(model, preprocessing, images), atol=1e-4, rtol=1e-4)


def test_the_last_block_computes_only_the_pooled_tokens() -> None:
    counts = {kind: CpuEngine(*build_model(kind), "fp32").num_pooled_tokens for kind in MODEL_KINDS}
    assert {kind for kind, count in counts.items() if count == 1} == {
        "class", "rotary, registers", "layer scale, tanh", "greyscale", "CLIP", "patch norm",
    }  # fmt: skip
    assert counts["distilled"] == 2
    pools_all = ("mean, no positions", "attention pooling", "late norm", "class and mean")
    assert all(counts[kind] is None for kind in pools_all)


def test_concurrent_calls_return_the_logits_of_their_own_images() -> None:
    engine = CpuEngine(*build_model("class"), "fp32")
    batches = smooth_images(64).split(4)
    expected = [engine(images) for images in batches]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(engine, batches), expected, strict=True):
            assert torch.equal(actual, wanted)


@needs_int8
def test_an_outlier_column_of_the_hidden_layer_stays_in_fp32() -> None:
    model, preprocessing = build_model("class")
    with torch.no_grad():  # as in trained ViTs: one hidden activation in the hundreds, the others below five
        model.get_parameter("encoder.blocks.1.mlp.expand.bias")[7] = 300.0
        model.get_parameter("encoder.blocks.1.mlp.contract.weight")[:, 7] *= 0.01
    images = smooth_images(24)
    ranges = collect_activation_ranges(model, [smooth_images(32, seed=1)], preprocessing)
    assert ranges["blocks.1.mlp.contract"][1].max() > 290
    engine = CpuEngine(model, preprocessing, "int8", ranges)
    has_outliers = [isinstance(block, Int8Block) and block.outlier_weights is not None for block in engine.blocks]
    assert has_outliers == [False, True]
    assert relative_error(engine(images), reference_logits(model, preprocessing, images)) < 0.15


@pytest.mark.parametrize("is_packed", [False, True])
def test_linear_layers_compute_linear_gelu_and_residual(is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(7, 32, generator=generator), torch.randn(7, 24, generator=generator)
    weight, bias = torch.randn(24, 32, generator=generator), torch.randn(24, generator=generator)
    linear = PackedLinear(weight, bias, torch.float32) if is_packed else PlainLinear(weight, bias)
    expected = x @ weight.T + bias
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear.gelu(x, "none"), torch.nn.functional.gelu(expected), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(linear.add_to(z.clone(), x), z + expected)


@needs_int8
def test_int8_linear_is_exact_for_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (9, 32), generator=generator, dtype=torch.uint8)
    weight = torch.randint(-127, 128, (24, 32), generator=generator).float()
    weight[:, 0] = 127  # so that every weight scale is 1
    bias, z = torch.arange(24).float(), torch.randn(9, 24, generator=generator)
    linear = Int8Linear(weight, bias, 1.0, 128)
    exact = (x.double() - 128) @ weight.T.double() + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(linear.add_to(z.clone(), x).double(), z + exact, rtol=1e-6, atol=1e-3)


def test_to_uint8_rounds_and_saturates() -> None:
    values = torch.tensor([-1000.0, -128.4, -0.6, 0.0, 0.4, 1.5, 2.5, 126.7, 500.0])
    assert to_uint8(values).tolist() == [0, 0, 127, 128, 128, 130, 130, 255, 255]


class RolledEngine:
    """The logits of another engine with the classes rotated by one: wrong for every image."""

    def __init__(self, engine: CpuEngine) -> None:
        self.engine, self.nbytes = engine, engine.nbytes

    def __call__(self, images: Tensor) -> Tensor:
        return self.engine(images).roll(1, dims=1)

    def features(self, images: Tensor) -> Tensor:
        return self.engine.features(images) * -1

    def head(self, features: Tensor) -> Tensor:
        return self.engine.head(-features).roll(1, dims=1)


def test_a_cascade_recomputes_only_ambiguous_images() -> None:
    accurate = CpuEngine(*build_model("class"), "fp32")
    fast, images = RolledEngine(accurate), smooth_images(24)
    lead = fast(images).topk(2).values.diff(dim=1).abs().flatten()
    margin = float(lead.median()) + 1e-6
    ambiguous = lead < margin
    assert 0 < int(ambiguous.sum()) < 24
    cascade = CascadeEngine(fast, accurate, margin)
    for actual, right, wrong in (
        (cascade(images), accurate(images), fast(images)),
        (cascade.features(images), accurate.features(images), fast.features(images)),
    ):
        torch.testing.assert_close(actual[ambiguous], right[ambiguous])
        assert torch.equal(actual[~ambiguous], wrong[~ambiguous])
    assert torch.equal(CascadeEngine(fast, accurate, 0.0)(images), fast(images))


def test_the_cascade_margin_covers_the_errors_of_the_fast_engine() -> None:
    generator = torch.Generator().manual_seed(0)
    accurate = torch.randn(4000, 10, generator=generator)
    fast = accurate + 0.05 * torch.randn(4000, 10, generator=generator)
    margin = cascade_margin(fast, accurate)
    assert margin == pytest.approx(3.5 * 0.05 * 2**0.5, rel=0.05)  # a difference of two logits
    top2 = fast.topk(2).values
    unambiguous = top2[:, 0] - top2[:, 1] >= margin
    assert torch.equal(fast.argmax(1)[unambiguous], accurate.argmax(1)[unambiguous])
    assert cascade_margin(fast[:, :1], accurate[:, :1]) == 0


def test_the_margin_for_an_agreement_leaves_that_share_of_wrong_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    accurate = torch.randn(60_000, 10, generator=generator)
    fast = accurate + 0.1 * torch.randn(60_000, 10, generator=generator)
    margins = []
    for target in (0.002, 0.0005):
        margins.append(margin_for_agreement(fast[:10_000], accurate[:10_000], target))
        top2 = fast[10_000:].topk(2).values
        again = top2[:, 0] - top2[:, 1] < margins[-1]
        wrong = (fast.argmax(1) != accurate.argmax(1))[10_000:]
        missed = float((wrong & ~again).double().mean())
        assert 0.3 * target < missed < 1.5 * target  # errors of competing classes are not independent
    assert margins[0] < margins[1] < cascade_margin(fast, accurate)
    assert margin_for_agreement(accurate, accurate) == 0
    assert margin_for_agreement(fast[:, :1], accurate[:, :1]) == 0


def test_images_that_a_model_is_certain_of_do_not_make_the_margin_vanish() -> None:
    generator = torch.Generator().manual_seed(0)

    def predict(count: int, certainty: float) -> tuple[Tensor, Tensor]:
        """fp32 logits of two classes, and those with errors of standard deviation 0.1."""
        accurate = torch.randn(count, 2, generator=generator)
        accurate[:, 0] += certainty
        return accurate, accurate + 0.1 * torch.randn(count, 2, generator=generator)

    accurate, fast = predict(256, certainty=12.0)  # such as images that it was trained on
    margin = margin_for_agreement(fast, accurate)
    assert 1.5 * 0.1 * 2**0.5 < margin < cascade_margin(fast, accurate)
    accurate, fast = predict(100_000, certainty=2.0)  # 9% of them differ by less than 0.5
    is_kept = (fast[:, 0] - fast[:, 1]).abs() >= margin
    wrong = (fast.argmax(1) != accurate.argmax(1)) & is_kept
    assert float(wrong.double().mean()) < 0.001


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    model, preprocessing = build_model("class")
    model_config = ModelConfig(
        architecture=model.config, preprocessing=preprocessing, classes=tuple("abcde"), trained_on="nothing", epoch=1
    )
    save_model(tmp_path / "model", model, model_config)
    return tmp_path / "model"


def bench_result(engine: str, cpu: str | None = None) -> BenchResult:
    row = BenchRow(
        engine=engine, threads=1, batch_size=8, p50_ms=1, p95_ms=2, p99_ms=3, images_per_second=9, memory_mb=1,
        agreement=1, agreement_low=0.9, agreement_high=1, recheck_rate=0,
    )  # fmt: skip
    return BenchResult(
        cpu=cpu or cpu_info.cpu_name(), versions="a test", date="today", images=9, calibration_images=9, rows=(row,),
        margins={"bf16": 0.5, "int8": 1.0}, engine=engine, batch_size=8, reason="fastest",
    )  # fmt: skip


def test_without_a_benchmark_the_engine_is_fp32(model_dir: Path) -> None:
    engine = Predictor.load(model_dir, device="cpu").engine
    assert str(engine) == "fp32 (no benchmark on this CPU; run vitral bench)"
    assert engine.info() == {
        "name": "fp32", "precision": "fp32", "device": "cpu", "threads": torch.get_num_threads(), "backend": "pytorch",
    }  # fmt: skip


def test_the_reference_engine_can_be_requested(model_dir: Path) -> None:
    save_bench_result(model_dir, bench_result("bf16"))
    predictor = Predictor.load(model_dir, device="cpu", engine="reference")
    assert (predictor.engine.name, predictor.engine.precision) == ("reference", "fp32")
    images = smooth_images(20)
    expected = reference_logits(predictor.model, predictor.model_config.preprocessing, images)
    assert torch.equal(predictor.logits(images), expected)


@needs_bf16
def test_auto_uses_the_benchmark_of_this_cpu_only(model_dir: Path) -> None:
    save_bench_result(model_dir, bench_result("bf16", cpu="another CPU, 64 cores"))
    assert Predictor.load(model_dir, device="cpu").engine.name == "fp32"
    save_bench_result(model_dir, bench_result("bf16"))
    assert {*load_bench_results(model_dir)} == {"another CPU, 64 cores", cpu_info.cpu_name()}
    predictor = Predictor.load(model_dir, device="cpu")
    assert (predictor.engine.name, predictor.engine.batch_size, predictor.engine.reason) == ("bf16", 8, "fastest")
    images = smooth_images(20)
    expected = reference_logits(predictor.model, predictor.model_config.preprocessing, images)
    assert 0 < relative_error(predictor.logits(images), expected) < 0.05
    cascade = Predictor.load(model_dir, device="cpu", engine="bf16-cascade").engine
    assert isinstance(cascade.engine, CascadeEngine)
    assert (cascade.name, cascade.precision, cascade.engine.margin) == ("bf16-cascade", "bf16", 0.5)


@needs_int8
def test_int8_needs_activation_ranges(model_dir: Path) -> None:
    with pytest.raises(VitralError, match="activation ranges have not been measured") as caught:
        Predictor.load(model_dir, device="cpu", engine="int8")
    assert "vitral bench" in caught.value.hint
    save_bench_result(model_dir, bench_result("int8"))  # recommended, but the ranges are missing
    assert Predictor.load(model_dir, device="cpu").engine.reason.startswith("int8 was fastest, but int8 engine")
    fp32 = Predictor.load(model_dir, device="cpu", engine="fp32")
    ranges = collect_activation_ranges(fp32.model, [smooth_images(16)], fp32.model_config.preprocessing)
    save_activation_ranges(model_dir, ranges)
    loaded = load_activation_ranges(model_dir)
    assert loaded is not None
    assert loaded.keys() == ranges.keys()
    assert Predictor.load(model_dir, device="cpu").engine.name == "int8"
    (model_dir / "int8.safetensors").write_bytes(b"corrupt")
    with pytest.raises(VitralError, match="cannot read"):
        Predictor.load(model_dir, device="cpu", engine="int8")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"x": {"margins": {}, "rows": [{"a": 1}]}}'])
def test_a_corrupt_benchmark_file_is_ignored_and_replaced(model_dir: Path, text: str) -> None:
    file = model_dir / bench_results.FILE_NAME
    file.write_text(text)
    assert load_bench_results(model_dir) == {}
    Predictor.load(model_dir, device="cpu")
    save_bench_result(model_dir, bench_result("fp32"))
    assert json.loads(file.read_text())[cpu_info.cpu_name()]["margins"] == {"bf16": 0.5, "int8": 1.0}


def test_unsupported_precisions_are_refused_with_the_reason(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.inference.cpu_engine.cpu_has_bf16", lambda: False)
    monkeypatch.setattr("vitral.inference.cpu_engine.cpu_has_int8", lambda: False)
    for engine, reason in (
        ("bf16", "no bf16 instructions"),
        ("int8-cascade", "no 8-bit dot products"),
        ("fp8", "CPUs have no FP8 units"),
        ("fp16", "expected engine to be one of auto, reference, fp32"),
    ):
        with pytest.raises(VitralError, match=reason):
            Predictor.load(model_dir, device="cpu", engine=engine)  # type: ignore[arg-type]


def test_a_model_with_its_own_forward_pass_uses_the_reference_engine() -> None:
    class CustomViT(ViT):
        def features(self, images_BCHW: Tensor) -> Tensor:
            return super().features(images_BCHW) * 2

    model, preprocessing = randomize_weights(CustomViT(ViTConfig(**SMALL_CONFIG))), build_model("class")[1]
    choice = select_engine(model, preprocessing, cpu_fp32())
    assert choice.name == "reference"
    assert choice.reason == "CustomViT overrides the forward pass"
    with pytest.raises(VitralError, match="overrides the forward pass"):
        select_cpu_engine(model, preprocessing, cpu_fp32(), None, "bf16")
    with pytest.raises(VitralError, match="overrides the forward pass"):
        build_engine(model, preprocessing, "fp32", None, None, {})


def fake_gpu(**fields: Any) -> Hardware:
    """Hardware that CudaEngine accepts, on the CPU."""
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    defaults: dict[str, Any] = {"device": torch.device("cpu"), "precision": "fp32", "compile": False}
    return Hardware(**defaults | fields, reasons=reasons)


def test_the_cuda_engine_pads_batches_and_agrees_with_the_model() -> None:
    model, preprocessing = build_model("class")
    engine = CudaEngine(model, preprocessing, fake_gpu())
    images = smooth_images(11)
    expected = reference_logits(model, preprocessing, images)
    torch.testing.assert_close(engine(images), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(engine.compute(images), expected, atol=1e-5, rtol=1e-4)
    assert engine(images[:1]).shape == (1, 5)
    many = smooth_images(MAX_BATCH_TO_HOST + 1)
    torch.testing.assert_close(engine(many), reference_logits(model, preprocessing, many), atol=1e-5, rtol=1e-4)
    assert [*engine.graphs] == [(12, True), (12, False), (1, True), (24, False)]
    with torch.inference_mode():
        features = model.features(preprocessing.normalise(images))
    torch.testing.assert_close(engine.features(images), features, atol=1e-5, rtol=1e-4)


def test_logits_of_the_cuda_engine_can_be_used_in_gradients() -> None:
    model, preprocessing = build_model("class")
    temperature = torch.ones(1, requires_grad=True)
    (CudaEngine(model, preprocessing, fake_gpu())(smooth_images(2)) / temperature).sum().backward()
    assert temperature.grad is not None


def test_a_gpu_uses_cuda_graphs_and_has_no_int8() -> None:
    model, preprocessing = build_model("class")
    choice = select_cuda_engine(model, preprocessing, fake_gpu())
    assert str(choice) == "fp32 (a test; PyTorch kernels)"
    with pytest.raises(VitralError, match="int8 engine unavailable: it runs on CPUs only"):
        select_cuda_engine(model, preprocessing, fake_gpu(), "int8")


def test_a_failed_graph_capture_falls_back_to_the_reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Callable[[Tensor], Tensor]:
        raise RuntimeError("capture is not permitted\nand more")

    monkeypatch.setattr("vitral.inference.cuda_engine.capture_forward", fail)
    model, preprocessing = build_model("class")
    choice = select_cuda_engine(model, preprocessing, fake_gpu())
    assert choice.name == "reference"
    assert choice.reason == "CUDA graph capture failed: capture is not permitted"
    images = smooth_images(5)
    assert torch.equal(choice.logits(images), reference_logits(model, preprocessing, images))


@pytest.mark.parametrize(
    ("options", "expected_compile", "is_compiled"),
    [
        ({}, "no", False),
        ({"throughput": True}, "auto", False),  # fused kernels, but not those of torch.compile
        ({"name": "fp8"}, "auto", False),
        ({"compile": "auto"}, "auto", True),
    ],
)
def test_gpu_kernels_are_used_for_throughput_fp8_or_on_request(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected_compile: str, is_compiled: bool
) -> None:
    requested: dict[str, Any] = {}

    def select_hardware(**arguments: Any) -> Hardware:
        requested.update(arguments)
        allowed = arguments["compile"] != "no"
        return fake_gpu(precision="bf16", compile=allowed, use_triton=allowed)

    monkeypatch.setattr(gpu_selection, "select_hardware", select_hardware)
    arguments: dict[str, Any] = {"name": "auto", "compile": "no", "throughput": False} | options
    hardware = cuda_hardware(**arguments)
    precision = {"fp8": "fp8"}.get(arguments["name"], "auto")
    assert requested == {"device": "gpu", "precision": precision, "compile": expected_compile}
    assert (hardware.compile, hardware.use_triton) == (is_compiled, expected_compile == "auto")
