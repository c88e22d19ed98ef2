"""The benchmarks for a GPU: what they compute from measurements, and that they run, as toys, where there is none."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import contestants
import fp8_answers
import fp8_gradients
import gpu_curve
import gpu_pipeline
import gpu_throughput
import records
from support.served import picture
from vitral.errors import VitralError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")


Played = Callable[..., str]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    """`play(records, *words)`: a benchmark with these words, in this process, which has imported torch already.

    So is each that it runs and waits for; those that `gpu_throughput` keeps and talks to are processes.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))

    def run(benchmark: ModuleType, *words: object) -> str:
        place, elsewhere = str(benchmark.__file__), subprocess.run

        def here(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
            if place not in command:
                return elsewhere(command, **settings)
            monkeypatch.setattr(sys, "argv", command[command.index(place) :])
            with redirect_stdout(io.StringIO()) as said:
                benchmark.main()
            return subprocess.CompletedProcess(command, 0, said.getvalue(), "")

        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "run", here)
            return here([place, *map(str, words)]).stdout

    return run


@pytest.mark.parametrize(("size", "gmacs"), [("Ti/16", 1.25), ("S/16", 4.60), ("B/16", 17.56), ("L/16", 61.55)])
def test_arithmetic_is_what_the_sizes_are_known_for(size: str, gmacs: float) -> None:
    assert contestants.arithmetic(contestants.configuration(size)) / 2e9 == pytest.approx(gmacs, rel=0.01)


def test_cases_are_read_and_refused() -> None:
    case = contestants.Case.read("timm:B/16:train:graphs+channels-last")
    assert (case.who, case.row, case.batch) == ("timm", "train B/16", 256)
    assert case.settings == ["graphs", "channels-last"]
    assert contestants.Case.read("vitral:S/16:ask-8").batch == 8
    assert str(case) == "timm:B/16:train:graphs+channels-last"
    for wrong in ("timm", "timm:B/16", "timm:B/16:dance", "a:b:c:d:e"):
        with pytest.raises(SystemExit, match=r"case|work"):
            contestants.Case.read(wrong)


def row(case: str, speed: float, memory: float, **more: Any) -> dict[str, Any]:
    who, size, work, *setting = case.split(":")
    found = {"case": case, "who": who, "size": size, "work": work, "setting": "".join(setting), "tflops": 1.0}
    speeds = {"images_per_second": speed, "lowest": speed, "highest": speed, "peak_gib": memory, "first_step_s": 1.0}
    return found | speeds | more


def test_vitral_is_compared_with_the_fastest_that_does_the_same_work() -> None:
    rows = [
        row("vitral:B/16:train", 900, 12.0, alone="empty cache"),
        row("vitral:B/16:train", 600, 12.0),
        row("timm:B/16:train", 400, 16.0),
        row("torchvision:B/16:train", 300, 8.0),
        row("timm:B/16:train:bf16-weights", 800, 4.0),
        {"case": "x:B/16:train", "who": "x", "size": "B/16", "work": "train", "setting": "", "failed": "no memory"},
        row("timm:B/16:infer:bf16-weights", 800, 4.0),
    ]
    found = gpu_throughput.verdicts(rows)
    assert list(found) == ["vitral:B/16:train"]
    assert found["vitral:B/16:train"]["speed"] == pytest.approx(1.5)
    assert found["vitral:B/16:train"]["memory"] == pytest.approx(0.75)
    assert found["vitral:B/16:train"]["fastest_peer"] == "timm:B/16:train"
    text = "\n".join(gpu_throughput.table(rows, 800.0))
    assert "no memory" in text
    assert "2.00 ×" in text, "what is not compared with is still shown"


def test_the_plan_begins_with_what_matters_and_has_every_size_and_work() -> None:
    waves = gpu_throughput.plan(["auto", "fp8"])
    assert [str(case) for case in waves[0]][:3] == ["vitral:B/16:train", "vitral:B/16:train:fp8", "timm:B/16:train"]
    assert {case.who for case in waves[0]} == {case.who for case in waves[1]} == {"vitral", *contestants.PEERS}
    rows = {case.row for wave in waves for case in wave}
    assert rows >= {f"{work} {size}" for work in ("train", "infer") for size in ("Ti/16", "S/16", "B/16", "L/16")}


@without_gpu
def test_throughput_without_a_gpu_says_so_runs_a_toy_and_survives_who_fails(tmp_path: Path, play: Played) -> None:
    words = ["--rounds", 2, "--seconds", 0.02, "--out", tmp_path / "out.json"]
    said = play(gpu_throughput, *words, "--cases", "vitral:toy:train", "vit-pytorch:toy:train", "nobody:toy:train")
    assert "needs a GPU" in said
    content = json.loads((tmp_path / "out.json").read_text())
    ours, theirs, nobody = content["rows"]
    assert ours["images_per_second"] > 0
    assert ours["rounds"] == theirs["rounds"] == 2
    assert "nobody here is called 'nobody'" in nobody["failed"]
    ratio = ours["images_per_second"] / theirs["images_per_second"]
    assert content["against_the_fastest"]["vitral:toy:train"]["speed"] == pytest.approx(ratio)


@without_gpu
def test_the_pipeline_without_a_gpu_says_so_and_runs_a_toy(tmp_path: Path, play: Played) -> None:
    said = play(gpu_pipeline, "--out", tmp_path / "out.json")
    assert "needs a GPU" in said
    (found,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    speeds = found["images_per_second"]
    pairs = zip(speeds["packed"], speeds["on the GPU"], strict=True)
    assert found["ratios"] == pytest.approx([packed / there for packed, there in pairs])


def test_photographs_are_jpegs_of_about_the_size_of_real_ones(tmp_path: Path) -> None:
    about = gpu_pipeline.write_photographs(tmp_path, images=30, different=6, scale=1.0)
    files = list((tmp_path / "train").rglob("*.jpg"))
    assert len(files) == 30
    assert 40 < about["kilobytes"] < 150, "ImageNet's are about 110 kB"


def curve(setting: str, seed: int, shift: float, test_loss: float = 1.0) -> dict[str, Any]:
    losses = [3 - step / 500 + shift for step in range(1000)]
    return {"setting": setting, "seed": seed, "losses": losses, "test_loss": test_loss, "test_top1": 0.5}


def test_curves_are_within_noise_if_they_are_closer_than_seeds_are() -> None:
    runs = [curve("autocast", 0, 0.0), curve("autocast", 1, 0.04, 1.02), curve("bf16", 0, 0.01), curve("bf16", 1, 0.05)]
    result = gpu_curve.compared([*runs, curve("fp8", 0, 0.1), {"setting": "x", "seed": 0, "failed": "broken"}])
    assert result["noise"]["curve_rms"] == pytest.approx(0.04)
    assert result["noise"]["test_loss"] == pytest.approx(0.01), "variances of 0.0002 and 0, a degree of freedom each"
    assert result["settings"]["bf16"]["curve_rms"] == pytest.approx(0.01)
    assert result["settings"]["bf16"]["within_noise"]
    assert result["settings"]["fp8"]["curve_rms"] == pytest.approx(0.1), "against the same seed alone"
    assert not result["settings"]["fp8"]["within_noise"]
    worse = gpu_curve.compared([*runs[:2], curve("fp8", 0, 0.0, 1.2)])
    assert not worse["settings"]["fp8"]["within_noise"], "the test images count too"
    assert "NOT within noise" in "\n".join(gpu_curve.told(worse))


@without_gpu
def test_curves_without_a_gpu_say_so_and_are_drawn(tmp_path: Path, play: Played) -> None:
    words = ["--settings", "autocast", "--seeds", 1, "--steps", 60, "--out", tmp_path / "out.json"]
    said = play(gpu_curve, *words)
    assert "needs a GPU" in said
    content = json.loads((tmp_path / "out.json").read_text())
    (found,) = content["runs"]
    assert len(found["losses"]) == 60
    assert found["losses"][0] == pytest.approx(2.3026, abs=1e-3), "ten classes, equal odds"
    assert sum(found["losses"][-10:]) < sum(found["losses"][:10])
    gpu_curve.draw(content, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000


def a_record(top1: float, training: float = 8.0, everything: float = 10.0) -> dict[str, Any]:
    names = ("by_median_epoch_s", "ms_a_step", "train_loss", "train_top1")
    found = {"top1": top1, "top1_one_view": top1 - 0.01, "training_s": training, "everything_s": everything, "steps": 9}
    return found | dict.fromkeys(names, 1.0) | {"notes": ""}


def asked_for(**changes: Any) -> argparse.Namespace:
    usual = {"seeds": 3, "first_seed": 5, "target": None, "budget": float("inf"), "keep": None, "out": None}
    return argparse.Namespace(**usual | changes)


def test_variants_are_read_as_the_command_line_reads_them() -> None:
    changes = "epochs=16 model.conv.widths=32,128,256 optim.lr=6e-3 model.qk_norm=true augment.flip=false start="
    plan = records.Variant("cifar10-94", tuple(changes.split())).plan()
    assert (plan.epochs, plan.model.conv.widths, plan.optim.lr) == (16, (32, 128, 256), 6e-3)
    assert (plan.model.qk_norm, plan.augment.flip, plan.start, plan.augment.mixed) == (True, False, (), 0.4)
    with pytest.raises(VitralError, match=r"--optim\.lrr\. Did you mean --optim\.lr\?"):
        records.Variant("cifar10-94", ("optim.lrr=1",)).plan()


@pytest.mark.parametrize(
    ("recipe", "asked", "target"),
    [("cifar10-94", None, 0.94), ("cifar10-94", 94.5, 0.945), ("cifar10-patch", None, None), ("deit-384", None, None)],
)
def test_a_target_is_asked_for_or_in_the_name(recipe: str, asked: float | None, target: float | None) -> None:
    assert records.Variant(recipe).target(asked) == target


def test_records_are_means_with_their_errors_and_first_runs_stand_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([a_record(0.93, 8.0, 40.0), a_record(0.95, 9.0, 10.0), a_record(0.96, 10.0, 12.0), a_record(0.9)])

    def play(plan: Any, folder: Path) -> dict[str, Any]:
        if plan.epochs == 3:
            raise RuntimeError("the GPU is on fire\nand more")
        (folder / "model").mkdir(parents=True)
        (folder / "seed").write_text(str(plan.seed))
        return next(found)

    monkeypatch.setattr(records, "play", play)
    kept = tmp_path / "kept"
    kept.mkdir()
    names = ("epochs=3",), ("model.heads=5",), ("epochs=2",)
    variants = [records.Variant("cifar10-94", changes) for changes in names]
    records.measure(variants, asked_for(out=tmp_path / "out.json", keep=kept))
    content = json.loads((tmp_path / "out.json").read_text())
    burnt, bad, *good = content["runs"]
    assert burnt["failed"] == "RuntimeError: the GPU is on fire"
    assert "multiple of" in bad["failed"]
    assert [(run["seed"], run["first"]) for run in good] == [(5, "process"), (6, ""), (7, "")]
    row = content["variants"]["cifar10-94 epochs=2"]
    assert row["n"] == 3
    assert row["top1"]["mean"] == pytest.approx(0.9466667, rel=1e-4)
    assert row["top1"]["sd"] == pytest.approx(0.0152753, rel=1e-4)
    assert row["top1"]["se"] == pytest.approx(0.0088192, rel=1e-4)
    assert row["reached"], "the name says 94"
    assert row["everything_s"]["mean"] == pytest.approx(11.0)
    assert row["everything_first_s"] == 40.0
    assert [path.name for path in kept.iterdir()] == ["cifar10-94_epochs=2"], "the best alone"
    assert (kept / "cifar10-94_epochs=2" / "seed").read_text() == "7"
    said = capsys.readouterr().out
    assert "94.67% ± 0.88 (sd 1.53)" in said
    assert "cifar10-94 epochs=3: no run" in said


def test_only_another_shape_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    monkeypatch.setattr(records, "play", lambda plan, folder: a_record(0.93))
    __import__("torch._dynamo")
    changes = "epochs=2", "optim.lr=1e-3", "batch=512", "model.heads=5", "model.conv.widths=8,16,32"
    variants = [records.Variant("cifar10-94", (change,)) for change in changes]
    records.measure(variants, asked_for(seeds=1, out=tmp_path / "out.json"))
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["first"] for run in runs if "failed" not in run] == ["process", "", "shape", "shape"]
    assert len(resets) == 4, "once for each shape, and for the one that there is not"


def test_no_run_begins_that_would_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(records.time, "perf_counter", lambda: now[0])

    def play(plan: Any, folder: Path) -> dict[str, Any]:
        now[0] += 10.0
        return a_record(0.93)

    monkeypatch.setattr(records, "play", play)
    records.measure([records.Variant("cifar10-94")], asked_for(seeds=9, budget=35.0))
    said = capsys.readouterr().out
    assert "n = 3" in said
    assert "6 runs would not have ended within 35 s" in said
    assert "94 %: NOT reached" in said


@without_gpu
def test_records_without_a_gpu_say_so_and_run_a_toy(tmp_path: Path, play: Played) -> None:
    small = "digits epochs=1 model.depth=1 views=six"
    said = play(records, "--try", small, "--try", "digits epochs=0", "--seeds", 2, "--out", tmp_path / "out.json")
    assert "needs a GPU" in said
    content = json.loads((tmp_path / "out.json").read_text())
    one, two, failed = content["runs"]
    assert one["top1"] != two["top1"], "another seed"
    assert one["train_loss"] < 2.3026, "it has learned something"
    assert one["steps"] == 20
    assert 0 < one["training_s"] <= one["everything_s"]
    assert "epochs must be at least 1" in failed["failed"]


def test_fp8_moves_a_model_s_answers_and_each_further_product_moves_them_more(play: Played, tmp_path: Path) -> None:
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed, (28, 28)))
    said = play(fp8_answers, "mnist", tmp_path).splitlines()
    assert said[0].startswith("mnist: 3 pictures, 10 classes")
    few, more = (float(line.partition("off by ")[2].partition("%")[0]) for line in said[1:])
    assert 0.5 < few < more < 25


def test_one_scale_for_all_tokens_moves_gradients_no_more_than_a_scale_for_each(play: Played, tmp_path: Path) -> None:
    for seed in range(6):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed, (28, 28)))
    said = play(fp8_gradients, "mnist", tmp_path, "--wrong", 0.5).splitlines()
    assert said[0].startswith("mnist: 6 pictures, 4 blocks")
    for line in said[1:]:
        ours, best, bf16 = (float(part.partition("%")[0]) for part in line.split("off by ")[1:])
        assert 10 * bf16 < ours < 1.2 * best + 0.1 < 8, line


def test_fp8_keeps_four_digits_of_two() -> None:
    x = torch.tensor([1.0, 1.06, 1.07, -3.9, 448.0, 2.0**-9])
    assert fp8_answers.rounded(x, torch.tensor(448.0)).tolist() == [1.0, 1.0, 1.125, -4.0, 448.0, 2.0**-9]
