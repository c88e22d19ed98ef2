"""Exports agree with the model, say what they are, and leave nothing behind where they do not."""

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

from inference.test_engine import KINDS, SMALL, made
from vitral.errors import VitralError
from vitral.evaluation.calibration import Calibration
from vitral.export import onnx_file, torch_file
from vitral.export.export import ENDINGS, ship
from vitral.export.parity import Agreement, check, compare, parting
from vitral.export.wrapper import Exported, balanced
from vitral.inference import onnx_runtime as runtime
from vitral.inference.int8_calibration import measure_ranges
from vitral.inference.onnx_runtime import OnnxModel
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard, save_model

CLASSES = ("ant", "bee", "cat", "dog", "eel")


def carded(kind: str = "class", **more: Any) -> tuple[ViT, ModelCard]:
    model, preprocessing = made(kind, **more)
    calibration = Calibration(temperature=1.7, unknown_below=0.5)
    variant = KINDS[kind][0]
    card = ModelCard(
        architecture=model.config,
        preprocessing=replace(preprocessing, crop=0.9, interpolation="bicubic"),
        classes=CLASSES,
        trained_on="nothing",
        epoch=1,
        variant=variant,
        calibration=calibration,
    )
    return model, card


def photographs(count: int, channels: int = 3) -> list[torch.Tensor]:
    """Smooth pictures of many sizes, as uint8 C H W."""
    found = []
    for seed in range(count):
        draws = np.random.default_rng(seed)
        coarse = Image.fromarray(draws.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        picture = coarse.resize((20 + 7 * (seed % 9), 18 + 5 * (seed % 7)), Image.Resampling.BICUBIC)
        array = np.array(picture.convert({1: "L", 3: "RGB"}[channels])).reshape(picture.height, picture.width, channels)
        found.append(torch.from_numpy(array).permute(2, 0, 1).contiguous())
    return found


def wanted(card: ModelCard, pictures: list[torch.Tensor]) -> torch.Tensor:
    shown = [Image.fromarray(p.permute(1, 2, 0).squeeze(2).numpy()) for p in pictures]
    return torch.stack([card.preprocessing.pixels(picture) for picture in shown])


def shipped(path: Path, made: tuple[ViT, ModelCard] | None = None, **how: Any) -> Agreement:
    model, card = made or carded()
    pictures = photographs(24, card.preprocessing.channels)
    plan = {"to": "onnx", "precision": "fp32", "preprocessing": False} | how
    return ship(model, card, path, learn_from=wanted(card, pictures[:12]), pictures=pictures, labels=None, **plan)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_exports_to_onnx(tmp_path: Path, kind: str) -> None:
    """One block: writing a graph takes as long as it is deep."""
    model, card = carded(kind, depth=1)
    found = shipped(tmp_path / "model.onnx", (model, card))
    assert found.same == 1
    assert found.largest_difference < 1e-4
    asked = OnnxModel(tmp_path / "model.onnx")
    pixels = wanted(card, photographs(5, card.preprocessing.channels))  # another batch than it was written with
    logits, probabilities = asked.logits(pixels.numpy())
    with torch.inference_mode():
        ours = model(card.preprocessing.normalise(pixels))
    np.testing.assert_allclose(logits, ours.numpy(), atol=2e-4)
    np.testing.assert_allclose(probabilities, (ours / 1.7).softmax(1).numpy(), atol=1e-4)
    assert np.array_equal(asked.unknown(logits), card.calibration.unknown(ours).numpy())


def test_preprocessing_inside_takes_pictures_of_any_size(tmp_path: Path) -> None:
    found = shipped(tmp_path / "model.onnx", preprocessing=True)
    assert found.same == 1
    assert found.largest_difference < 1e-3
    asked = OnnxModel(tmp_path / "model.onnx")
    assert asked.scales_itself
    model, card = carded()
    for height, width in ((16, 24), (15, 200), (333, 40), (64, 65)):
        picture = Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))
        pixels = card.preprocessing.pixels(picture)[None]
        with torch.inference_mode():
            ours = (model(card.preprocessing.normalise(pixels)) / 1.7).softmax(1)[0]
        said = {label.name: label.probability for label in asked.predict(picture).labels}
        np.testing.assert_allclose([said[name] for name in CLASSES], ours.numpy(), atol=0.01)


@pytest.fixture(scope="module")
def in_numbers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Agreement]]:
    """The same model in numbers of a kind, exported when first asked for."""
    place = tmp_path_factory.mktemp("numbers")

    @cache
    def exported(precision: str) -> tuple[Path, Agreement]:
        file = place / f"{precision}.onnx"
        return file, shipped(file, precision=precision)

    return exported


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 0.02), ("bf16", 0.1), ("int8", 0.3)])
def test_smaller_numbers_export_and_make_smaller_files(in_numbers, precision: str, bound: float) -> None:
    (large, exact), (small, found) = in_numbers("fp32"), in_numbers(precision)
    assert exact.largest_difference < 1e-4
    assert found.same >= 0.9
    assert 0 < found.largest_difference < bound
    assert small.stat().st_size < large.stat().st_size
    assert OnnxModel(small).about["precision"] == precision


def test_int8_matrices_have_a_step_for_each_row(in_numbers) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(in_numbers("int8")[0]).graph
    bytes_ = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert len(bytes_) >= 4 * SMALL["depth"]
    steps = {len(t.dims) and t.dims[0] for t in graph.initializer if t.name.endswith("_scale") and t.dims}
    assert 3 * SMALL["width"] in steps


@pytest.mark.parametrize("kind", ["class", "rotary, normed queries", "layer scale, tanh", "distilled"])
def test_balancing_columns_changes_no_answer(kind: str) -> None:
    model, card = carded(kind)
    images = wanted(card, photographs(8))
    ranges = measure_ranges(model, [images], card.preprocessing)
    other = balanced(model, ranges)
    with torch.inference_mode():
        a, b = (m(card.preprocessing.normalise(images)) for m in (model, other))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert not torch.equal(model.encoder.blocks[0].norm1.weight, other.encoder.blocks[0].norm1.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_torch_program_is_written_and_read_back(tmp_path: Path, precision: str) -> None:
    found = shipped(tmp_path / "model.pt2", to="torch", precision=precision)
    assert found.same >= 0.95
    program, about = torch_file.read_pt2(tmp_path / "model.pt2")
    assert about["classes"] == list(CLASSES)
    assert about["calibration"]["temperature"] == 1.7
    _, card = carded()
    assert program(wanted(card, photographs(7)))[1].shape == (7, 5)


@pytest.mark.slow
def test_an_aotinductor_package_is_written_and_read_back(tmp_path: Path) -> None:
    found = shipped(tmp_path / "model.pt2", to="aoti")
    assert found.same == 1
    assert torch_file.read_aoti(tmp_path / "model.pt2")[1]["classes"] == list(CLASSES)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    for how, said in (
        ({"to": "torch", "preprocessing": True}, "ONNX files only"),
        ({"to": "torch", "precision": "int8"}, "ONNX only"),
        ({"to": "onnx"}, "must end in .onnx"),
    ):
        with pytest.raises(VitralError, match=said):
            shipped(tmp_path / "model.pt2", **how)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_says_other_things_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil = onnx_file.whole_graph

    def spoiled(model: ViT, card: ModelCard, *rest: Any, **more: Any) -> Any:
        broken = carded()[0]
        with torch.no_grad():
            broken.encoder.blocks[1].mlp.contract.weight.mul_(-3)
        return spoil(broken, card, *rest, **more)

    monkeypatch.setattr(onnx_file, "whole_graph", spoiled)
    with pytest.raises(VitralError, match="not exported: in fp32 the file does not say") as error:
        shipped(tmp_path / "model.onnx")
    assert "they part at block 2" in error.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_folder_that_cannot_be_written_to_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    def work(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr("vitral.export.onnx_file.write_onnx", work)
    monkeypatch.setattr("vitral.export.torch_file.write_pt2", work)
    with pytest.raises(OSError, match="model"):
        shipped(Path("/proc") / f"model{ENDINGS[to]}", to=to)


def test_the_proof_counts_what_it_says() -> None:
    images = torch.zeros(40, 1, 2, 2, dtype=torch.uint8)
    ours = torch.eye(4).repeat(10, 1) * 0.9 + 0.025
    theirs = ours.clone()
    theirs[:2] = theirs[:2].roll(1, dims=1)  # two of forty
    at = {"a": 0, "b": 0}

    def ask(name: str, answers: torch.Tensor) -> Any:
        def one(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            place = at[name] % 40
            at[name] += len(some) if at[name] or place or getattr(one, "warm", False) else 0
            one.warm = True  # type: ignore[attr-defined]
            return answers[place : place + len(some)], answers[place : place + len(some)]

        return one

    batches = [(part, part) for part in images.split(10)]
    found = compare(ask("a", ours), ask("b", theirs), batches, torch.arange(4).repeat(10))
    assert found.images == 40
    assert found.same == pytest.approx(38 / 40)
    assert found.accuracy == pytest.approx((1.0, 38 / 40))
    assert found.largest_difference == pytest.approx(0.9)
    with pytest.raises(VitralError, match=r"only 95.0% of 40 images.*accuracy falls from 100.00% to 95.00%"):
        check(found, "fp32", lambda: "here")
    fine = replace(found, same=39 / 40, accuracy=(1.0, 39 / 40), largest_difference=1e-5)
    check(fine, "fp32", lambda: "one image of forty may differ")
    with pytest.raises(VitralError, match="a probability differs by inf"):
        check(replace(fine, largest_difference=float("inf")), "int8", lambda: "")


def test_parting_names_the_block() -> None:
    ours = [torch.ones(2, 3) for _ in range(5)]
    theirs = [t.clone() for t in ours]
    assert parting(ours, theirs, 0.01) == "block by block they are within 0.0%"
    theirs[2] += 0.5
    assert parting(ours, theirs, 0.01).startswith("they part at block 2: 50.0% off")


def test_the_command_exports_and_predicts_as_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitral.cli import main as cli

    model, card = carded()
    save_model(tmp_path / "mine" / "model", model, card)
    (tmp_path / "photos").mkdir()
    for index, picture in enumerate(photographs(20)):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / "photos" / f"{index:02}.png")
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(tmp_path / "mine"), "--data", str(tmp_path / "photos")])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "exported" in said
    assert "same first label on 100.00% of 10 images" in said
    file = tmp_path / "mine" / "exports" / "model.onnx"
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", str(file), str(tmp_path / "photos"), "--json", "--top", "5"])
    assert stop.value.code == 0
    theirs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours = Predictor.load(tmp_path / "mine", device="cpu").predict_files([tmp_path / "photos"])
    assert [a["file"] for a in theirs] == [a.source for a in ours]
    for a, b in zip(theirs, ours, strict=True):
        assert a["unknown"] == b.unknown
        probabilities = {label["name"]: label["probability"] for label in a["labels"]}
        for label in b.labels:
            assert probabilities[label.name] == pytest.approx(label.probability, abs=1e-4)


def test_a_file_that_vitral_did_not_write_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, [1])],
        [helper.make_tensor_value_info("y", kind, [1])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "o.onnx")
    with pytest.raises(VitralError, match="was not written by vitral"):
        OnnxModel(tmp_path / "o.onnx")
    (tmp_path / "rubbish.onnx").write_bytes(b"rubbish")
    with pytest.raises(VitralError, match="cannot read"):
        OnnxModel(tmp_path / "rubbish.onnx")
    with pytest.raises(VitralError, match="there is no file"):
        OnnxModel(tmp_path / "none.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitralError, match="no images in"):
        runtime.main([str(tmp_path / "rubbish.onnx"), str(tmp_path / "empty")])


def test_exported_module_is_the_model_between_pixels_and_probabilities() -> None:
    model, card = carded()
    images = wanted(card, photographs(3))
    logits, probabilities = Exported(model, card).eval()(images)
    torch.testing.assert_close(probabilities, card.calibration.probabilities(logits))
    tokens = Exported(model, card, blocks=True).eval()(images)
    assert len(tokens) == SMALL["depth"] + 2
    torch.testing.assert_close(tokens[-1], logits, atol=1e-4, rtol=1e-4)
