"""Models that leave Python: `vitral.api.export`, `vitral.api.explorer` and `vitral.push`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitral import bundled
from vitral.api.inference import reference_predictor
from vitral.data.names import path_text
from vitral.errors import VitralError
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.explorer.build import ExplorerOptions, model_names, site_model
from vitral.explorer.weights import Precision as WeightPrecision
from vitral.explorer.write import write_site
from vitral.export.export import SUFFIX_BY_TARGET, Target, check_exportable, export_model
from vitral.export.onnx_file import require_onnx
from vitral.export.parity import MIN_AGREEMENT, ParityReport, check_image_count
from vitral.export.wrapper import ExportPrecision
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.reporting.hub.publish import push as push
from vitral.utils.progress import LogFn, no_log


def export(
    model: str | Path | Predictor,
    *,
    to: Target = "onnx",
    precision: ExportPrecision = "fp32",
    preprocessing: bool = False,
    out: str | Path | None = None,
    data: str | Path | None = None,
    images: int | None = None,
    min_agreement: float = MIN_AGREEMENT,
) -> tuple[Path, ParityReport]:
    """Export a model to one file and compare the file with the model on real images.

    Nothing is written if they disagree. At least 100 images are compared, unless `images` is smaller.

    Args:
        model: The model to export.
        to: "onnx", "torch" (torch.export, .pt2) or "aoti" (AOTInductor package for this kind of CPU).
        precision: Precision of the exported weights. int8 is available for ONNX only.
        preprocessing: Include resizing and cropping, so that the file accepts images of any size. ONNX only.
        out: File to write. Default: exports/ in the run or model folder, otherwise the current folder.
        data: Dataset or folder with images. Default: the validation images of the dataset it was trained on.
        images: Maximum number of images to compare on. Default: all images of `data` up to 10,000, or 1,000 validation
            images. int8 is calibrated on training images or, if those are not available, on every fourth image.
        min_agreement: Share of images on which file and model must have the same top-1 label; of a multi-label model,
            the same decision on each label.

    Examples:
        >>> file, parity = vitral.api.export("runs/mine")
        >>> parity.agreement, parity.max_abs_diff
    """
    predictor = reference_predictor(model)
    predictor.require_head()
    check_exportable(predictor.model_config.preprocessing)
    if to == "onnx":
        require_onnx()
    path = Path(out) if out is not None else default_export_path(predictor, to, precision)
    comparison = load_comparison_images(predictor, path_text(data), images, calibrate=precision == "int8")
    check_image_count(len(comparison), images)
    parity = export_model(
        predictor,
        path,
        to=to,
        precision=precision,
        preprocessing=preprocessing,
        comparison=comparison,
        min_agreement=min_agreement,
    )
    return path, replace(parity, notes=comparison.notes)


def default_export_path(predictor: Predictor, to: Target, precision: ExportPrecision) -> Path:
    """exports/ in the run or model folder; next to a checkpoint file; the current folder for bundled models."""
    source = predictor.path or Path()
    name = bundled.bundled_name(source)
    folder = Path() if name else source / "exports" if source.is_dir() else source.parent
    stem = name or (source.stem if source.is_file() else "model")
    stem += "" if precision == "fp32" else f"-{precision}"
    return folder / f"{stem}{'-aoti' if to == 'aoti' else ''}{SUFFIX_BY_TARGET[to]}"


class ExplorerSite(NamedTuple):
    """A site that `explorer` wrote."""

    page: Path  # index.html
    size: int  # bytes of all files
    models: tuple[str, ...]  # names of the models in it
    notes: tuple[str, ...]  # how checkpoints of other libraries were interpreted


def explorer(
    models: Sequence[str | Path | Predictor] = (),
    out: str | Path = "site",
    *,
    images: Sequence[str | Path] = (),
    labels: str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    precision: WeightPrecision = "auto",
    faithfulness: str | None = None,
    faithfulness_images: int = 32,
    epochs: int = 8,
    log: LogFn = no_log,
) -> ExplorerSite:
    """Write a static site in which models run in the browser and can be taken apart.

    It needs no server and no network: open index.html. Models that the browser cannot run are refused.

    Args:
        models: The models. Default: the bundled ones.
        out: Folder to write.
        images: Example images for the page.
        labels: Text file with one class name per line, for a checkpoint without class names.
        options: What the files of a checkpoint of another library do not contain.
        precision: Precision of the weights. "auto": exact for bundled and small models, int8 for those above 4 million
            parameters.
        faithfulness: Dataset or folder with the model's classes: rank the explanation methods on its images. Default:
            the recorded ranking of a bundled model, otherwise none.
        faithfulness_images: Number of images, and of image pairs, to rank on.
        epochs: Number of earlier epochs to include from the checkpoints that a run kept.
        log: Called with one line per phase.

    Examples:
        >>> vitral.api.explorer(["mnist"], "site").page
    """
    if epochs < 0 or faithfulness_images < 1:
        raise VitralError(
            f"expected at least 0 epochs and 1 image, got {epochs} and {faithfulness_images}", "Omit them for 8 and 32"
        )
    sources = list(models) or [bundled.PREFIX + name for name in ("mnist", "cifar10")]
    names = model_names(sources)
    settings = ExplorerOptions(
        precision=precision,
        images=tuple(map(Path, images)),
        faithfulness=faithfulness,
        faithfulness_images=faithfulness_images,
        epochs=epochs,
    )
    site_models = []
    for source, name in zip(sources, names, strict=True):
        log(f"Loading {name}")
        if isinstance(source, Predictor):
            predictor = source.reference()
        else:
            file = (
                Path(labels) if labels is not None and bundled.bundled_name(bundled.resolve(source)) is None else None
            )
            predictor = Predictor.load(source, device="cpu", engine="reference", labels=file, options=options)
        site_models.append(site_model(predictor, name, settings, log))
    log("Writing")
    size = write_site(site_models, Path(out))
    notes = tuple(note for model in site_models for note in model.predictor.notes)
    return ExplorerSite(Path(out) / "index.html", size, tuple(names), notes)
