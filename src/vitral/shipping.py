"""From a trained model to one that others use: how fast it is here, and as a file for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vitral.export import onnx_file
from vitral.export.graph import Precision
from vitral.export.proof import Agreement
from vitral.export.ship import ENDINGS, Target, ship
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


def export(
    path: str | Path,
    *,
    to: Target = "onnx",
    precision: Precision = "fp32",
    preprocessing: bool = False,
    out: str | Path | None = None,
    data: str | None = None,
    images: int = 256,
    labels: Path | None = None,
) -> tuple[Path, Agreement]:
    """A model as one file for other programs, and how it agrees with the model on real images.

    With `preprocessing` it takes pictures of any size. int8 learns its steps from half of the images and is compared
    on the others.
    """
    predictor = Predictor.load(path, device="cpu", labels=labels, precision="fp32")
    if to == "onnx":
        onnx_file.needed()
    given = Path(path)
    inside = given / "exports" if given.is_dir() else given.parent
    name = f"{given.stem if given.is_file() else 'model'}{'' if precision == 'fp32' else '-' + precision}"
    file = Path(out) if out is not None else inside / f"{name}{'-aoti' if to == 'aoti' else ''}{ENDINGS[to]}"
    learn, compare = sample(predictor, path, data, images).halves()
    found = ship(
        predictor.model,
        predictor.card,
        file,
        to=to,
        precision=precision,
        preprocessing=preprocessing,
        learn_from=learn.images,
        pictures=compare.originals,
        labels=compare.labels,
    )
    return file, found
