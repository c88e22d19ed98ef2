"""From a trained model to one that others use: how fast it is here, and as a file for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vitral import bundled as box
from vitral.device.hardware import cores
from vitral.evaluation.calibration_images import sample
from vitral.export import onnx_file
from vitral.export.export import ENDINGS, Target, ship
from vitral.export.parity import Agreement
from vitral.export.wrapper import Precision
from vitral.inference.bench import bench as measure_speed
from vitral.inference.engine_selection import Measured
from vitral.inference.predictor import Predictor, is_checkpoint
from vitral.runs.run import model_folder


def bench(
    model: str | Path | Predictor,
    *,
    data: str | None = None,
    images: int = 512,
    threads: Sequence[int] = (),
    batches: Sequence[int] = (1, 8, 32),
    seconds: float = 1.0,
    say: Callable[[str], None] = lambda line: None,
) -> Measured:
    """How fast a model answers on this CPU, way by way; the best is kept with the model and used from then on.

    On validation images, or on those of another set or folder. Another library's checkpoint keeps nothing.
    """
    predictor = on_the_cpu(model)
    return measure_speed(
        predictor.model,
        predictor.card.preprocessing,
        sample(predictor, data, images).images,
        kept_in(predictor),
        threads=threads or sorted({1, cores()}),
        batches=batches,
        seconds=seconds,
        say=say,
    )


def kept_in(predictor: Predictor) -> Path | None:
    """Where measurements are kept: in the folder of a model of vitral's own; of one in the box, in the cache."""
    if predictor.path is None or is_checkpoint(predictor.path):
        return None
    folder = box.kept(model_folder(predictor.path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def on_the_cpu(model: str | Path | Predictor) -> Predictor:
    return model if isinstance(model, Predictor) else Predictor.load(model, device="cpu", precision="fp32")


def export(
    model: str | Path | Predictor,
    *,
    to: Target = "onnx",
    precision: Precision = "fp32",
    preprocessing: bool = False,
    out: str | Path | None = None,
    data: str | None = None,
    images: int = 256,
) -> tuple[Path, Agreement]:
    """A model as one file for other programs, and how it agrees with the model on real images.

    With `preprocessing` it takes pictures of any size. int8 learns its steps from half of the images and is compared
    on the others.
    """
    predictor = on_the_cpu(model)
    if to == "onnx":
        onnx_file.needed()
    given = predictor.path or Path()
    boxed = box.name_of(given)
    inside = Path() if boxed else given / "exports" if given.is_dir() else given.parent
    name = boxed or (given.stem if given.is_file() else "model")
    name += "" if precision == "fp32" else f"-{precision}"
    file = Path(out) if out is not None else inside / f"{name}{'-aoti' if to == 'aoti' else ''}{ENDINGS[to]}"
    learn, compare = sample(predictor, data, images).halves()
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
