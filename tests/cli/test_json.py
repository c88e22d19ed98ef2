"""`--json` prints strict JSON, also for a model whose outputs are NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import TINY_MODEL, Command, skip_figures
from support.photos import save_photo
from vitral import api


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose logits are NaN because its finite weights overflow, and photographs in two classes."""
    folder = tmp_path_factory.mktemp("nan")
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        api.train("digits", epochs=1, out=folder / "run", **TINY_MODEL)
    file = folder / "run" / "model" / "weights.safetensors"
    weights = load_file(file)
    save_file(weights | {"head.out.weight": torch.full_like(weights["head.out.weight"], 3e38)}, file)
    for index in range(8):
        save_photo(folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    return folder


def parse_strictly(line: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    "words",
    [
        "predict RUN PHOTO --json",
        "evaluate RUN --json",
        "evaluate RUN --json --ood PHOTOS",
        "compare RUN RUN --json",
        "explain RUN PHOTO --json --out OUT",
        pytest.param("probe digits --init-from RUN --json", marks=pytest.mark.slow),
        "bench RUN --json --seconds 0.01 --images 16 --batch-sizes 1 --threads 1",
        "doctor PHOTOS --json",
        "plan B/16 --json",
    ],
)
def test_output_is_strict_json(
    words: str, folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    paths = {
        "RUN": folder / "run",
        "PHOTO": folder / "photos" / "ants" / "0.png",
        "PHOTOS": folder / "photos",
        "OUT": tmp_path,
    }
    code, out, err = command(*(paths.get(word, word) for word in words.split()))
    assert "Traceback" not in err
    if code == 2:  # refused, with a reason
        assert err.count("error: ") == 1
        assert out == ""
        return
    assert parse_strictly(out)


def test_labels_of_a_model_without_finite_logits_have_no_probability(folder: Path, command: Command) -> None:
    _, out, _ = command("predict", folder / "run", folder / "photos" / "ants" / "0.png", "--json")
    assert [label["probability"] for label in parse_strictly(out)["labels"]] == [None, None, None]
