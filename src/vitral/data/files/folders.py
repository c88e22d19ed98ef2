"""Class folders and CSV lists of image files: `list_folder`.

    photos/ants/*.jpg  photos/bees/*.jpg                    a fraction is held out for validation
    photos/train/ants  photos/val/ants  [photos/test/ants]  existing splits are used
    photos.csv                                              a list of files with their labels (csv_list.py)

Folders without images are not classes. Images in subfolders of a class folder belong to that class. walk.py decides
which files are images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from vitral.data.files.csv_list import CsvList, LabelledFiles, read_csv_list
from vitral.data.files.duplicates import cached_duplicate_groups
from vitral.data.files.exclude import exclude_files
from vitral.data.files.listing import SPLIT_NAMES, DatasetListing, hold_out_missing_splits, make_listing
from vitral.data.files.location import ImageLocation
from vitral.data.files.shards import shards_in_folder_hint
from vitral.data.files.walk import ImageWalk, SkippedFile, SkippedFiles, SkipReason, irregular_file_kind, iter_images
from vitral.data.folds import Fold
from vitral.data.names import LAYOUT_HINT
from vitral.data.targets import DETECT_LABELS, LabelOptions
from vitral.errors import VitralError, shell_quote, truncate_list


def list_folder(
    path: Path,
    validation: float,
    progress: bool = False,
    test_split: float = 0.0,
    exclude: Sequence[str] = (),
    label_options: LabelOptions = DETECT_LABELS,
    fold: Fold | None = None,
) -> DatasetListing:
    """List the images of a folder or CSV file, without those in `exclude`. `label_options` apply to a CSV file.

    Without a validation split, the fraction `validation` is held out; without a test split, the fraction `test_split`.
    With a `fold` of the training and validation images, its images are the test split.
    """
    if not path.exists():
        raise VitralError(f"no folder or list named {path}", LAYOUT_HINT)
    if (kind := irregular_file_kind(path.stat().st_mode)) is not None:
        raise VitralError(f"{path} is {kind}, not a folder or CSV file", LAYOUT_HINT)
    notes: list[str] = []
    if path.is_dir():
        check_single_label(str(path), label_options)
        files, notes = _list_class_folders(path)
        labelled = CsvList(files=files, task="classification")
    else:
        labelled = read_csv_list(path, label_options)
    files, num_excluded = exclude_files(labelled.files, exclude, str(path))
    images = {split: [(ImageLocation(str(file)), label) for file, label in items] for split, items in files.items()}
    source = f"from {path}" + (f", {num_excluded:,} excluded" if num_excluded else "")
    listing = make_listing(
        str(path),
        images,
        source=source,
        hint=LAYOUT_HINT,
        notes=notes,
        task=labelled.task,
        classes=labelled.classes,
    )
    find_copies = partial(cached_duplicate_groups, progress=progress)
    return hold_out_missing_splits(listing, validation, test_split, fold, find_copies)


def check_single_label(name: str, options: LabelOptions) -> None:
    """Refuse another task than classification for data with one class per image."""
    if options.task not in (None, "classification") or options.targets:
        raise VitralError(
            f"{name} has one class per image, but the task is {options.task or 'regression'}",
            "List the images with their labels or targets in a CSV file, or omit --task",
        )


def no_class_folders_error(path: Path, skipped: SkippedFiles | None = None) -> VitralError:
    """The error for a folder whose images, if there are any, are not in class folders."""
    count = sum(1 for _ in iter_images([path]))
    hint, layout = LAYOUT_HINT, f"its {count:,} images to one folder per class: {path}/ants, {path}/bees"
    if count and len(classes := _sibling_classes(path)) > 1:
        parent = f"If {truncate_list(classes, 3)} are the classes, pass the folder that contains them"
        hint = f"{parent}: {shell_quote(path.parent)}\nOtherwise move {layout}"
    elif count:
        hint = f"Move {layout}"
    else:
        hint = shards_in_folder_hint(path) or hint
    reasons = skipped.summary() if skipped is not None and not count else None
    return VitralError(f"{path} has no images in class folders" + (f"; {reasons}" if reasons else ""), hint)


def _sibling_classes(path: Path) -> list[str]:
    """Names of this folder and those next to it that contain images."""
    walk = ImageWalk()
    folders = walk.subfolders(path.parent) if path.name not in ("", "..") else []
    return [folder.name for folder in folders if any(True for _ in walk.images(folder, recursive=False))]


def _list_class_folders(path: Path) -> tuple[LabelledFiles, list[str]]:
    """Images of the class folders in `path`, and notes on skipped files and merged subfolders."""
    skipped = SkippedFiles()
    walk = ImageWalk(skipped.add)
    files: LabelledFiles = {"train": [], "validation": [], "test": []}
    nested: dict[Path, dict[str, None]] = {}  # class folder → names of its subfolders that contain images
    for folder, split in _class_folders(path, walk):
        num_before = len(files[split]) + skipped.counts.total()
        for file in walk.images(folder):
            files[split].append((file, folder.name))
            if file.parent != folder:
                nested.setdefault(folder, {})[file.relative_to(folder).parts[0]] = None
        if len(files[split]) + skipped.counts.total() == num_before:
            skipped.add(SkippedFile(folder, SkipReason.NO_IMAGES))
    if not files["train"]:
        raise no_class_folders_error(path, skipped)
    if len({label for _, label in files["train"]}) == 1:
        _check_folder_level(path, nested)
    return files, [note for note in (skipped.summary(), _nested_note(nested)) if note]


def _class_folders(path: Path, walk: ImageWalk) -> Iterator[tuple[Path, str]]:
    """Class folders and their splits."""
    folders = walk.subfolders(path)
    splits = {folder: SPLIT_NAMES[name] for folder in folders if (name := folder.name.lower()) in SPLIT_NAMES}
    if "train" not in splits.values():  # without a training split, a folder named "test" is a class
        yield from ((folder, "train") for folder in folders)
        return
    for folder in folders:
        if folder in splits:
            yield from ((class_folder, splits[folder]) for class_folder in walk.subfolders(folder))
        else:
            walk.on_skip(SkippedFile(folder, SkipReason.NOT_A_SPLIT))


def _check_folder_level(path: Path, nested: Mapping[Path, Iterable[str]]) -> None:
    """Raise VitralError if the only class folder contains the folders that seem to be the classes."""
    for folder, names in nested.items():
        if len(subfolder_names := list(names)) > 1:
            raise VitralError(
                f"{path} has one class folder, {folder.name}, with the subfolders {truncate_list(subfolder_names)}",
                f"If these are the classes, pass the folder that contains them: {shell_quote(folder)}",
            )


def _nested_note(nested: Mapping[Path, Iterable[str]]) -> str | None:
    if not nested:
        return None
    classes = [f"{folder.name} ({truncate_list(list(names), 3)})" for folder, names in nested.items()]
    return (
        f"subfolders are merged into their class: {truncate_list(classes, 3)}. To use them as classes, move them up "
        "one level or list the images in a CSV file"
    )
