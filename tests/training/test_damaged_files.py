"""Flipped bits: every damaged file is recognised, and training continues from what is intact."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import Fit, identical
from support.training import final_weights, metrics_without_timing
from vitral import weights
from vitral.errors import VitralError
from vitral.runs.model_io import load_model, load_model_config, load_weights, save_weights
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.callbacks import Callback
from vitral.training.checkpoint_file import file_damage

FLIPS = 30


def flipped_copies(path: Path, folder: Path, flips: int = FLIPS) -> Iterator[Path]:
    """Copies of a file in `folder`, each with one random bit flipped."""
    content = path.read_bytes()
    for _ in range(flips):
        damaged = bytearray(content)
        bit = random.randrange(8 * len(content))
        damaged[bit // 8] ^= 1 << bit % 8
        copy = folder / path.name
        copy.write_bytes(damaged)
        yield copy


def count_undetected(copies: Iterator[Path], load: Callable[[Path], Any], is_unchanged: Callable[[Any], bool]) -> int:
    """How many copies load without an error although their content differs."""
    undetected = 0
    for copy in copies:
        with suppress(VitralError):
            undetected += not is_unchanged(load(copy))
    return undetected


@pytest.fixture
def run(train_tiny: Fit) -> Run:
    return train_tiny(epochs=2)


def test_every_flipped_bit_in_a_checkpoint_is_recognised(run: Run, tmp_path: Path) -> None:
    path = checkpoint.newest(run.checkpoint_dir)
    assert path is not None
    assert checkpoint.find_damage(path) is None
    for copy in flipped_copies(path, tmp_path):
        assert checkpoint.find_damage(copy) is not None
    content = path.read_bytes()
    for position in range(len(content) - 100, len(content)):  # the end of the zip archive and the digest
        damaged = bytearray(content)
        damaged[position] ^= 1
        (tmp_path / path.name).write_bytes(damaged)
        assert file_damage(tmp_path / path.name) is not None, position


@pytest.mark.parametrize("name", ["checkpoints/best.safetensors", "model/weights.safetensors"])
def test_flipped_bits_in_weights_are_recognised(run: Run, tmp_path: Path, name: str) -> None:
    expected = load_weights(run.path / name)
    copies = flipped_copies(run.path / name, tmp_path)
    assert count_undetected(copies, load_weights, lambda tensors: identical(tensors, expected)) == 0


@pytest.mark.slow
def test_flipped_bits_in_config_json_are_recognised(run: Run, tmp_path: Path) -> None:
    path = run.model_dir / "config.json"
    expected = load_model_config(path)
    assert count_undetected(flipped_copies(path, tmp_path), load_model_config, lambda config: config == expected) == 0


def test_damaged_model_is_refused_by_everything_that_loads_it(run: Run) -> None:
    path = run.model_dir / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for load in (load_model, weights.read):
        with pytest.raises(VitralError) as error:
            load(run.path)
        assert error.value.what == f"{path} is damaged: its SHA-256 does not match"
        assert error.value.hint == "Copy it again, or train again"


def test_edited_config_says_how_to_keep_the_edit(run: Run) -> None:
    path = run.model_dir / "config.json"
    text = path.read_text().replace('"rows"', '"stripes"')
    path.write_text(text)
    with pytest.raises(VitralError, match="is damaged or was edited: its SHA-256 does not match") as error:
        load_model(run.path)
    assert error.value.hint == 'Copy it again; to keep your own changes, delete the line "sha256" from it'
    lines = [line for line in text.splitlines() if '"sha256"' not in line]
    path.write_text("\n".join(lines).replace(",\n}", "\n}"))
    assert load_model(run.path)[1].classes[0] == "stripes"


def test_folder_without_digests_loads(run: Run) -> None:
    """As written by an older version or another tool."""
    from safetensors.torch import save_file

    path = run.model_dir / "weights.safetensors"
    tensors = load_weights(path)
    save_file(tensors, path)
    assert identical(load_model(run.path)[0].state_dict(), tensors)
    assert weights.read(run.path).state.keys() == tensors.keys()


def test_digest_does_not_depend_on_the_order_of_tensors(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros((), dtype=torch.bfloat16), "empty": torch.ones(0, 2)}
    save_weights(tmp_path / "one.safetensors", tensors)
    save_weights(tmp_path / "two.safetensors", dict(reversed(tensors.items())))
    assert identical(load_weights(tmp_path / "one.safetensors"), load_weights(tmp_path / "two.safetensors"))


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, message: str) -> None:
        self.texts.append(message)


@pytest.mark.slow
def test_training_is_bit_exact_after_thirty_flipped_bits(train_tiny: Fit, tmp_path: Path) -> None:
    """Each flip damages the newest checkpoint or the best weights of a run that was stopped after its last step."""
    reference = train_tiny("reference", keep_checkpoints=4)
    names = ["step-000000024.pt", "step-000000024.pt", "best.safetensors"]
    for number in range(FLIPS):
        run = tmp_path / f"run-{number}"
        shutil.copytree(reference.path, run)
        shutil.rmtree(run / "model")
        damaged = run / "checkpoints" / names[number % len(names)]
        next(flipped_copies(damaged, damaged.parent, flips=1))
        messages = Messages()
        resumed = train_tiny(run.name, messages, keep_checkpoints=4)
        if damaged.name != "best.safetensors":
            assert messages.texts[0].startswith("step-000000024.pt is damaged")
        assert identical(final_weights(resumed), final_weights(reference))
        assert metrics_without_timing(resumed) == metrics_without_timing(reference)
