"""Answers for whole folders: each image once, through kills and torchrun, in every format."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.test_predictor import model_folder
from vitral.errors import VitralError
from vitral.inference import batch_predict as harvesting
from vitral.inference.batch_predict import harvest, walk
from vitral.inference.predictor import Predictor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("harvest") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 small pictures in folders, two broken, some hidden."""
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(118):
        place = folder / f"{index % 3}" / f"{index:03} ü.png"
        place.parent.mkdir(exist_ok=True)
        draws = np.random.default_rng(index)
        Image.fromarray(draws.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(place)
    for name in ("broken.png", "1/empty.jpg"):
        (folder / name).write_bytes(b"" if "empty" in name else b"no picture")
    (folder / ".hidden").mkdir()
    Image.new("L", (4, 4)).save(folder / ".hidden" / "x.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def names(out: Path) -> list[str]:
    if out.suffix == ".jsonl":
        return [json.loads(line)["file"] for line in out.read_text().splitlines()]
    if out.suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as file:
            return [row["file"] for row in csv.DictReader(file) if row["rank"] in ("", "1")]
    import pyarrow.parquet

    return pyarrow.parquet.read_table(out).column("file").to_pylist()


def expected(folder: Path) -> list[str]:
    found = [str(p) for p in folder.rglob("*") if p.suffix in (".png", ".jpg") and ".hidden" not in p.parts]
    assert len(found) == 120
    return sorted(found)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_every_image_is_answered_once(
    model: Path, folder: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor, out = Predictor.load(model, device="cpu"), tmp_path / f"answers{ending}"
    (empty := folder.parent / "nothing").mkdir(exist_ok=True)
    assert harvest(predictor, [folder, empty], out, top=2) == 1  # two could not be read
    assert sorted(names(out)) == expected(folder)
    said = capsys.readouterr()
    told = re.search(r"120 answers, 2 of them errors: (\S+), (\S+); its column error says why", said.out)
    assert told is not None
    assert {told[1], told[2]} < set(expected(folder))
    assert f"no images in {empty}" in said.err
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(VitralError, match="is already there"):
        harvest(predictor, [folder], out)


def test_the_answers_are_the_predictors(model: Path, folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    predictor, out = Predictor.load(model, device="cpu"), tmp_path / "answers.parquet"
    harvest(predictor, [folder], out, top=6, quiet=True)
    rows = {row["file"]: row for row in pyarrow.parquet.read_table(out).to_pylist()}
    for answer in predictor.predict_files([folder]):
        row = rows[answer.source]
        assert row["error"] == (answer.error or None)
        assert row["labels"] == [label.name for label in answer.labels]
        assert row["label"] == (answer.labels[0].name if answer.labels else None)
        assert row["probabilities"] == pytest.approx([label.probability for label in answer.labels], abs=1e-4)


def test_it_goes_on_where_it_stopped_and_asks_nothing_twice(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harvesting, "PART", 16)
    predictor, out = Predictor.load(model, device="cpu"), tmp_path / "answers.jsonl"
    asked: list[str] = []
    answer = predictor.answer

    def failing(waiting: list, top: int | None) -> object:  # type: ignore[type-arg]
        if len(asked) > 60:
            raise KeyboardInterrupt
        asked.extend(name for name, _ in waiting)
        return answer(waiting, top)

    monkeypatch.setattr(predictor, "answer", failing)
    with pytest.raises(KeyboardInterrupt):
        harvest(predictor, [folder], out)
    kept = [row["file"] for row in harvesting._kept(tmp_path / "answers.jsonl.parts")]
    assert 0 < len(kept) <= len(asked)
    asked.clear()
    monkeypatch.setattr(predictor, "answer", lambda w, t: (asked.extend(n for n, _ in w), answer(w, t))[1])
    harvest(predictor, [folder], out)
    assert not {*asked} & {*kept}
    assert sorted(names(out)) == expected(folder)
    assert f"going on: {len(kept)} of 120 images were answered before" in capsys.readouterr().err


def test_parts_of_another_model_are_not_mixed_in(model: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    (tmp_path / "answers.csv.parts").mkdir()
    (tmp_path / "answers.csv.parts" / "about.json").write_text('{"model": "another"}')
    with pytest.raises(VitralError, match="another model") as error:
        harvest(Predictor.load(model, device="cpu"), [folder], out)
    assert "rm -r" in error.value.hint


def test_mistakes_are_told_before_the_work(model: Path, folder: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(model, device="cpu")
    with pytest.raises(VitralError, match=r"Known endings: .parquet, .csv, .jsonl"):
        harvest(predictor, [folder], tmp_path / "answers.xls")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitralError, match="no images in"):
        harvest(predictor, [tmp_path / "empty"], tmp_path / "answers.csv")
    assert {p.name for p in tmp_path.iterdir()} == {"empty"}


def test_only_a_bounded_number_of_pictures_is_decoded_ahead(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor.load(model, device="cpu")
    opened, answered, most = 0, 0, 0
    open_, answer = predictor.open, predictor.answer

    def counting(picture: object) -> object:
        nonlocal opened, most
        opened += 1
        most = max(most, opened - answered)
        return open_(picture)  # type: ignore[arg-type]

    def slowly(waiting: list, top: int | None) -> object:  # type: ignore[type-arg]
        nonlocal answered
        time.sleep(0.02)
        answered += len(waiting)
        return answer(waiting, top)

    monkeypatch.setattr(predictor, "open", counting)
    monkeypatch.setattr(predictor, "answer", slowly)
    harvest(predictor, [folder], tmp_path / "a.jsonl", quiet=True)
    assert answered == 120
    assert most <= 5 * predictor.choice.batch


def test_walk_is_in_order_and_takes_files_as_they_are(folder: Path) -> None:
    assert sorted(map(str, walk([folder]))) == expected(folder)
    assert list(walk([folder / "notes.txt"])) == [folder / "notes.txt"]
    assert list(walk([folder])) == list(walk([folder]))


COMMAND = """
import sys
from pathlib import Path
from vitral import harvest as h
from vitral.predict import Predictor
h.PART = 4
sys.exit(h.harvest(Predictor.load(sys.argv[1], device="cpu"), [Path(sys.argv[2])], Path(sys.argv[3]), quiet=True))
"""


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_repeat_nothing(model: Path, folder: Path, tmp_path: Path) -> None:
    draws, kills = random.Random(5), 0
    for number in range(20):  # a quick machine is done with a folder after a kill or two
        out = tmp_path / f"answers-{number}.jsonl"
        kills += killed(out, model, folder, draws)
        assert Counter(names(out)) == Counter(expected(folder))
        if kills >= 5:
            return
    raise AssertionError(f"only {kills} kills hit a running process")


def killed(out: Path, model: Path, folder: Path, draws: random.Random) -> int:
    """Answers for the folder, by processes that are killed until one gets through: how many of them were."""
    words = [sys.executable, "-c", COMMAND, str(model), str(folder), str(out)]
    parts, kills = out.with_name(f"{out.name}.parts"), 0
    while not (out.exists() and not parts.exists()):
        process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if kills < 8:  # once it has begun, at any moment
            before = len(list(parts.glob("part-*"))) if parts.exists() else 0
            while process.poll() is None and len(list(parts.glob("part-*"))) <= before + draws.randrange(4):
                time.sleep(0.002)
            time.sleep(draws.random() * 0.05)
            process.send_signal(signal.SIGKILL)
        kills += process.wait(timeout=120) == -signal.SIGKILL
    return kills


@pytest.mark.slow
def test_under_torchrun_each_image_is_answered_once(model: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitral", "predict"]
    done = subprocess.run(
        [sys.executable, *words, str(model), str(folder), "--out", str(out)],
        capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert out.is_file(), done.stderr
    assert Counter(names(out)) == Counter(expected(folder))
