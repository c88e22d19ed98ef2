"""Weights of earlier epochs, from the checkpoints that a run kept (`keep_checkpoints`)."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from vitral.errors import VitralError
from vitral.explorer.weights import EncodedWeights, Precision, encode_weights
from vitral.models.vit import ViT
from vitral.training import checkpoint

MAX_HISTORY_BYTES = 8_000_000  # of all earlier epochs of a model together, as text


def earlier_epochs(run: Path, model: ViT, final_epoch: int, max_epochs: int) -> list[tuple[int, EncodedWeights]]:
    """Epoch and weights of up to `max_epochs` checkpoints before `final_epoch`, evenly spaced, in bf16 or int8.

    Empty for models without checkpoints. Fewer are returned if they would be too large together.
    """
    files = sorted((run / "checkpoints").glob("step-*.pt")) if run.is_dir() else []
    if not files or max_epochs < 1:
        return []
    precision: Precision = (
        "bf16" if len(encode_weights(model, "bf16").text) * max_epochs <= MAX_HISTORY_BYTES else "int8"
    )
    size = len(encode_weights(model, precision).text)
    epochs: dict[int, Path] = {}
    for file in files:
        epochs[checkpoint_epoch(file)] = file
    chosen = evenly_spaced(
        [epoch for epoch in sorted(epochs) if 0 < epoch < final_epoch], min(max_epochs, MAX_HISTORY_BYTES // size)
    )
    return [(epoch, encode_weights(model_at(epochs[epoch], model), precision)) for epoch in chosen]


def checkpoint_epoch(file: Path) -> int:
    """Completed epochs of a checkpoint."""
    return int(checkpoint.load(file)["epoch"])


def model_at(file: Path, final: ViT) -> ViT:
    """The model of a checkpoint: with averaged weights if it has them, as in validation. Frozen weights are final."""
    state = checkpoint.load(file)
    trained: dict[str, torch.Tensor] = state["ema"] or state["model"]
    if unknown := trained.keys() - final.state_dict().keys():
        raise VitralError(
            f"the checkpoint {file} does not fit the finished model ({len(unknown)} other tensors)",
            "Pass --epochs 0 to write the explorer without earlier epochs",
        )
    model = copy.deepcopy(final)
    model.load_state_dict({**final.state_dict(), **trained})
    return model


def evenly_spaced(epochs: list[int], count: int) -> list[int]:
    """`count` of the epochs, including the first and the last."""
    if count >= len(epochs):
        return epochs
    if count < 2:
        return epochs[:count]
    return [epochs[round(index * (len(epochs) - 1) / (count - 1))] for index in range(count)]
