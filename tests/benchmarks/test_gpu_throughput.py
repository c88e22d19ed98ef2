"""gpu_throughput: cases, comparisons, and a toy run without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_throughput
import peers
from peers import Case


@pytest.mark.parametrize(("model", "gmacs"), [("Ti/16", 1.25), ("S/16", 4.60), ("B/16", 17.56), ("L/16", 61.55)])
def test_flop_counts_match_the_literature(model: str, gmacs: float) -> None:
    assert peers.forward_gflop(peers.model_config(model)) / 2 == pytest.approx(gmacs, rel=0.01)


def test_cases_are_parsed() -> None:
    case = Case.parse("timm:B/16:train:graphs+channels-last")
    assert (case.library, case.task, case.batch_size) == ("timm", "train B/16", 256)
    assert case.option_list == ["graphs", "channels-last"]
    assert Case.parse("vitral:S/16:latency-8").batch_size == 8
    assert str(case) == "timm:B/16:train:graphs+channels-last"


@pytest.mark.parametrize("text", ["timm", "timm:B/16", "timm:B/16:dance", "a:b:c:d:e"])
def test_invalid_cases_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"is not a case|unknown mode"):
        Case.parse(text)


def make_row(case: str, speed: float, memory: float, **fields: Any) -> dict[str, Any]:
    library, model, mode, *options = case.split(":")
    row = {"case": case, "library": library, "model": model, "mode": mode, "options": "".join(options), "tflops": 1.0}
    speeds = {"images_per_second": speed, "images_per_second_min": speed, "images_per_second_max": speed}
    return row | speeds | {"peak_gib": memory, "first_step_s": 1.0} | fields


ROWS = [
    make_row("vitral:B/16:train", 900, 12.0, cache="empty"),
    make_row("vitral:B/16:train", 600, 12.0),
    make_row("timm:B/16:train", 400, 16.0),
    make_row("torchvision:B/16:train", 300, 8.0),
    make_row("timm:B/16:train:bf16-weights", 800, 4.0),
    {"case": "x:B/16:train", "library": "x", "model": "B/16", "mode": "train", "options": "", "failed": "no memory"},
    make_row("timm:B/16:infer:bf16-weights", 800, 4.0),
]


def test_vitral_is_compared_with_the_fastest_comparable_peer() -> None:
    comparisons = gpu_throughput.compare_with_peers(ROWS)
    assert list(comparisons) == ["vitral:B/16:train"]
    comparison = comparisons["vitral:B/16:train"]
    assert comparison["speed"] == pytest.approx(1.5)
    assert comparison["memory"] == pytest.approx(0.75)
    assert comparison["fastest_peer"] == "timm:B/16:train"


def test_the_table_shows_failures_and_cases_that_are_not_compared() -> None:
    text = "\n".join(gpu_throughput.format_table(ROWS, 800.0))
    assert "no memory" in text
    assert "2.00x" in text  # timm with bf16 weights


def test_the_default_waves_cover_every_model_and_mode() -> None:
    waves = gpu_throughput.default_waves(["auto", "fp8"])
    assert [str(case) for case in waves[0]][:3] == ["vitral:B/16:train", "vitral:B/16:train:fp8", "timm:B/16:train"]
    assert {case.library for case in waves[0]} == {case.library for case in waves[1]} == {"vitral", *peers.PEERS}
    tasks = {case.task for wave in waves for case in wave}
    assert tasks >= {f"{mode} {model}" for mode in ("train", "infer") for model in ("Ti/16", "S/16", "B/16", "L/16")}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full benchmark on a GPU")
def test_a_toy_runs_without_a_gpu_and_failures_are_reported(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    cases = ["vitral:toy:train", "vit-pytorch:toy:train", "nobody:toy:train"]
    out = tmp_path / "out.json"
    text = run_benchmark(gpu_throughput, "--rounds", 2, "--seconds", 0.02, "--json", out, "--cases", *cases)
    assert "needs a GPU" in text
    content = json.loads(out.read_text())
    vitral, peer, unknown = content["rows"]
    assert vitral["images_per_second"] > 0
    assert vitral["rounds"] == peer["rounds"] == 2
    assert "unknown library 'nobody'" in unknown["failed"]
    ratio = vitral["images_per_second"] / peer["images_per_second"]
    assert content["comparisons"]["vitral:toy:train"]["speed"] == pytest.approx(ratio)
