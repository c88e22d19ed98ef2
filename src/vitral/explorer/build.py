"""Collect what a site shows: models, weights of several epochs, example images, and the ranking of explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import bundled
from vitral.data.names import is_file_dataset
from vitral.errors import VitralError
from vitral.evaluation.data import load_eval_target
from vitral.explain.faithfulness import max_images, measure_faithfulness
from vitral.explorer.history import earlier_epochs
from vitral.explorer.manifest import example_entries, faithfulness_entry
from vitral.explorer.supported import check_supported
from vitral.explorer.weights import Precision, encode_weights
from vitral.explorer.write import ModelWeights, SiteModel
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.utils.json_toml import read_json_object
from vitral.utils.progress import LogFn, no_log

BROWSER_METHODS = ("attention", "rollout", "relevance", "gradcam", "occlusion")  # in explanations.js
RANKING_FILE = "faithfulness.json"  # of a bundled model
MAX_EXAMPLES = 24


@dataclass(frozen=True, kw_only=True)
class ExplorerOptions:
    """The content of a site, except the models."""

    precision: Precision = "auto"
    images: tuple[Path, ...] = ()  # example images
    faithfulness: str | None = None  # dataset or folder to rank explanations on; None: the recorded ranking, if any
    faithfulness_images: int = 32
    epochs: int = 8  # earlier epochs at most


def site_model(predictor: Predictor, name: str, options: ExplorerOptions, log: LogFn = no_log) -> SiteModel:
    """A model and everything that the site shows of it. Refuses models that a browser cannot run."""
    check_supported(predictor.model, predictor.model_config, name)
    model = predictor.model
    assert isinstance(model, ViT)
    log(f"Encoding {name}")
    epoch = predictor.model_config.epoch
    earlier = earlier_epochs(predictor.path, model, epoch, options.epochs) if predictor.path is not None else []
    weights = [ModelWeights(epoch=number, weights=encoded) for number, encoded in earlier]
    weights.append(ModelWeights(epoch=epoch or None, weights=encode_weights(model, options.precision)))
    return SiteModel(
        name=name,
        predictor=predictor,
        weights=tuple(weights),
        examples=tuple(example_entries(options.images[:MAX_EXAMPLES], predictor)),
        faithfulness=ranking(predictor, options, log),
    )


def ranking(predictor: Predictor, options: ExplorerOptions, log: LogFn = no_log) -> dict[str, Any] | None:
    """Measure how faithful the explanations are on `options.faithfulness`; otherwise a bundled model's record."""
    if options.faithfulness is not None:
        log("Measuring the faithfulness of explanations")
        return measure_ranking(predictor, options.faithfulness, options.faithfulness_images)
    name = bundled.bundled_name(predictor.path) if predictor.path is not None else None
    file = bundled.BUNDLED_DIR / (name or "") / RANKING_FILE
    return read_json_object(file) if name is not None and file.exists() else None


def measure_ranking(predictor: Predictor, data: str, num_images: int) -> dict[str, Any]:
    """Rank the methods that run in the browser by the tests of `vitral explain --faithfulness`."""
    target = load_eval_target(predictor, data, max_files=max_images(num_images, num_images))
    result = measure_faithfulness(
        target.predictor, target.split, BROWSER_METHODS, num_images=num_images, num_pairs=num_images
    )
    source = Path(data).name if is_file_dataset(data) else data
    return faithfulness_entry(result, f"{source} {target.split_name}")


def model_names(models: Sequence[str | Path | Predictor]) -> list[str]:
    """A name for each model: the bundled name, or the name of its folder or file. Names must differ."""
    names = [_model_name(model) for model in models]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise VitralError(f"two models are named {repeated.pop()!r}", "Rename one of the folders")
    return names


def _model_name(model: str | Path | Predictor) -> str:
    path = model.path if isinstance(model, Predictor) else bundled.resolve(model)
    if path is None:
        return "model"
    name = bundled.bundled_name(path) if not str(path).startswith("hf:") else None
    path = Path(path)
    return name or (path.parent.name if path.name == "model" else path.name.split(".")[0]) or "model"
