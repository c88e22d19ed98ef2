"""The recipes of a cross-validation, its settings file, and the models made from its folds.

out/folds.json              number of folds, kind of model and recipe, written first
out/fold-1/ ...             run folders; a finished one is not repeated, an interrupted one continues
out/refit/                  run folder of the training on all images
out/model/                  the model: that of the refit, or the ensemble of the folds
out/recipe.toml             recipe of the refit
out/cross_validation.json   the result
out/out_of_fold.csv         the prediction of every image by the model that was trained without it
out/report.html
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral.data.files.fingerprints import FingerprintFormatError, concatenate, load_fingerprints
from vitral.errors import VitralError
from vitral.evaluation.calibration import fit_calibration
from vitral.evaluation.cross_validation import FoldModel, FoldPredictions, pool_predictions
from vitral.models.calibration import Calibration
from vitral.models.variants.ensemble import MEMBER_VARIANTS, EnsembleViT
from vitral.recipes.options import parse_duration
from vitral.recipes.schema import Recipe, recipe_from_dict
from vitral.runs.model_io import TRAINING_IMAGES_FILE, ModelConfig, load_model, save_model
from vitral.runs.run import Run
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.serialization import to_dict

SETTINGS_FILE = "folds.json"
MAX_FOLDS = 1000


@dataclass(frozen=True, kw_only=True)
class FoldSettings:
    """The settings of a cross-validation, stored in folds.json."""

    recipe: Recipe
    folds: int
    fold_model: FoldModel

    def __post_init__(self) -> None:
        if not 2 <= self.folds <= MAX_FOLDS:
            raise VitralError(f"expected at least 2 folds, got {self.folds}", "Five or ten are usual: --folds 5")
        if self.recipe.data.fold:
            raise VitralError(
                f"--data.fold {self.recipe.data.fold} trains a single fold", "Omit it: --folds trains all of them"
            )
        if self.fold_model == "ensemble" and self.recipe.variant not in MEMBER_VARIANTS:
            raise VitralError(
                f"models of the variant {self.recipe.variant} cannot be members of an ensemble",
                "Use --fold-model refit",
            )

    @property
    def num_runs(self) -> int:
        return self.folds + (self.fold_model == "refit")

    def fold_recipe(self, number: int) -> Recipe:
        """The recipe of one fold, with its share of the time limit."""
        recipe = self._with_time_share()
        return replace(recipe, data=replace(recipe.data, fold=f"{number}/{self.folds}"))

    def refit_recipe(self, epochs: int) -> Recipe:
        """The recipe for training on all folds: no validation images, so no early stopping."""
        recipe = self._with_time_share()
        return replace(recipe, epochs=epochs, patience=0, data=replace(recipe.data, fold="all", validation=0.0))

    def _with_time_share(self) -> Recipe:
        if not self.recipe.time_limit:
            return self.recipe
        seconds = parse_duration(self.recipe.time_limit) / self.num_runs
        return replace(self.recipe, time_limit=f"{seconds:.1f}s")

    def write(self, out: Path) -> None:
        """Write folds.json, or check that an existing one has the same settings."""
        file = out / SETTINGS_FILE
        if file.is_file():
            existing = read_settings(out)
            if self._result_settings() != existing._result_settings():
                raise VitralError(f"{out} holds a cross-validation with other settings", "Choose another --out")
        else:
            Run.check_available(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            values = {"folds": self.folds, "fold_model": self.fold_model, "recipe": to_dict(self.recipe)}
            atomic_write(file, dump_json(values, indent=2) + "\n")
        except OSError as error:
            raise VitralError(f"cannot write to {out}: {error.strerror or error}", "Choose another --out") from error

    def _result_settings(self) -> tuple[Any, ...]:
        return self.folds, self.fold_model, self.recipe.result_fields()


def is_cross_validation(path: Path | str) -> bool:
    return (Path(path) / SETTINGS_FILE).is_file()


def read_settings(out: Path) -> FoldSettings:
    """The settings of an existing cross-validation."""
    try:
        values = read_json(out / SETTINGS_FILE)
        recipe = recipe_from_dict(values["recipe"])
        return FoldSettings(recipe=recipe, folds=int(values["folds"]), fold_model=values["fold_model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VitralError(f"cannot read {out / SETTINGS_FILE}: {error}", "Choose another --out") from error


def calibrate_refit(config: ModelConfig, folds: Sequence[FoldPredictions]) -> ModelConfig:
    """The refit's config with a calibration on the out-of-fold logits: all of its own images were trained on."""
    logits, labels = pool_predictions([replace(fold, temperature=1.0) for fold in folds])
    calibration = replace(fit_calibration(logits, labels), fitted_on="out-of-fold")
    return replace(config, calibration=calibration)


def make_ensemble(folders: Sequence[Path], epoch: int) -> tuple[EnsembleViT, ModelConfig]:
    """The ensemble of the models of these run folders."""
    models, configs = zip(*(load_model(folder) for folder in folders), strict=True)
    first = configs[0]
    ensemble = EnsembleViT.average(
        models,
        first.variant,
        [config.calibration.temperature for config in configs],
        [(config.preprocessing.mean, config.preprocessing.std) for config in configs],
    )
    thresholds = [config.calibration.ood_threshold for config in configs]
    fitted = [threshold for threshold in thresholds if threshold is not None]
    threshold = sum(fitted) / len(fitted) if len(fitted) == len(thresholds) else None
    config = replace(
        first,
        architecture=ensemble.config,
        variant="ensemble",
        epoch=epoch,
        calibration=Calibration(ood_threshold=threshold, engine="reference"),
    )
    return ensemble, config


def write_ensemble(out: Path, folders: Sequence[Path], epoch: int) -> None:
    """Write the ensemble and the fingerprints of all images that one of its members was trained on."""
    save_model(out / "model", *make_ensemble(folders, epoch))
    files = [Run(folder).model_dir / TRAINING_IMAGES_FILE for folder in folders]
    if all(file.is_file() for file in files):
        with suppress(FingerprintFormatError):  # some folds were trained by an older version
            concatenate([load_fingerprints(file) for file in files]).save(out / "model" / TRAINING_IMAGES_FILE)


def write_refit(out: Path, refit: Run, folds: Sequence[FoldPredictions]) -> None:
    """Copy the refit's model and calibrate it."""
    model, config = load_model(refit.path)
    save_model(out / "model", model, calibrate_refit(config, folds))
    if (file := refit.model_dir / TRAINING_IMAGES_FILE).is_file():
        shutil.copyfile(file, out / "model" / TRAINING_IMAGES_FILE)
