"""From a trained model to one that others use: how fast it is here, and as a file for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vitral.hardware import cores
from vitral.inference.bench import bench as measure_speed
from vitral.inference.choice import Measured
from vitral.predict import Predictor
from vitral.run import model_folder
from vitral.samples import sample


def bench(
    path: str | Path,
    *,
    data: str | None = None,
    images: int = 512,
    threads: Sequence[int] = (),
    batches: Sequence[int] = (1, 8, 32),
    seconds: float = 1.0,
    say: Callable[[str], None] = lambda line: None,
) -> Measured:
    """How fast a model answers on this CPU, way by way; the best is kept with the model and used from then on.

    On validation images, or on those of another set or folder.
    """
    predictor = Predictor.load(path, device="cpu", precision="fp32")
    return measure_speed(
        predictor.model,
        predictor.card.preprocessing,
        sample(predictor, path, data, images).images,
        model_folder(Path(path)),
        threads=threads or sorted({1, cores()}),
        batches=batches,
        seconds=seconds,
        say=say,
    )
