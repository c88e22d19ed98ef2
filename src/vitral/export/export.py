"""`ship`: write, load back, compare, and only then give the file its name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from vitral.errors import VitralError
from vitral.export import onnx_file, torch_file
from vitral.export.parity import Agreement, Ask, check, compare, parting
from vitral.export.wrapper import Exported, Precision
from vitral.inference.onnx_runtime import OnnxModel
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard

Target = Literal["onnx", "torch", "aoti"]
ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".pt2"}
BATCH = 8
PARTED = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.05, "int8": 0.15}  # tokens that are this far off have parted


def ship(
    model: ViT,
    card: ModelCard,
    out: Path,
    *,
    to: Target,
    precision: Precision,
    preprocessing: bool,
    learn_from: Tensor,
    pictures: Sequence[Tensor],
    labels: Tensor | None,
) -> Agreement:
    """The file `out`, and how it agrees with the model on `pictures`; where it does not, an error and no file.

    `learn_from`: uint8 images as the model wants them, for the steps of int8. `pictures`: uint8, C H W, of any sizes.
    """
    if preprocessing and to != "onnx":
        raise VitralError("preprocessing goes into ONNX files only", "use --to onnx, or leave out --preprocessing")
    if out.suffix != ENDINGS[to]:
        raise VitralError(f"{out} must end in {ENDINGS[to]}", f"--out {out.with_suffix(ENDINGS[to])}")
    with _beside(out) as file:
        if to == "onnx":
            onnx_file.write_onnx(file, model, card, precision, preprocessing, learn_from)
            asked = _onnx(OnnxModel(file))
        elif to == "torch":
            torch_file.write_pt2(file, model, card, precision)
            asked = torch_file.read_pt2(file)[0]
        else:
            torch_file.write_aoti(file, model, card, precision)
            asked = torch_file.read_aoti(file)[0]
        images = torch.stack([_as_wanted(picture, card) for picture in pictures])
        given = [picture[None] for picture in pictures] if preprocessing else images.split(BATCH)
        batches = list(zip(images.split(1 if preprocessing else BATCH), given, strict=True))
        found = compare(_model(model, card), asked, batches, labels)
        check(found, precision, lambda: where(model, card, to, precision, learn_from, images[:8]))
    return found


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A file that gets its name when all went well; otherwise nothing is left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    file.touch()  # a folder that cannot be written to is found before the work, not after it
    try:
        yield file
        file.replace(out)
    finally:
        file.unlink(missing_ok=True)


def _as_wanted(picture_CHW: Tensor, card: ModelCard) -> Tensor:
    """Scaled and cropped by Pillow, as `Predictor` does it."""
    array = picture_CHW.permute(1, 2, 0).numpy()
    shown = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    return card.preprocessing.pixels(shown)


def _model(model: ViT, card: ModelCard) -> Ask:
    whole = Exported(model, card).eval()

    def ask(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, probabilities = whole(images)
        return logits, probabilities

    return ask


def _onnx(model: OnnxModel) -> Ask:
    def ask(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, probabilities = model.logits(images.numpy())
        return torch.from_numpy(logits), torch.from_numpy(probabilities)

    return ask


def where(model: ViT, card: ModelCard, to: Target, precision: Precision, learn_from: Tensor, images: Tensor) -> str:
    """In which block the exported numbers leave the model's. For ONNX, the graph is written again with a window in
    each block."""
    with torch.inference_mode():
        ours = list(Exported(model, card, blocks=True).eval()(images))
        if to != "onnx":
            theirs = list(Exported(model, card, precision, blocks=True).eval()(images))
        else:
            _, runtime = onnx_file.needed()
            graph = (
                onnx_file.in_bytes(model, card, learn_from, blocks=True)
                if precision == "int8"
                else onnx_file.whole_graph(model, card, precision, blocks=True)
            )
            session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
            theirs = [torch.from_numpy(values) for values in session.run(None, {"images": images.numpy()})]
    return parting(ours, theirs, PARTED[precision])
