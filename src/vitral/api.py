"""What people do here, each a function; the command line calls these. Models are made in making.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from vitral import bundled as box
from vitral.api_train import compare as compare
from vitral.api_train import demo as demo
from vitral.api_train import train as train
from vitral.data.datasets import Split
from vitral.data.datasets import load as load_dataset
from vitral.data.files.listing import load_files, looks_like_files
from vitral.data.preprocess import adapt
from vitral.evaluation import evaluate as judge
from vitral.evaluation.calibration import FALSE_ALARMS, Calibration, Score
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.evaluate import SplitName, Watch, unwatched
from vitral.evaluation.probe import ProbeResult
from vitral.evaluation.probe import probe as probe_features
from vitral.evaluation.report import Evaluation
from vitral.inference.predictor import Predictor, is_checkpoint
from vitral.reporting.feature_files import check_features_path, write_features
from vitral.reporting.figures import training as figures
from vitral.reporting.html.report import write_report
from vitral.reporting.html.report_data import gather

DAMAGED = 2_000  # images that a report damages in 25 ways


def load(path: str | Path) -> Predictor:
    """A trained model from its run folder or model folder, or one of those that come along: "mnist"."""
    return Predictor.load(path)


def evaluate(
    model: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
    max_error: float | None = None,
    unknown: str | None = None,
    robustness: bool = False,
    watch: Watch = unwatched,
) -> Evaluation:
    """How good a model is on a split of what it was trained on, or on another set or folder with classes it knows, and
    how far to trust it.

    `split`: the test images, or the validation images where there are none; of another folder without splits, all. With
    `max_error`, from what confidence on to answer so that at most this share is wrong; with `unknown`, a set or folder,
    whether images of other things are noticed; with `robustness`, what is left of the accuracy on worse pictures.
    `watch` hears what is going on.
    """
    asked = judge.question(model, data, split)
    damaged = judge.MOST_IMAGES if robustness else 0
    return judge.evaluate(asked, max_error=max_error, against=unknown, damaged=damaged, watch=watch)[0]


def compare_models(
    first: str | Path | Predictor,
    second: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
) -> PairedComparison:
    """Two models asked the same images: by how much one is better, and whether that can be luck."""
    return judge.compare_models(judge.question(first, data, split), judge.question(second, data, split))


def calibrate(
    model: str | Path | Predictor, *, score: Score = "energy", false_alarms: float = FALSE_ALARMS
) -> Calibration:
    """Fit temperature and threshold on the validation images, and write them into the model's config.json."""
    asked = judge.question(model, None, None)
    return judge.calibrate_model(asked.predictor, asked.held_out, score, false_alarms)


def report(
    model: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    split: SplitName | None = None,
    unknown: str | None = None,
    fast: bool = False,
    watch: Watch = unwatched,
) -> Path:
    """One HTML file about a model, to send to a colleague; by default report.html in its folder, if it has one.

    `split`: the test images, or the validation images where there are none. With `unknown`, a set or folder of other
    things, it says whether they are noticed. `fast` leaves out the damaged pictures. `watch` hears what is going on.
    """
    asked = judge.question(model, data, split)
    home = asked.predictor.path or Path()
    boxed = box.name_of(home)
    own = Path(f"{boxed}-report.html") if boxed else (Path() if is_checkpoint(home) else home) / "report.html"
    place = Path(out) if out else own
    found, logits = judge.evaluate(asked, against=unknown, damaged=0 if fast else DAMAGED, watch=watch)
    watch("looking at the data and the mistakes")
    return write_report(gather(asked, found, logits, home, thorough=not fast), place)


def probe(
    data: str, init: str | Path | Predictor, *, out: str | Path | None = None, heads: int | None = None
) -> ProbeResult:
    """How well a model's frozen features tell classes apart: nearest neighbours, a linear probe, few-shot regression.

    Judged on the test images; where there are none, on the validation images, and then everything is chosen by
    cross-validation inside the training images. With `out`, a plot.
    """
    predictor = init if isinstance(init, Predictor) else Predictor.load(init, heads=heads)
    seen = predictor.card.preprocessing
    dataset = load_files(data, seen) if looks_like_files(data) else load_dataset(data)

    def features(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        return predictor.features(adapt(split.images, seen)), split.labels

    validation = features(dataset.validation)
    tested = len(dataset.test) > 0
    result = probe_features(
        features(dataset.train),
        validation if tested else None,
        features(dataset.test) if tested else validation,
        dataset.classes,
    )
    result = replace(result, judged_on="test" if tested else "validation")
    if out is not None:
        figures.probe(result, Path(out))
    return result


class Embedded(NamedTuple):
    images: int
    troubles: list[str]  # what was wrong with those that could not be read


def embed(
    model: str | Path | Predictor, files: Sequence[str | Path], out: str | Path, *, heads: int | None = None
) -> Embedded:
    """Write the feature vectors of images to .npy, .parquet or .csv."""
    check_features_path(out)
    predictor = model if isinstance(model, Predictor) else Predictor.load(model, heads=heads)
    names, vectors, troubles = predictor.embed_files(files)
    write_features(names, vectors, out)
    return Embedded(len(names), troubles)
