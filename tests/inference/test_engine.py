"""Engines: the same answers as the model they were made of, in each number type, for each kind of model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device import hardware
from vitral.errors import VitralError
from vitral.inference import engine_selection as choice
from vitral.inference.cuda_engine import GpuEngine
from vitral.inference.engine import Checked, Engine, Number, margin_of
from vitral.inference.engine_selection import Measured, Row, arrange, choose, read_measured, write_measured
from vitral.inference.int8_calibration import load_ranges, measure_ranges, save_ranges
from vitral.inference.linear import ByteProduct, FloatProduct, to_bytes
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard, save_model

needs_onednn = pytest.mark.skipif(not hardware.cpu_packs_matrices(), reason="this build of PyTorch has no oneDNN")
needs_bf16 = pytest.mark.skipif(not hardware.cpu_has_bf16(), reason="this CPU has no bf16 instructions")
needs_int8 = pytest.mark.skipif(not hardware.cpu_has_int8(), reason="this CPU has no 8-bit dot products")
pytestmark = needs_onednn

SMALL: dict[str, Any] = {"image_size": (16, 24), "patch_size": 8, "classes": 5, "width": 32, "depth": 2, "heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "class": ("plain", {}),
    "mean, no positions": ("plain", {"pooling": "mean", "positions": "none"}),
    "attention pooling": ("plain", {"pooling": "attention", "positions": "sincos"}),
    "rotary, registers": ("plain", {"positions": "learned+rotary", "registers": 2}),
    "rotary, normed queries": ("plain", {"pooling": "mean", "positions": "rotary", "qk_norm": True}),
    "layer scale, tanh": ("plain", {"layer_scale": 0.3, "gelu": "tanh", "head": "mlp", "qkv_bias": False}),
    "gray": ("plain", {"channels": 1}),
    "distilled": ("distilled", {}),
    "late norm": ("late-norm", {"pooling": "mean"}),
    "patch norm": ("patch-norm", {}),
    "class and mean": ("class-and-mean", {}),
}


@torch.no_grad()
def lively(model: ViT, seed: int = 0) -> ViT:
    """Weights with which every part matters."""
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draws)
        size = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.3
        parameter.copy_(noise * size + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def made(kind: str, **more: Any) -> tuple[ViT, Preprocessing]:
    variant, changes = KINDS[kind]
    config = ViTConfig(**SMALL | changes | more)
    C = config.channels
    mean, std = (0.4, 0.5, 0.6)[:C], (0.2, 0.3, 0.25)[:C]
    return lively(VARIANTS[variant](config)), Preprocessing(image_size=(16, 24), channels=C, mean=mean, std=std)


def pictures(count: int, channels: int = 3, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 4, 6, generator=draws) * 255
    return torch.nn.functional.interpolate(coarse, size=(16, 24), mode="bilinear").round().to(torch.uint8)


def reference(model: ViT, preprocessing: Preprocessing, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(preprocessing.normalise(images))


def off(answer: Tensor, wanted: Tensor) -> float:
    """Error over the size of what is to be told apart."""
    return float((answer - wanted).square().mean().sqrt() / (wanted - wanted.mean(dim=0)).square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "bound"),
    [("fp32", 1e-4), pytest.param("bf16", 0.05, marks=needs_bf16), pytest.param("int8", 0.15, marks=needs_int8)],
)
def test_an_engine_answers_as_its_model_does(kind: str, number: Number, bound: float) -> None:
    model, preprocessing = made(kind)
    images = pictures(24, model.config.channels)
    before = reference(model, preprocessing, images)
    ranges = measure_ranges(model, pictures(32, model.config.channels, seed=1).split(16), preprocessing)
    engine = Engine(model, preprocessing, number, ranges)
    assert off(engine(images), before) < bound
    alone = torch.cat([engine(one) for one in images.split(1)])
    assert off(alone, engine(images)) < bound
    torch.testing.assert_close(reference(model, preprocessing, images), before, rtol=0, atol=0)  # left as it was


def test_a_hybrid_keeps_its_own_way_to_tokens() -> None:
    config = HybridConfig(**SMALL | {"image_size": (32, 32)}, conv=ConvStemConfig(widths=(8,), strides=(2,)))
    model = lively(VARIANTS["hybrid"](config))
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    engine = Engine(model, preprocessing, "fp32")
    torch.testing.assert_close(engine(images), reference(model, preprocessing, images), atol=1e-4, rtol=1e-4)


def test_only_the_tokens_that_the_pooling_reads_are_computed_in_the_last_block() -> None:
    read = {kind: Engine(*made(kind), "fp32").read for kind in KINDS}
    assert {kind for kind, tokens in read.items() if tokens == 1} == {
        "class", "rotary, registers", "layer scale, tanh", "gray", "patch norm",
    }  # fmt: skip
    assert read["distilled"] == 2
    assert {read[kind] for kind in ("mean, no positions", "attention pooling", "late norm", "class and mean")} == {0}


def test_threads_get_the_answers_to_their_own_images() -> None:
    model, preprocessing = made("class")
    engine = Engine(model, preprocessing, "fp32")
    batches = pictures(64).split(4)
    wanted = [engine(images) for images in batches]
    with ThreadPoolExecutor(4) as pool:
        for answer, want in zip(pool.map(engine, batches), wanted, strict=True):
            torch.testing.assert_close(answer, want, rtol=0, atol=0)


@needs_int8
def test_one_huge_hidden_column_does_not_spoil_the_others() -> None:
    model, preprocessing = made("class")
    with torch.no_grad():  # what trained ViTs do: one hidden number of hundreds, where others are below five
        model.encoder.blocks[1].mlp.expand.bias[7] = 300.0
        model.encoder.blocks[1].mlp.contract.weight[:, 7] *= 0.01
    images = pictures(24)
    ranges = measure_ranges(model, [pictures(32, seed=1)], preprocessing)
    assert ranges["blocks.1.mlp.contract"][1].max() > 290
    engine = Engine(model, preprocessing, "int8", ranges)
    assert engine.blocks[1].apart is not None
    assert engine.blocks[0].apart is None
    assert off(engine(images), reference(model, preprocessing, images)) < 0.15


def test_products_are_what_they_say() -> None:
    draws = torch.Generator().manual_seed(0)
    x, z = torch.randn(7, 32, generator=draws), torch.randn(7, 24, generator=draws)
    weight, bias = torch.randn(24, 32, generator=draws), torch.randn(24, generator=draws)
    product = FloatProduct(weight, bias, torch.float32)
    plain = x @ weight.T + bias
    torch.testing.assert_close(product(x), plain)
    torch.testing.assert_close(product.gelu(x, "none"), torch.nn.functional.gelu(plain), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(product.add_to(z.clone(), x), z + plain)


@needs_int8
def test_products_of_bytes_are_exact_in_the_integers() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (9, 32), generator=draws, dtype=torch.uint8)
    weight = torch.randint(-127, 128, (24, 32), generator=draws).float()
    weight[:, 0] = 127  # so that a step is 1
    bias, z = torch.arange(24).float(), torch.randn(9, 24, generator=draws)
    product = ByteProduct(weight, bias, 1.0, 128)
    exact = (x.double() - 128) @ weight.T.double() + bias.double()
    torch.testing.assert_close(product(x).double(), exact, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(product.add_to(z.clone(), x).double(), z + exact, rtol=1e-6, atol=1e-3)


def test_to_bytes_rounds_and_saturates() -> None:
    steps = torch.tensor([-1000.0, -128.4, -0.6, 0.0, 0.4, 1.5, 2.5, 126.7, 500.0])
    assert to_bytes(steps).tolist() == [0, 0, 127, 128, 128, 130, 130, 255, 255]


def test_a_checked_engine_asks_again_where_the_lead_is_small() -> None:
    model, preprocessing = made("class")
    sure = Engine(model, preprocessing, "fp32")
    asked: list[int] = []

    def wrong(images: Tensor) -> Tensor:
        return sure(images).roll(1, dims=1)

    def right(images: Tensor) -> Tensor:
        asked.append(len(images))
        return sure(images)

    images = pictures(24)
    lead = wrong(images).topk(2).values.diff(dim=1).abs().flatten()
    margin = float(lead.median()) + 1e-6
    checked = Checked(wrong, right, margin)  # type: ignore[arg-type]
    close = lead < margin
    answers = checked(images)
    assert asked == [int(close.sum())]
    assert 0 < asked[0] < 24
    torch.testing.assert_close(answers[close], sure(images)[close])
    torch.testing.assert_close(answers[~close], wrong(images)[~close], rtol=0, atol=0)
    assert torch.equal(Checked(wrong, right, 0.0)(images), wrong(images))  # type: ignore[arg-type]


def test_the_margin_covers_errors_of_their_size() -> None:
    draws = torch.Generator().manual_seed(0)
    sure = torch.randn(4000, 10, generator=draws)
    quick = sure + 0.05 * torch.randn(4000, 10, generator=draws)
    margin = margin_of(quick, sure)
    assert margin == pytest.approx(3.5 * 0.05 * 2**0.5, rel=0.05)  # the lead is a difference of two
    best = quick.topk(2)
    sure_of_it = best.values[:, 0] - best.values[:, 1] >= margin
    assert torch.equal(quick.argmax(1)[sure_of_it], sure.argmax(1)[sure_of_it])
    assert margin_of(quick[:, :1], sure[:, :1]) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, preprocessing = made("class")
    names = tuple("abcde")
    card = ModelCard(
        architecture=model.config, preprocessing=preprocessing, classes=names, trained_on="nothing", epoch=1
    )
    save_model(tmp_path / "model", model, card)
    return tmp_path / "model"


def measured(precision: str, cpu: str | None = None) -> Measured:
    row = Row(precision=precision, threads=1, batch=8, p50_ms=1, p95_ms=2, p99_ms=3, images_per_second=9, memory_mb=1,
              agreement=1, again=0)  # fmt: skip
    return Measured(cpu=cpu or hardware.cpu_name(), made_by="a test", date="today", images=9, rows=(row,),
                    margins={"bf16": 0.5, "int8": 1.0}, precision=precision, batch=8, why="quickest")  # fmt: skip


def test_nothing_measured_means_fp32_and_says_so(folder: Path) -> None:
    predictor = Predictor.load(folder, device="cpu")
    assert str(predictor.choice) == "fp32 (not measured on this CPU: vitral bench does)"


@needs_bf16
def test_what_was_measured_here_is_used_and_what_was_measured_elsewhere_is_not(folder: Path) -> None:
    write_measured(folder, measured("bf16", cpu="another CPU, 64 cores"))
    assert Predictor.load(folder, device="cpu").choice.precision == "fp32"
    write_measured(folder, measured("bf16"))
    assert {*read_measured(folder)} == {"another CPU, 64 cores", hardware.cpu_name()}
    predictor = Predictor.load(folder, device="cpu")
    assert (predictor.choice.precision, predictor.choice.batch, predictor.choice.why) == ("bf16", 8, "quickest")
    images = pictures(20)
    wanted = reference(predictor.model, predictor.card.preprocessing, images)
    assert 0 < off(predictor.logits(images), wanted) < 0.05
    checked = Predictor.load(folder, device="cpu", precision="bf16-checked")
    assert isinstance(checked.choice.run, Checked)
    assert checked.choice.run.margin == 0.5


@needs_int8
def test_int8_needs_its_ranges_and_uses_them(folder: Path) -> None:
    with pytest.raises(VitralError, match="how large the activations get") as error:
        Predictor.load(folder, device="cpu", precision="int8")
    assert "vitral bench" in error.value.hint
    write_measured(folder, measured("int8"))  # recommended, but the ranges were lost on the way
    assert Predictor.load(folder, device="cpu").choice.why.startswith("int8 was measured to be best, but")
    fp32 = Predictor.load(folder, device="cpu", precision="fp32")
    ranges = measure_ranges(fp32.model, [pictures(16)], fp32.card.preprocessing)
    save_ranges(folder, ranges)
    again = load_ranges(folder)
    assert again is not None
    assert again.keys() == ranges.keys()
    assert Predictor.load(folder, device="cpu").choice.precision == "int8"
    (folder / "int8.safetensors").write_bytes(b"rubbish")
    with pytest.raises(VitralError, match="cannot be read"):
        Predictor.load(folder, device="cpu", precision="int8")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"x": {"margins": {}, "rows": [{"a": 1}]}}'])
def test_a_broken_file_of_speeds_is_as_good_as_none(folder: Path, text: str) -> None:
    (folder / choice.FILE).write_text(text)
    assert read_measured(folder) == {}
    Predictor.load(folder, device="cpu")
    write_measured(folder, measured("fp32"))
    assert json.loads((folder / choice.FILE).read_text())[hardware.cpu_name()]["margins"] == {"bf16": 0.5, "int8": 1.0}


def test_a_number_type_that_this_cpu_lacks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.inference.engine.cpu_has_bf16", lambda: False)
    monkeypatch.setattr("vitral.inference.engine.cpu_has_int8", lambda: False)
    assert choice.possible() == ("fp32",)
    for wish, said in (("bf16", "no bf16 instructions"), ("int8-checked", "no 8-bit dot products")):
        with pytest.raises(VitralError, match=said):
            Predictor.load(folder, device="cpu", precision=wish)  # type: ignore[arg-type]
    with pytest.raises(VitralError, match="no FP8 units on a CPU"):
        Predictor.load(folder, device="cpu", precision="fp8")
    with pytest.raises(VitralError, match="precision must be one of auto, fp32"):
        Predictor.load(folder, device="cpu", precision="fp16")  # type: ignore[arg-type]


def test_a_model_with_a_way_of_its_own_is_run_as_it_is(tmp_path: Path) -> None:
    class Own(ViT):
        def features(self, images_BCHW: Tensor) -> Tensor:
            return super().features(images_BCHW) * 2

    model, preprocessing = lively(Own(ViTConfig(**SMALL))), made("class")[1]
    chosen = choose(model, preprocessing, None)
    assert chosen.run is None
    assert "Own computes its features in its own way" in chosen.why
    with pytest.raises(VitralError, match="in its own way"):
        choose(model, preprocessing, None, "bf16")
    with pytest.raises(VitralError, match="in its own way"):
        arrange(model, preprocessing, "fp32", None, None)


def test_the_engine_for_gpus_fills_batches_up_and_answers_the_same() -> None:
    model, preprocessing = made("class")
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    cpu = hardware.Hardware(device=torch.device("cpu"), precision="fp32", compile=False, reasons=reasons)
    engine = GpuEngine(model, preprocessing, cpu)
    images = pictures(11)
    torch.testing.assert_close(engine(images), reference(model, preprocessing, images), atol=1e-5, rtol=1e-4)
    assert [*engine.recorded] == [16]
    assert engine(images[:1]).shape == (1, 5)
    assert [*engine.recorded] == [16, 1]
    chosen = choice.choose_on_gpu(model, preprocessing, cpu)
    assert str(chosen) == "fp32 (a test; recorded as one launch)"
    with pytest.raises(VitralError, match="int8 is for CPUs"):
        choice.choose_on_gpu(model, preprocessing, cpu, "int8")


def test_a_gpu_that_cannot_record_runs_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, function: object, example: object, shared: object) -> object:
        raise RuntimeError("no capture today\nand more")

    monkeypatch.setattr(hardware.Hardware, "replayed", fails)
    model, preprocessing = made("class")
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    cpu = hardware.Hardware(device=torch.device("cpu"), precision="fp32", compile=False, reasons=reasons)
    chosen = choice.choose_on_gpu(model, preprocessing, cpu)
    assert chosen.run is None
    assert "no capture today" in chosen.why
