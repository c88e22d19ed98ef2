"""FP8 with a re-check of close calls, its calibration and its selection. bf16 on the CPU stands in for FP8 on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import cpu_name
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.inference import cuda_cascade, gpu_selection, job_bench
from vitral.inference.bench_results import BenchRow, delete_bench_result, load_bench_results, save_bench_result
from vitral.inference.cuda_cascade import CudaCascadeEngine, build_fp8_cascade, build_recheck_engine
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.gpu_bench import recommend_gpu_engine, run_gpu_bench
from vitral.inference.gpu_selection import select_gpu_engine
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

PREPROCESSING = Preprocessing(image_size=(16, 16), channels=3, mean=(0.4,) * 3, std=(0.25,) * 3)


def fake_gpu(**fields: Any) -> Hardware:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    defaults: dict[str, Any] = {"device": torch.device("cpu"), "precision": "fp32", "compile": False}
    return Hardware(**defaults | fields, reasons=reasons)


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`select_hardware` returns the CPU in the requested precision; FP8 is bf16."""

    def select_hardware(*, precision: str, **_: Any) -> Hardware:
        return fake_gpu(precision="fp32" if precision == "fp32" else "bf16")

    for module in (cuda_cascade, gpu_selection):
        monkeypatch.setattr(module, "select_hardware", select_hardware)


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=(16, 16), patch_size=4, num_classes=7, width=32, depth=2, heads=2)).eval()
    torch.nn.init.normal_(model.get_parameter("head.out.weight"), std=0.2)
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (48, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def fp32_logits(model: ViT, images: Tensor) -> Tensor:
    return model(PREPROCESSING.normalise(images))


def test_only_close_calls_are_computed_again(model: ViT, images: Tensor) -> None:
    fast, recheck = CudaEngine(model, PREPROCESSING, fake_gpu(precision="bf16")), None
    top = fast(images).topk(2).values
    margin = float((top[:, 0] - top[:, 1]).median()) + 1e-6
    recheck = build_recheck_engine(model, PREPROCESSING, fake_gpu())
    cascade = CudaCascadeEngine(fast, recheck, margin)
    close = cascade.is_ambiguous(fast(images))
    assert 0 < int(close.sum()) < len(images)
    for actual, again, once in (
        (cascade(images), recheck(images), fast(images)),
        (cascade.features(images), recheck.features(images), fast.features(images)),
    ):
        torch.testing.assert_close(actual[close], again[close], atol=2e-3, rtol=2e-3)
        assert torch.equal(actual[~close], once[~close])
    torch.testing.assert_close(cascade(images)[close], fp32_logits(model, images)[close], atol=5e-3, rtol=5e-3)


def test_images_that_overflow_fp16_are_computed_in_fp32(model: ViT, images: Tensor) -> None:
    with torch.no_grad():
        model.patch_embedding.project.weight.mul_(1e6)
    cascade = build_fp8_cascade(model, PREPROCESSING, fake_gpu(), margin=torch.inf)
    assert isinstance(cascade.accurate, CudaCascadeEngine)
    assert cascade.accurate.fast(images).isnan().all(), "the case that this test is about"
    torch.testing.assert_close(cascade(images), fp32_logits(model, images))


def test_a_benchmark_calibrates_and_auto_uses_it(model: ViT, images: Tensor, tmp_path: Path) -> None:
    result = run_gpu_bench(
        model, PREPROCESSING, fake_gpu(), images, images[:16], tmp_path, batch_sizes=(4,), seconds=0.001
    )
    assert [row.engine for row in result.rows] == ["fp32", "bf16", "fp8", "fp8-cascade"]
    cascade = result.rows[-1]
    assert cascade.agreement >= 0.95
    assert 0 <= cascade.recheck_rate < 1
    assert result.margins["fp8"] > 0
    assert result.engine == "bf16", "48 images cannot show an agreement of 99%"
    assert load_bench_results(tmp_path)[result.cpu].margins == result.margins
    choice = select_gpu_engine(model, PREPROCESSING, fake_gpu(), "auto", tmp_path)
    assert (choice.name, result.reason in choice.reason) == ("bf16", True)

    stored = replace(result, cpu=cpu_name(), engine="fp8-cascade", reason="1.4x bf16")
    save_bench_result(tmp_path, stored)
    choice = select_gpu_engine(model, PREPROCESSING, fake_gpu(), "auto", tmp_path)
    assert (choice.name, choice.precision, choice.reason) == ("fp8-cascade", "fp8", "1.4x bf16")
    assert isinstance(choice.engine, CudaCascadeEngine)
    assert choice.engine.margin == result.margins["fp8"]
    assert [*choice.engine.fast.graphs] == [(1, False), (16, False)], "those that the cascade replays"
    expected = fp32_logits(model, images)
    is_tie = expected.topk(2).values.diff(dim=1).flatten().abs() < 5e-3  # for fp16
    assert torch.equal(choice.logits(images).argmax(1)[~is_tie], expected.argmax(1)[~is_tie])
    assert select_gpu_engine(model, PREPROCESSING, fake_gpu(), "bf16", tmp_path).name == "bf16"

    assert delete_bench_result(tmp_path, cpu_name()) == stored
    assert select_gpu_engine(model, PREPROCESSING, fake_gpu(), "auto", tmp_path).name == "bf16"


def test_a_cascade_needs_a_calibrated_margin(model: ViT, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="fp8-cascade engine unavailable: no benchmark on this GPU"):
        select_gpu_engine(model, PREPROCESSING, fake_gpu(), "fp8-cascade", tmp_path)


def test_a_cascade_that_cannot_be_built_is_replaced_by_bf16_with_the_reason(
    model: ViT, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_gpu_bench(model, PREPROCESSING, fake_gpu(), images, images[:16], None, batch_sizes=(4,), seconds=0.001)
    save_bench_result(tmp_path, replace(result, cpu=cpu_name(), engine="fp8-cascade"))

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(gpu_selection, "build_fp8_cascade", fail)
    choice = select_gpu_engine(model, PREPROCESSING, fake_gpu(), "auto", tmp_path)
    assert choice.name == "bf16"
    assert choice.reason.endswith("fp8-cascade was fastest, but fp8-cascade engine unavailable: CUDA out of memory")
    with pytest.raises(VitralError, match="CUDA out of memory"):
        select_gpu_engine(model, PREPROCESSING, fake_gpu(), "fp8-cascade", tmp_path)


def bench_row(engine: str, images_per_second: float, different: int = 0, images: int = 1000) -> BenchRow:
    from vitral.inference.agreement import Agreement

    agreement = Agreement(same=images - different, images=images)
    return BenchRow(
        engine=engine, threads=1, batch_size=256, p50_ms=1, p95_ms=2, p99_ms=3, images_per_second=images_per_second,
        memory_mb=1, agreement=agreement.value, agreement_low=agreement.interval.low,
        agreement_high=agreement.interval.high,
        recheck_rate=0.03,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "different", "images", "expected", "reason"),
    [
        (140, 0, 1000, "fp8-cascade", "1.40x bf16"),
        (140, 1, 1000, "fp8-cascade", "1.40x bf16"),
        (140, 2, 1000, "bf16", "not 99.9%"),
        (140, 3, 4000, "fp8-cascade", "1.40x bf16"),
        (140, 5, 4000, "bf16", "not 99.9%"),
        (105, 0, 1000, "bf16", "less than 1.1x"),
        (140, 0, 380, "bf16", "at least 381 images"),
    ],
)
def test_fp8_replaces_bf16_only_if_it_is_faster_and_has_the_labels_of_fp32(
    speed: float, different: int, images: int, expected: str, reason: str
) -> None:
    rows = [bench_row("bf16", 100, 1, images), bench_row("fp8", 170, 30, images)]
    rows.append(bench_row("fp8-cascade", speed, different, images))
    best, why = recommend_gpu_engine(rows, images)
    assert best.engine == expected
    assert reason in why


def test_a_gpu_without_fp8_keeps_bf16() -> None:
    best, why = recommend_gpu_engine([bench_row("bf16", 100)], 1000, "FP8 is not supported on the A100")
    assert (best.engine, why) == ("bf16", "100 images/s; FP8 is not supported on the A100")


def test_a_large_job_is_calibrated_once_on_a_sample_of_its_images(model: ViT, tmp_path: Path) -> None:
    files = []
    for index in range(40):
        pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8).numpy()
        files.append(tmp_path / "images" / f"{index:02}.png")
        files[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(files[-1])
    (tmp_path / "images" / "00.png").write_bytes(b"damaged")
    config = ModelConfig(
        architecture=model.config, preprocessing=PREPROCESSING, classes=tuple("abcdefg"), trained_on="x", epoch=1
    )
    predictor = Predictor(model, config, fake_gpu())
    sample = job_bench.load_sample(predictor, [tmp_path / "images"], 40, size=10)
    assert sample.shape == (9, 3, 16, 16)  # one of ten is damaged
    sample = job_bench.load_sample(predictor, [tmp_path / "images"], 40)
    folder = tmp_path / "model"
    folder.mkdir()
    job_bench.choose_engine(predictor, sample, folder)
    (result,) = load_bench_results(folder).values()
    assert (result.images, result.calibration_images) == (29, 10)
    assert predictor.engine.name == "bf16"
    assert "FP8 is not used" in predictor.engine.reason

    lines: list[str] = []
    job_bench.bench_for_job(predictor, [tmp_path / "images"], folder, lines.append)
    assert not lines, "a CPU, a small model, a small job and a stored benchmark: each is enough"
