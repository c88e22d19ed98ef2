"""The benchmarks for a GPU: what they compute from measurements, and that they run, as toys, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import contestants
import gpu_curve
import gpu_pipeline
import gpu_throughput

PLACE = Path(__file__).parent.parent / "benchmarks"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")


def run(name: str, *words: str) -> str:
    done = subprocess.run([sys.executable, PLACE / name, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
def test_throughput_without_a_gpu_says_so_runs_a_toy_and_survives_who_fails(tmp_path: Path) -> None:
    words = ["--rounds", "2", "--seconds", "0.02", "--out", str(tmp_path / "out.json")]
    said = run("gpu_throughput.py", *words, "--cases", "vitral:toy:train", "vit-pytorch:toy:train", "nobody:toy:train")
    assert "needs a GPU" in said
    content = json.loads((tmp_path / "out.json").read_text())
    ours, theirs, nobody = content["rows"]
    assert ours["images_per_second"] > 0
    assert ours["rounds"] == theirs["rounds"] == 2
    assert "nobody here is called 'nobody'" in nobody["failed"]
    ratio = ours["images_per_second"] / theirs["images_per_second"]
    assert content["against_the_fastest"]["vitral:toy:train"]["speed"] == pytest.approx(ratio)


@without_gpu
def test_the_pipeline_without_a_gpu_says_so_and_runs_a_toy(tmp_path: Path) -> None:
    said = run("gpu_pipeline.py", "--out", str(tmp_path / "out.json"))
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
def test_curves_without_a_gpu_say_so_and_are_drawn(tmp_path: Path) -> None:
    words = ["--settings", "autocast", "--seeds", "1", "--steps", "60", "--out", str(tmp_path / "out.json")]
    said = run("gpu_curve.py", *words)
    assert "needs a GPU" in said
    content = json.loads((tmp_path / "out.json").read_text())
    (found,) = content["runs"]
    assert len(found["losses"]) == 60
    assert found["losses"][0] == pytest.approx(2.3026, abs=1e-3), "ten classes, equal odds"
    assert sum(found["losses"][-10:]) < sum(found["losses"][:10])
    gpu_curve.draw(content, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000
