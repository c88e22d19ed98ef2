"""`vitral bench`: every way measured, the best of those that agree recommended and used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.common import Fit
from vitral import api_ship as shipping
from vitral.cli import main as cli
from vitral.device import hardware
from vitral.errors import VitralError
from vitral.evaluation.calibration_images import sample
from vitral.evaluation.evaluate import spread
from vitral.inference.bench import recommend
from vitral.inference.engine_selection import Measured, Row, possible, read_measured
from vitral.inference.predictor import Predictor
from vitral.reporting.terminal.bench import show_measured

pytestmark = pytest.mark.skipif(not hardware.cpu_packs_matrices(), reason="this build of PyTorch has no oneDNN")


def row(precision: str, speed: float, agreement: float = 1.0, batch: int = 8) -> Row:
    return Row(precision=precision, threads=2, batch=batch, p50_ms=1, p95_ms=1, p99_ms=1, images_per_second=speed,
               memory_mb=1, agreement=agreement, again=0)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row("fp32", 10), row("bf16", 20), row("int8", 40, 0.99)], "bf16"),  # int8 says other things
        ([row("fp32", 10), row("bf16", 20, 0.9985), row("int8", 40, 0.9989)], "fp32"),
        ([row("fp32", 10), row("bf16", 20), row("int8", 40, 0.9995), row("int8-checked", 30)], "int8"),
        ([row("fp32", 10), row("bf16", 11.5)], "fp32"),  # not worth it
        ([row("fp32", 10), row("fp32", 30, batch=32), row("bf16", 20)], "fp32"),
    ],
)
def test_the_quickest_way_that_says_the_same_is_recommended(rows: list[Row], best: str) -> None:
    found, why = recommend(rows, 1000)
    assert found.precision == best
    assert f"{found.images_per_second:.0f} images/s" in why
    fp32 = max(r.images_per_second for r in rows if r.precision == "fp32")
    assert found.images_per_second >= fp32


def test_bench_measures_keeps_and_prints_what_predict_then_uses(
    train_tiny: Fit, dataset: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_tiny()
    monkeypatch.setattr("vitral.evaluation.evaluate.load_dataset", lambda name, **kw: dataset)
    before = torch.get_num_threads()
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", str(run), "--seconds", "0.01", "--batches", "1", "4", "--threads", "1", "--json"])
    assert stop.value.code == 0
    assert torch.get_num_threads() == before
    said = json.loads(capsys.readouterr().out)
    ways = [*possible(), *(f"{n}-checked" for n in possible()[1:])]
    assert [(r["precision"], r["batch"]) for r in said["rows"]] == [(w, b) for b in (1, 4) for w in ways]
    for r in said["rows"]:
        assert 0 < r["p50_ms"] <= r["p95_ms"] <= r["p99_ms"]
        assert 0 <= r["again"] <= 1
        assert r["agreement"] >= (0.999 if r["precision"] in ("fp32", "int8-checked") else 0.7)
    kept = read_measured(run.model)[hardware.cpu_name()]
    assert (kept.precision, kept.why, kept.images) == (said["precision"], said["why"], 20)
    predictor = Predictor.load(run.path, device="cpu")
    assert str(predictor.choice) == f"{kept.precision} ({kept.why})"
    with pytest.raises(SystemExit):
        cli.main(["bench", str(run), "--seconds", "0.01", "--batches", "2", "--threads", "1"])
    shown = capsys.readouterr().out
    assert "images/s" in shown
    assert "predict and serve use it on this CPU" in shown


def test_images_to_measure_with_come_from_the_set_another_folder_or_nowhere(
    train_tiny: Fit, dataset: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from PIL import Image

    run = train_tiny()
    monkeypatch.setattr("vitral.evaluation.evaluate.load_dataset", lambda name, **kw: dataset)
    predictor = Predictor.load(run.path, device="cpu")
    own = sample(predictor, None, 10)
    assert own.images.shape == (10, 1, 8, 8)
    assert own.labels is not None
    learn, compare = own.halves()
    assert torch.equal(torch.stack([learn.images, compare.images], dim=1).flatten(0, 1), own.images)
    flat = tmp_path / "flat"
    flat.mkdir()
    for shade in (0, 100, 200):
        Image.new("L", (20, 12), shade).save(flat / f"{shade}.png")
    (flat / "broken.png").write_bytes(b"no picture")
    found = sample(predictor, str(flat), 99)
    assert found.labels is None
    assert found.images[:, 0, 0, 0].tolist() == [0, 100, 200]
    with pytest.raises(VitralError, match="too few to measure"):
        shipping.bench(run.path, data=str(flat))
    predictor.card = replace(predictor.card, trained_on="")
    with pytest.raises(VitralError, match="does not say what it was trained on"):
        sample(predictor, None, 9)


def test_the_table_of_a_large_model_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(
        Row(precision=name, threads=16, batch=32, p50_ms=1234.5, p95_ms=1234.5, p99_ms=1234.5, images_per_second=1234,
            memory_mb=330.2, agreement=1.0, again=0.123)
        for name in ("fp32", "bf16-checked")
    )  # fmt: skip
    show_measured(Measured(cpu="a CPU", made_by="vitral", date="", images=256, rows=rows, why="quickest"))
    table = [line for line in capsys.readouterr().out.splitlines() if "numbers" in line or "checked" in line]
    assert table[0].split()[-3:] == ["as", "fp32", "twice"]
    assert table[1].split()[-2:] == ["100.0%", "12.3%"]
    assert all(len(line) <= 80 for line in table)


def test_spread_takes_from_all_over() -> None:
    assert spread(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert spread(3, 10).tolist() == [0, 1, 2]
    assert spread(0, 10).tolist() == []
