"""Evaluated images that were used for training, whose accuracy says nothing about new images.

A model folder contains training_images.npz, the fingerprints of its training images. Evaluation compares the evaluated
images with them, and training compares the given validation and test splits with its training split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vitral.data.datasets import Dataset, Split
from vitral.data.files.duplicates import CopyMatches, find_copies
from vitral.data.files.fingerprints import (
    FingerprintFormatError,
    ImageFingerprints,
    concatenate,
    fingerprint_files,
    fingerprint_tensor,
    load_fingerprints,
)
from vitral.data.files.remote import is_url
from vitral.data.names import is_file_dataset
from vitral.data.registry.fetch import local_files
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.evaluation.data import EvalTarget, load_dataset_for, run_recipe
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import TRAINING_IMAGES_FILE
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.intervals import Interval, proportion_interval

ALLOW_LEAK_NOTE = "--allow-leak hides this note"
MAX_EXAMPLES = 5
MIN_NEW_IMAGES = 20  # with fewer images that were not used for training, their accuracy says nothing


@dataclass(frozen=True, kw_only=True)
class LeakReport:
    """How many of the evaluated images are training images or copies of training images."""

    num_images: int
    exact: int  # equal bytes or equal pixels
    near: int  # resized, recompressed or slightly cropped copies
    near_checked: bool  # False: only exact copies can be recognised
    examples: tuple[str, ...] = ()  # files
    new_accuracy: Interval | None = None  # on the other images, if there are enough of them
    unchecked: str | None = None  # why the model's training images could not be compared, and what to do

    @property
    def count(self) -> int:
        return self.exact + self.near

    @property
    def num_new(self) -> int:
        return self.num_images - self.count


def fingerprint_split(split: Split) -> ImageFingerprints | None:
    """Fingerprints of a split, before resizing; None for remote shards and sequences that are read on access."""
    if split.fingerprints is not None:
        return split.fingerprints
    if split.locations is not None:
        if any(is_url(location.path) for location in split.locations):
            return None
        return fingerprint_files(split.locations)
    return fingerprint_tensor(split.images) if isinstance(split.images, Tensor) else None


def fingerprint_training_images(dataset: Dataset) -> ImageFingerprints | None:
    """Fingerprints to store with the model. Those of built-in datasets have no thumbnails, to keep models small."""
    if not is_file_dataset(dataset.name) and isinstance(dataset.train.images, Tensor):
        return fingerprint_tensor(dataset.train.images, with_thumbnails=False)
    return fingerprint_split(dataset.train)


def load_training_images(predictor: Predictor) -> ImageFingerprints | None:
    """Fingerprints of a model's training images; None if they are unknown.

    Those of a built-in dataset are computed if its files are on this machine. Raises FingerprintFormatError if the
    stored ones cannot be compared.
    """
    if predictor.path is None or is_checkpoint(predictor.path):
        return None
    name, format_error = predictor.model_config.trained_on, None
    if (file := find_model_dir(predictor.path) / TRAINING_IMAGES_FILE).is_file():
        try:
            return load_fingerprints(file)
        except FingerprintFormatError as error:
            format_error = error
    if name in BUILTIN_DATASETS and local_files(name) is not None:
        return fingerprint_training_images(load_dataset_for(name, predictor, run_recipe(predictor)))
    if format_error is not None:
        raise format_error
    return None


def find_leaks(target: EvalTarget, correct_N: Tensor | None = None) -> LeakReport | None:
    """Images of the target that were used for training; None if that is unknown or certain not to be the case.

    `correct_N` states which predictions are correct, for the accuracy on the other images.
    """
    is_own_data = target.dataset.name == target.predictor.model_config.trained_on
    if is_own_data and target.dataset.name in BUILTIN_DATASETS and target.split_name != "train":
        return None  # an official split, or one that was held out
    try:
        reference = load_training_images(target.predictor)
    except FingerprintFormatError as error:
        return unchecked_report(target.split, error)
    images = fingerprint_target(target) if reference is not None else None
    if reference is None or images is None:
        return None
    matches = find_copies(images, reference)
    if is_own_data and target.split_name in target.dataset.held_out:
        # Near duplicates were kept in one split, by a search in all images at once. Do not contradict it.
        matches = replace(matches, near=np.zeros_like(matches.near))
    return leak_report(matches, target.split, correct_N)


def fingerprint_target(target: EvalTarget) -> ImageFingerprints | None:
    if target.split.locations is not None:
        return fingerprint_split(target.split)
    parts = [fingerprint_split(part) for part in target.source_splits]
    known = [part for part in parts if part is not None]
    return concatenate(known) if len(known) == len(parts) else None


def unchecked_report(split: Split, error: FingerprintFormatError) -> LeakReport:
    reason = (
        f"these images were not compared with the training images: {error.what}; {error.hint.lower()} to check them"
    )
    return LeakReport(num_images=len(split), exact=0, near=0, near_checked=False, unchecked=reason)


def leak_report(matches: CopyMatches, split: Split, correct_N: Tensor | None = None) -> LeakReport:
    """Counts and examples; with `correct_N`, also the accuracy on the images that were not used for training."""
    rows = np.flatnonzero(matches.any)
    examples = [] if split.locations is None else [str(split.locations[row]) for row in rows[:MAX_EXAMPLES]]
    is_new = ~matches.any
    accuracy = None
    is_aligned = correct_N is not None and len(correct_N) == len(is_new)  # not if unreadable files were left out
    if correct_N is not None and is_aligned and len(rows) and is_new.sum() >= MIN_NEW_IMAGES:
        accuracy = proportion_interval(int(correct_N.cpu().numpy()[is_new].sum()), int(is_new.sum()))
    return LeakReport(
        num_images=len(matches.exact),
        exact=int(matches.exact.sum()),
        near=int(matches.near.sum()),
        near_checked=matches.near_checked,
        examples=tuple(examples),
        new_accuracy=accuracy,
    )


def check_splits_for_leaks(dataset: Dataset) -> Mapping[str, LeakReport]:
    """Compare the given validation and test splits of the user's files with the training split.

    Returns a report for each split with copies of training images. Official splits of built-in datasets and splits
    that vitral held out itself are not checked.
    """
    if not is_file_dataset(dataset.name):
        return {}
    splits = {"validation": dataset.validation}
    if dataset.test_locations:  # the test images themselves are not loaded before the evaluation
        splits["test"] = replace(dataset.train, locations=dataset.test_locations)
    splits = {name: split for name, split in splits.items() if name not in dataset.held_out}
    reference = fingerprint_split(dataset.train) if splits else None
    reports = {}
    for name, split in splits.items():
        images = fingerprint_split(split)
        if images is not None and reference is not None:
            reports[name] = leak_report(find_copies(images, reference), split)
    return {name: report for name, report in reports.items() if report.count}


def probe_leak(predictor: Predictor, dataset: Dataset, evaluated: Split) -> LeakReport | None:
    """Evaluated images that are training images of the probe or of the model. None for official splits."""
    if dataset.name in BUILTIN_DATASETS:
        return None
    known, unchecked = [], None
    try:
        known.append(load_training_images(predictor))
    except FingerprintFormatError as error:
        unchecked = unchecked_report(evaluated, error)
    if ("validation" if evaluated is dataset.validation else "test") not in dataset.held_out:
        known.append(fingerprint_split(dataset.train))
    references = [fingerprints for fingerprints in known if fingerprints is not None]
    images = fingerprint_split(evaluated) if references else None
    if images is None:
        return unchecked
    leak = leak_report(find_copies(images, concatenate(references)), evaluated)
    return leak if unchecked is None else replace(leak, unchecked=unchecked.unchecked)


def save_training_images(model_dir: Path, fingerprints: ImageFingerprints | None) -> None:
    if fingerprints is not None:
        fingerprints.save(model_dir / TRAINING_IMAGES_FILE)


def evaluation_warning(leak: LeakReport | None) -> str | None:
    """The first line of a result on images that were, or may have been, used for training; None if there are none."""
    if leak is None or not leak.count:
        return None if leak is None else leak.unchecked
    used = f"{_all_or_count(leak)} {'was' if leak.num_images == 1 else 'were'} used for training{_kind_text(leak)}"
    return f"{used}, so this is not a test result"


def split_warning(name: str, leak: LeakReport) -> str:
    """What `vitral train` says about a given split with copies of training images."""
    subject = f"all {leak.num_images:,}" if leak.count == leak.num_images else f"{leak.count:,} of {leak.num_images:,}"
    effect = (
        "so the epoch is selected on them and the validation accuracy is too high"
        if name == "validation"
        else "so the test accuracy is too high"
    )
    return f"{subject} {name} images are copies of training images{_kind_text(leak)}, {effect}"


def new_images_text(leak: LeakReport) -> str | None:
    """The accuracy on the images that were not used for training; None if there are too few."""
    if leak.new_accuracy is None:
        return None
    return f"Accuracy on the other {leak.num_new:,} images: {leak.new_accuracy.percent()}"


def _all_or_count(leak: LeakReport) -> str:
    if leak.count == leak.num_images:
        return f"all {leak.num_images:,} images" if leak.num_images > 1 else "this image"
    return f"{leak.count:,} of these {leak.num_images:,} images"


def _kind_text(leak: LeakReport) -> str:
    if not leak.near:
        return ""
    copies = "resized, recompressed or cropped"
    return f" ({copies})" if not leak.exact else f" ({leak.near:,} of them {copies})"
